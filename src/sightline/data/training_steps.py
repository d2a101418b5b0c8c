"""The steps of a run: those that `sightline.step` names, and the training steps detected outside of them.

A training step ends when an optimizer has stepped; optimizers of different weights that take turns, as in a
GAN, end one step together. A step that a gradient scaler skips ends where the scaler is updated. It begins
with the inputs of its first forward pass, so that building the model, an evaluation and a log line between
two steps belong to neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.data.trace_data import (
    I32,
    I64,
    KINDS,
    LEVELS,
    OPTIMIZER_STEP,
    PHASES,
    REQUIRES_GRAD,
    StepInfo,
    TraceData,
)
from sightline.patterns import bare_name

if TYPE_CHECKING:
    from sightline.data.index import Index

_FORWARD, _BACKWARD, _OPTIMIZER = (PHASES.index(name) for name in ("forward", "backward", "optimizer"))
_WEIGHTS = tuple(map(KINDS.index, ("parameter", "buffer", "state")))
_PARAMETER = KINDS.index("parameter")
_LONGEST: Final = 1 << 51  #: nanoseconds
#: Nanoseconds in which no batch is prepared: an optimizer is built, a file is read.
_PAUSE: Final = 50_000_000
#: The op of a gradient scaler at the end of each step, whether the optimizer stepped or not.
SCALER_UPDATE: Final = "_amp_update_scale_"


def steps_of(index: Index) -> list[StepInfo]:
    """Every step in order of its begin; detected ones are called ``step0``, ``step1`` …"""
    named = [_clip_times(step) for step in index.raw.steps if step.name != OPTIMIZER_STEP]
    detected = [StepInfo("", *span) for span in _StepDetector(index, named).spans()]
    ordered = sorted([*named, *detected], key=lambda step: (step.first_op, step.first_call, step.start))
    steps, number = [], 0
    for at, step in enumerate(ordered):
        steps.append(step if step.name else replace(step, name=f"step{number}"))
        number += not contains_next(ordered, at)
    return steps


def innermost_steps(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """The steps that contain no other: of epochs and the steps in them, the steps."""
    return [step for at, step in enumerate(steps) if not contains_next(steps, at)]


def contains_next(steps: Sequence[StepInfo], at: int) -> bool:
    """Whether the next step begins before this one ends."""
    if at + 1 == len(steps):
        return False
    step, following = steps[at], steps[at + 1]
    if step.end_op > step.first_op or following.end_op > following.first_op:
        return following.first_op < step.end_op
    return following.first_call < step.end_call


def _clip_times(step: StepInfo) -> StepInfo:
    """A step with its times clipped: those of a damaged file may be any."""
    start, duration = (min(max(time, 0), _LONGEST) for time in (step.start, step.duration))
    return replace(step, start=start, duration=duration)


def _inside(first: int, end: int, steps: Sequence[StepInfo]) -> bool:
    return any(step.first_op <= first and end <= step.end_op for step in steps)


@dataclass(slots=True)
class _StepEnd:
    """The end of a step: an optimizer's step, or the update of a scaler that skipped one."""

    first_op: int
    end_op: int
    end_call: int
    time: int
    weights: set[int] = field(default_factory=set)  #: the storages of the weights that were changed


#: First and last op, first and last call, start and duration.
_Span = tuple[int, int, int, int, int, int]


