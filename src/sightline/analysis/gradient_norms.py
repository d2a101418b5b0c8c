"""The norm of the gradients of a step: of all that its optimizers use, as they were before clipping.

It is known where the run computed it, to clip by it, or where every one of these gradients was measured. The
norm of a part of them, an infinity norm, or one for each of several models is not shown as if it were that.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from sightline.data.index import Index
from sightline.data.optimizer_steps import OptimizerStep, optimizer_steps
from sightline.data.trace_data import I64, LEVELS, PHASES, StepInfo, TraceData
from sightline.data.training_steps import scaler_updates
from sightline.patterns import bare_name

_BACKWARD, _OPTIMIZER = PHASES.index("backward"), PHASES.index("optimizer")
_GRADIENT: Final = ".grad"  #: the end of the name of each
_NORMS: Final = frozenset({"linalg_vector_norm", "norm", "vector_norm", "_foreach_norm"})
_UNSCALES: Final = frozenset({"_amp_foreach_non_finite_check_and_unscale_"})
_CLIPPING: Final = frozenset(
    "clip_grad_norm_ clip_grad_value_ clip_grads_with_norm_ _clip_grads_with_norm_ get_total_norm "
    "_get_total_norm".split()
)
#: The gradient of a parameter that belongs to no module.
_UNNAMED: Final = re.compile(r"parameter \d+\.grad")
_MAX_VERSIONS: Final = 16  #: that clipping makes of a gradient


@dataclass(frozen=True, slots=True)
class _Clipping:
    """A call that computed the norm of some gradients."""

    op: int  #: which computed it
    norm: int  #: value
    gradients: frozenset[int]  #: values
    is_euclidean: bool


class GradientNorms:
    """The norms of gradients in the steps of a run; ``number`` gives the number of a value, if known."""

    def __init__(
        self, index: Index, steps: Sequence[StepInfo], number: Callable[[Sequence[int]], float | None]
    ) -> None:
        self._index, self._data, self._steps, self._number = index, index.raw, steps, number

    def of(self, step: StepInfo, *, skipped: bool = False) -> float | None:
        """The norm of the gradients of a step; None where it is not known.

        None as well for several models that are trained in turns, as in a GAN: each has a norm of its own.
        """
        updates = self._updates_of(step)
        optimizers = {each.optimizer for each in updates}
        if optimizers & self._in_turns or (len(optimizers) > 1 and -1 in optimizers):
            return None
        if skipped:
            gradients, whole = self._unscaled(step), len(self._optimizers) < 2
        else:
            gradients = self._used(step, self._names(optimizers))
            whole = self._are_all(gradients, updates)
        if gradients is None:
            return None
        clipping = self._clipping_of(step)
        if clipping is not None:
            # Clipping changes gradients in place, so that they stay in their storages.
            storages = self._data.values.storage
            are_same = set(storages[gradients].tolist()) <= set(storages[list(clipping.gradients)].tolist())
            count = len(gradients) if gradients else self._count(updates)
            if whole and are_same and len(clipping.gradients) == count:
                return self._divided(self._number([clipping.norm]), step)
        return self._divided(self._measured(gradients), step) if whole and gradients else None

    def is_clipped(self, step: StepInfo) -> bool:
        """Whether a step clips its gradients, or computes their norm for it."""
        first, end = np.searchsorted(self._clips, [step.first_op, step.end_op]).tolist()
        return bool(first < end)

    @cached_property
    def _clips(self) -> I64:
        """The ops inside of clipping."""
        frames = self._data.ops.frame
        inside = np.append(self._callers >= 0, False)[frames]
        return np.flatnonzero(inside)

    # -- the gradients that an update uses ---------------------------------------------------------------

    @cached_property
    def _updates(self) -> list[OptimizerStep]:
        return sorted(optimizer_steps(self._data), key=lambda each: each.info.end_op)

    @cached_property
    def _optimizers(self) -> list[dict[str, Any]]:
        info = self._data.info.get("training")
        listed = info.get("optimizers") if isinstance(info, dict) else None
        return [row if isinstance(row, dict) else {} for row in listed] if isinstance(listed, list) else []

    def _updates_of(self, step: StepInfo) -> list[OptimizerStep]:
        """The updates in a step: also one that ran no op, because it found no gradient."""
        ends = self._ends
        return self._updates[bisect_right(ends, step.first_op) : bisect_right(ends, step.end_op)]

    @cached_property
    def _ends(self) -> list[int]:
        return [each.info.end_op for each in self._updates]

    @cached_property
    def _in_turns(self) -> set[int]:
        """The optimizers of steps in which several step, with a backward pass between them."""
        turns: set[int] = set()
        for updates in map(self._updates_of, self._steps):
            optimizers = {each.optimizer for each in updates}
            if len(optimizers) > 1:
                between = self._data.ops.phase[updates[0].info.end_op : updates[-1].info.first_op]
                turns |= optimizers if (between == _BACKWARD).any() else set()
        return turns

    def _names(self, optimizers: Iterable[int]) -> frozenset[str] | None:
        """The names of the gradients that some optimizers use; None if they are not known."""
        names: set[str] = set()
        for row in (self._optimizers[each] for each in optimizers if 0 <= each < len(self._optimizers)):
            known = row.get("names")
            counts = row.get("parameters"), row.get("unknown")
            if not isinstance(known, list) or any(type(count) is not int for count in counts):
                return None
            if len(known) + row["unknown"] != row["parameters"]:
                return None
            names.update(f"{name}{_GRADIENT}" for name in known)
        return frozenset(names) or None

    def _used(self, step: StepInfo, names: frozenset[str] | None) -> list[int]:
        """The gradients of a step: for each name the one that the optimizer read, else the last."""
        ops, values = self._data.ops, self._data.values
        producers, ids = self._named
        first, end = np.searchsorted(producers, [step.first_op, step.end_op]).tolist()
        own = ids[first:end].tolist()
        readers = np.repeat(
            ops.phase[step.first_op : step.end_op],
            np.diff(ops.input_offsets[step.first_op : step.end_op + 1]),
        )
        reads = ops.inputs[ops.input_offsets[step.first_op] : ops.input_offsets[step.end_op]]
        used = set(reads[readers == _OPTIMIZER].tolist())
        own.sort(key=used.__contains__)
        chosen = {self._data.names[values.name[value]]: value for value in own}
        return [
            value
            for name, value in chosen.items()
            if names is None or name in names or _UNNAMED.fullmatch(name)
        ]

    @cached_property
    def _named(self) -> tuple[I64, I64]:
        """The ops that made a gradient of a parameter, in order, and these gradients."""
        values, names = self._data.values, self._data.names
        grads = np.array([name.endswith(_GRADIENT) for name in names] or [False])
        ids = np.flatnonzero((values.name >= 0) & grads[values.name])
        order = np.argsort(values.producer[ids], kind="stable")
        return values.producer[ids[order]].astype(np.int64), ids[order].astype(np.int64)

    def _are_all(self, gradients: Sequence[int], updates: Sequence[OptimizerStep]) -> bool:
        """Whether these are all gradients that the updates found."""
        count = self._count(updates)
        if count >= 0:
            return not gradients or len(gradients) == count
        foreign = any(row.get("foreign") for row in self._optimizers)
        names = (self._data.names[self._data.values.name[value]] for value in gradients)
        return not foreign or any(map(_UNNAMED.fullmatch, names))

    def _count(self, updates: Sequence[OptimizerStep]) -> int:
        """How many gradients some updates found; of each optimizer its last counts. -1 if it is not known.

        Of a long run only the first updates are known; later ones of an optimizer find as many if all of
        those did.
        """
        last = {each.optimizer: each.gradients for each in updates}
        counts = [self._usual.get(optimizer, -1) if count < 0 else count for optimizer, count in last.items()]
        return sum(counts) if counts and min(counts) >= 0 else -1

    @cached_property
    def _usual(self) -> dict[int, int]:
        """The number of gradients that each optimizer found in its known updates, if always the same."""
        found: dict[int, set[int]] = {}
        for each in self._updates:
            found.setdefault(each.optimizer, set()).add(each.gradients)
        return {optimizer: max(counts) for optimizer, counts in found.items() if len(counts - {-1}) == 1}

    def _unscaled(self, step: StepInfo) -> list[int] | None:
        """The gradients of a step that a scaler skipped: those that it had divided by the scale."""
        first, end = np.searchsorted(self._unscales, [step.first_op, step.end_op]).tolist()
        gradients: list[int] = []
        for op in self._unscales[first:end].tolist():
            flag = self._data.ops.inputs_of(op)[-2]  # which becomes 1 where a gradient is not finite
            made = self._index.values_made_by(op)
            gradients += (value for value in made if self._data.values.previous[value] != flag)
        return gradients or None

    @cached_property
    def _unscales(self) -> I64:
        return ops_named(self._data, _UNSCALES)

    # -- numbers -----------------------------------------------------------------------------------------

    def _measured(self, gradients: Sequence[int]) -> float | None:
        """The norm of gradients before they were clipped, from their statistics."""
        rows = [self._index.stat_row(self._versions(value)[-1]) for value in gradients]
        if min(rows) < 0:
            return None
        stats = self._data.stats
        if stats.nans[rows].any():
            return math.nan
        if stats.infs[rows].any():
            return math.inf
        with np.errstate(over="ignore"):
            return math.sqrt(float((stats.l2[rows] ** 2).sum()))

    def _divided(self, norm: float | None, step: StepInfo) -> float | None:
        """The norm without the scale of a gradient scaler, where a fused optimizer divides by it."""
        first, end = np.searchsorted(self._dividing, [step.first_op, step.end_op]).tolist()
        if norm is None or first == end:
            return norm
        first, end = (bisect_left(self._scaler_updates, op) for op in (step.first_op, step.end_op))
        if first == end:
            return None
        scale = self._number([self._data.ops.inputs_of(self._scaler_updates[end - 1])[0]])
        return norm / scale if scale else None

    @cached_property
    def _scaler_updates(self) -> list[int]:
        return scaler_updates(self._data)

    @cached_property
    def _dividing(self) -> I64:
        """The ops of optimizers that divide the gradients by a scale."""
        forms, ops = self._data.forms, self._data.ops
        fused = np.flatnonzero(["_fused_" in name for name in self._data.names])
        ids = np.flatnonzero(np.isin(ops.name, fused))
        scaled = [(forms[int(form)].kwargs or {}).get("grad_scale") is not None for form in ops.form[ids]]
        return ids[np.array(scaled, dtype=np.bool_)]

    def _versions(self, value: int) -> list[int]:
        """A gradient and those it was before clipping changed it."""
        values, frames = self._data.values, self._data.ops.frame
        chain = [value]
        while len(chain) < _MAX_VERSIONS:
            op, previous = int(values.producer[chain[-1]]), int(values.previous[chain[-1]])
            if op < 0 or previous < 0 or frames[op] < 0 or self._callers[frames[op]] < 0:
                break
            chain.append(previous)
        return chain

    # -- clipping ----------------------------------------------------------------------------------------

    @cached_property
    def _callers(self) -> I64:
        """For each frame inside of clipping the frame that called for it; -1 for others."""
        data = self._data
        clips = [code.function.rpartition(".")[2] in _CLIPPING for code in data.codes]
        callers: list[int] = []
        for code, parent in zip(data.frames.code.tolist(), data.frames.parent.tolist(), strict=True):
            outer = callers[parent] if parent >= 0 else -1
            callers.append(outer if outer >= 0 or not clips[code] else max(parent, 0))
        return np.array(callers, dtype=np.int64)

    def _clipping_of(self, step: StepInfo) -> _Clipping | None:
        """The last call in a step that computed a norm, if it is that of what the backward passes left."""
        last = bisect_left(self._clippings, step.end_op, key=lambda each: each.op) - 1
        if last < 0 or self._clippings[last].op < step.first_op or not self._clippings[last].is_euclidean:
            return None
        after = self._data.ops.phase[self._clippings[last].op : step.end_op] == _BACKWARD
        return None if after.any() else self._clippings[last]

    @cached_property
    def _clippings(self) -> list[_Clipping]:
        """The calls that computed the norm of gradients: the norm of a stack of the norms of each."""
        return list(self._find_clippings()) if len(self._clips) else []

    def _find_clippings(self) -> Iterator[_Clipping]:
        ops, values = self._data.ops, self._data.values
        norms = np.intersect1d(ops_named(self._data, _NORMS), self._clips)
        gradients: set[int] = set()
        found = -1
        for op in norms.tolist():
            reads, results = ops.inputs_of(op), ops.outputs_of(op)
            maker = int(values.producer[reads[0]]) if len(reads) == 1 else -1
            if maker < 0 or self._bare_name(maker) != "stack":
                gradients.update(reads)
            elif len(results) == 1 and results[0] != found:  # not the aten op of an API call
                found = results[0]
                yield _Clipping(op, found, frozenset(gradients), self._order(op) == 2)
                gradients = set()

    def _order(self, op: int) -> Any:
        """Which norm an op computes: 2 unless its arguments say another."""
        form = self._data.forms[int(self._data.ops.form[op])]
        given = [*form.args[1:], *(form.kwargs or {}).values()]
        return next((each for each in given if type(each) in (int, float, str)), 2)

    # -- ops ---------------------------------------------------------------------------------------------

    def _bare_name(self, op: int) -> str:
        ops = self._data.ops
        return bare_name(self._data.names[ops.name[op]], LEVELS[ops.level[op]])


def ops_named(data: TraceData, bare_names: frozenset[str], level: str | None = None) -> I64:
    """The ops of these names, without namespaces and overloads."""
    ops = data.ops
    mask = np.zeros(len(ops), dtype=np.bool_)
    for number, each in enumerate(LEVELS):
        if level in (None, each):
            ids = [id for id, name in enumerate(data.names) if bare_name(name, each) in bare_names]
            mask |= (ops.level == number) & np.isin(ops.name, ids)
    return np.flatnonzero(mask)
