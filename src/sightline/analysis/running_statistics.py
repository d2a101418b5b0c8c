"""Running statistics that a batch norm in training mode updates without saying so: its schema names no write.

A buffer therefore stays one value, whose numbers are those of the first time it was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import Final

import numpy as np

from sightline.data.index import Index
from sightline.data.op_groups import BATCH_NORMS
from sightline.data.rows import Op, Value

_NORMS: Final = BATCH_NORMS | {"instance_norm"}
_BUFFERS: Final = ("running_mean", "running_var")
_TRAINING: Final = {"batch_norm": ("training", 5), "instance_norm": ("use_input_stats", 5)}


class RunningStatistics:
    """The updates of running statistics in one recording."""

    def __init__(self, index: Index) -> None:
        self._index = index

    @cached_property
    def updates(self) -> dict[int, list[int]]:
        """The ops that updated each buffer, in order."""
        data = self._index.raw
        names = [id for id, name in enumerate(data.names) if _bare(name) in _NORMS]
        updates: dict[int, list[int]] = {}
        for id in np.flatnonzero(np.isin(data.ops.name, names)).tolist():
            op: Op = self._index.ops[id]
            name, place = _TRAINING.get(_bare(op.name), ("training", 5))
            if op.args.get(name, op.args.get(place)) is not True:
                continue
            named = [op.args[name] for name in _BUFFERS if isinstance(op.args.get(name), Value)]
            for value in named or op.inputs:
                if named or value.kind == "buffer":
                    updates.setdefault(value.id, []).append(id)
        return updates

    def is_outdated(self, value: int, op: int) -> bool:
        """Whether the numbers of a value, taken when it was first used, are not those that an op reads."""
        return bisect_left(self.updates.get(value, []), op) > 0


def _bare(name: str) -> str:
    """``batch_norm`` of ``F.batch_norm``, ``native_batch_norm`` of ``native_batch_norm.out``."""
    return name.removeprefix("torch.").removeprefix("F.").partition(".")[0]