class _StepDetector:
    """Finds the training steps of a recording."""

    def __init__(self, index: Index, named: Sequence[StepInfo]) -> None:
        self._index = index
        self._data = index.raw
        self._named = named

    def spans(self) -> Iterator[_Span]:
        ends = self._step_ends()
        first, call = 0, 0
        frames = self._data.ops.frame
        again: set[int] | None = None  # the frames that the steps after the first one run in
        if len(ends) > 1:
            again = {-1, *np.unique(frames[ends[0].end_op : ends[-1].end_op]).tolist()}
        for at, ending in enumerate(ends):
            for step in self._named:
                if first < step.end_op <= ending.first_op:
                    first, call = step.end_op, max(call, step.end_call)
            limit = ends[at + 1].first_op if at + 1 < len(ends) else len(self._data.ops)
            if not len(self._data.ops):  # module calls alone
                yield self._with_times(0, 0, call, ending.end_call, ending.time)
                call = ending.end_call
                continue
            start = self._first_op(first, ending.end_op, None if at else again, single=len(ends) == 1)
            end = self._end_op(start, ending.end_op, limit)
            calls = self._data.calls.first_op
            first_call = max(call, int(np.searchsorted(calls, start)))
            call = max(first_call, int(np.searchsorted(calls, end)))
            yield self._with_times(start, end, first_call, call, ending.time)
            first = end

    def _with_times(self, start: int, end: int, first_call: int, end_call: int, over: int) -> _Span:
        ops, calls = self._data.ops, self._data.calls
        begins = [int(ops.start[start])] if end > start else []
        begins += [int(calls.start[first_call])] if end_call > first_call else []
        begin = min(begins, default=over)
        if end > start:
            over = max(over, int(ops.start[end - 1] + ops.duration[end - 1]))
        return start, end, first_call, end_call, begin, max(over - begin, 0)

    # -- where steps end ---------------------------------------------------------------------------------

    def _step_ends(self) -> list[_StepEnd]:
        """The ends of the steps in order; optimizers that take turns share one."""
        marks = [
            _StepEnd(step.first_op, step.end_op, step.end_call, step.start + step.duration)
            for step in map(_clip_times, self._data.steps)
            if step.name == OPTIMIZER_STEP and not _inside(step.first_op, step.end_op, self._named)
        ]
        ops, values = self._data.ops, self._data.values
        for mark in marks:
            offsets = ops.input_offsets[mark.first_op : mark.end_op + 1]
            reads = ops.inputs[offsets[0] : offsets[-1]]
            readers = np.repeat(ops.phase[mark.first_op : mark.end_op], np.diff(offsets))
            weights = reads[(values.kind[reads] == _PARAMETER) & (readers == _OPTIMIZER)]
            mark.weights = set(values.storage[weights].tolist())
        skipped = [
            each
            for each in self._skipped_steps(marks)
            if not _inside(each.first_op, each.end_op, self._named)
        ]
        merged: list[_StepEnd] = []
        for ending in sorted([*marks, *skipped], key=lambda each: each.end_op):
            last = merged[-1] if merged else None
            if last is None or not last.weights or not ending.weights or last.weights & ending.weights:
                merged.append(ending)
            else:
                ending.weights |= last.weights
                merged[-1] = ending
        return merged

    def _skipped_steps(self, marks: Sequence[_StepEnd]) -> Iterator[_StepEnd]:
        """Updates of a gradient scaler after a backward pass without an optimizer's step."""
        ops = self._data.ops
        stepped = np.array([mark.end_op for mark in marks], dtype=np.int64)
        before = 0
        for op in scaler_updates(self._data):
            backward = (ops.phase[before:op] == _BACKWARD).any()
            if backward and not ((stepped > before) & (stepped <= op)).any():
                call = int(np.searchsorted(self._data.calls.first_op, op))
                yield _StepEnd(op, op + 1, call, int(ops.start[op] + ops.duration[op]))
            before = op

    def _end_op(self, start: int, end: int, limit: int) -> int:
        """The end of a step, with the ops after the optimizer that read its results: ``loss.item()``.

        Ops between them may take averages of weights.
        """
        ops, values, at = self._data.ops, self._data.values, end
        while at < limit and ops.phase[at] == _FORWARD and ops.call[at] < 0:
            reads = ops.inputs[ops.input_offsets[at] : ops.input_offsets[at + 1]]
            own = (values.producer[reads] >= start) & (values.producer[reads] < end)
            if (own & ~np.isin(values.kind[reads], _WEIGHTS)).any() or start <= ops.parent[at] < end:
                end = at + 1
            else:
                outputs = ops.outputs[ops.output_offsets[at] : ops.output_offsets[at + 1]]
                if not len(reads) or (values.flags[outputs] & REQUIRES_GRAD).any():  # of the next step
                    break
            at += 1
        return end

    # -- where they begin --------------------------------------------------------------------------------

    def _first_op(self, first: int, end: int, frames: set[int] | None, *, single: bool) -> int:
        """The first op of a step that ends at ``end`` and begins at ``first`` at the earliest.

        Of the ops that the first step reads from, only those in the frames of later steps are its own: the
        program does the others once, before it. A single step begins after the last pause.
        """
        ops, calls = self._data.ops, self._data.calls
        linked = ops.forward[first:end][ops.phase[first:end] == _BACKWARD]
        linked = linked[linked >= first]
        if not len(linked):  # without dispatcher ops: those that the loss was computed from
            linked = self._ancestors(first, end)
        if len(linked):
            at = self._outermost(int(linked.min()))
        else:
            call = int(np.searchsorted(calls.first_op, first))
            at = int(calls.first_op[call]) if call < len(calls) else first
        at = at if first <= at < end else first
        lines = self._index.op_user_frames
        while at > first:
            before = self._outermost(at - 1)
            if not first <= before < at or (frames is not None and int(ops.frame[before]) not in frames):
                break
            if single and ops.start[at] - ops.start[at - 1] - ops.duration[at - 1] > _PAUSE:
                break
            in_line = lines[before] == lines[at] >= 0  # a step does not begin inside a line
            if not in_line and not self._is_read(before, at, end):
                break
            at = before
        return at

    def _ancestors(self, first: int, end: int) -> I64:
        """The ops from ``first`` on that the losses of the backward passes before ``end`` come from."""
        ops, values = self._data.ops, self._data.values
        backwards = [
            number for number, name in enumerate(self._data.names) if bare_name(name, "api") == "backward"
        ]
        waiting = (first + np.flatnonzero(np.isin(ops.name[first:end], backwards))).tolist()
        ancestors: set[int] = set()
        while waiting:
            inputs = ops.inputs_of(waiting.pop())
            makers = {int(values.producer[value]) for value in inputs if values.kind[value] not in _WEIGHTS}
            new = {maker for maker in makers if maker >= first} - ancestors
            waiting += new
            ancestors |= new
        return np.array(sorted(ancestors), dtype=np.int64)

    def _outermost(self, op: int) -> int:
        """The first op of the outermost module call around an op.

        Outside of all calls it is the op itself, or the API call that an aten op came from.
        """
        call = int(self._data.ops.call[op])
        if call >= 0:
            return int(self._data.calls.first_op[self._roots[call]])
        parent = int(self._data.ops.parent[op])
        return parent if parent >= 0 else op

    @cached_property
    def _roots(self) -> I32:
        """The outermost call around each module call."""
        roots = np.arange(len(self._data.calls), dtype=np.int32)
        for call, parent in enumerate(self._data.calls.parent.tolist()):  # a parent always comes first
            if parent >= 0:
                roots[call] = roots[parent]
        return roots

    def _is_read(self, first: int, at: int, end: int) -> bool:
        """Whether outputs of the ops from ``first`` to before ``at`` are read between there and ``end``."""
        ops, values = self._data.ops, self._data.values
        outputs = ops.outputs[ops.output_offsets[first] : ops.output_offsets[at]]
        outputs = outputs[~np.isin(values.kind[outputs], _WEIGHTS)]
        return any(
            at <= reader < end
            for value in np.unique(outputs).tolist()
            for reader in self._index.consumers(value)
        )


def scaler_updates(data: TraceData) -> list[int]:
    """The ops that update a gradient scaler: aten ops if they were recorded, else API calls."""
    ops = data.ops
    numbers = [number for number, name in enumerate(data.names) if name.rpartition(".")[2] == SCALER_UPDATE]
    updates = np.isin(ops.name, numbers)
    aten = updates & (ops.level == LEVELS.index("aten"))
    ids: list[int] = np.flatnonzero(aten if aten.any() else updates).tolist()
    return ids
