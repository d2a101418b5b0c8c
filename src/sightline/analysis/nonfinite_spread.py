"""How far the NaN or infinity of an op went: the values it reached, the loss, the gradients."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np

from sightline.analysis.nonfinite import NonFiniteOp, carriers
from sightline.data.index import Index, Value
from sightline.data.trace_data import PHASES

_BACKWARD_CALLS: Final = ("Tensor.backward", "torch.autograd.backward", "torch.autograd.grad")


class Spread:
    """How far the NaN or infinity of one op went."""

    def __init__(self, index: Index, source: NonFiniteOp) -> None:
        self._index, self._source = index, source
        self._reached = carriers(index, source.value.id)
        stats, producers = index.raw.stats, index.raw.values.producer
        bad = stats.nans > 0 if source.nans else (stats.nans > 0) | (stats.infs > 0)
        later = producers[stats.value] > source.op.id
        #: how many values were measured after the op
        self.measured_later = int(later.sum())
        #: the values measured later that hold it, in the order of their ids
        self.values = [value for value in stats.value[bad & later].tolist() if value in self._reached]

    def includes(self, finding: NonFiniteOp) -> bool:
        """Whether a later finding is a consequence: one of its bad inputs came from this op."""
        bad = [value.id for value in finding.op.inputs if value.stats is not None and not value.stats.finite]
        return not self._reached.isdisjoint(bad)

    @property
    def gradients(self) -> int:
        """How many gradients of parameters hold it; those of steps that were not taken have no name."""
        return sum(self._index.values[value].name.endswith(".grad") for value in self.values)

    @property
    def reaches_gradients(self) -> bool:
        """Whether a gradient holds it, of a parameter or of a value on the way there."""
        return any(self._index.values[value].kind == "gradient" for value in self.values)

    @property
    def is_loss(self) -> bool:
        """Whether the op's own result is a loss that ``backward`` was called on."""
        return self._source.value.id in self._losses

    @property
    def reaches_loss(self) -> bool:
        """Whether a loss, which ``backward`` was called on, holds it."""
        return not self._losses.isdisjoint(self._reached)

    @cached_property
    def _losses(self) -> set[int]:
        ops = self._index.raw.ops
        names = [id for id, name in enumerate(self._index.raw.names) if name in _BACKWARD_CALLS]
        starts = np.flatnonzero(np.isin(ops.name, names)).tolist()
        if not starts:
            in_backward = ops.phase == PHASES.index("backward")
            starts = np.flatnonzero(in_backward & (np.diff(ops.input_offsets) > 0)).tolist()[:1]
        roots = [self._index.ops[start].inputs[0] for start in starts if len(self._index.ops[start].inputs)]
        return {root.id for root in roots if root.meta.numel == 1}

    @property
    def last(self) -> Value:
        """The value that was produced last of those that hold it."""
        producers = self._index.raw.values.producer
        value: Value = self._index.values[max(self.values, key=lambda value: int(producers[value]))]
        return value
