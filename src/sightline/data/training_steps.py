"""The steps of a run: those that `sightline.step` names, and the training steps detected outside of them.

A training step ends when an optimizer has stepped; optimizers of different weights that step one after the
other, or take turns, as in a GAN, end one step together. Those of two trainings, of which one follows the
other, do not. A step that a gradient scaler skips ends where the scaler is updated. It begins with the inputs
of its first forward pass, so that building the model, an evaluation and a log line between two steps belong
to neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.data.optimizer_steps import clip_times, optimizer_steps
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
#: Nanoseconds in which no batch is prepared: an optimizer is built, a file is read.
_PAUSE: Final = 50_000_000
#: The first optimizer of a run, which begins a step where several step in it, among storages of weights.
_FIRST_OPTIMIZER: Final = -2  # -1 is no storage
#: The op of a gradient scaler at the end of each step, whether the optimizer stepped or not.
SCALER_UPDATE: Final = "_amp_update_scale_"
_SCALER_FILE: Final = "amp/grad_scaler.py"


def steps_of(index: Index) -> list[StepInfo]:
    """Every step in order of its begin; detected ones are called ``step0``, ``step1`` …

    With ``last=`` they keep the numbers that they had in the run, where these are known.
    """
    named = [clip_times(step) for step in index.raw.steps if step.name != OPTIMIZER_STEP]
    detected = [StepInfo("", *span) for span in _StepDetector(index, named).spans()]
    ordered = sorted([*named, *detected], key=lambda step: (step.first_op, step.first_call, step.start))
    steps: list[StepInfo] = []
    number = dropped_steps(index.raw) or 0
    for at, step in enumerate(ordered):
        steps.append(step if step.name else replace(step, name=f"step{number}"))
        number += not contains_next(ordered, at)
    return steps


def dropped_steps(data: TraceData) -> int | None:
    """How many steps ended before the first op that ``last=`` kept; None where that is not known.

    Steps of an optimizer are counted while the program runs. They are training steps if there is only one
    optimizer, no scaler that may skip some, and no step with a name.
    """
    info = data.info
    if not info.get("dropped"):
        return 0
    training = info.get("training")
    training = training if isinstance(training, dict) else {}
    listed, count = training.get("optimizers"), training.get("count")
    single = isinstance(listed, list) and len(listed) == 1
    named = any(step.name != OPTIMIZER_STEP for step in data.steps)
    scaled = any(name.rpartition(".")[2] == SCALER_UPDATE for name in data.names)
    if (
        not single or type(count) is not int or named or scaled or info.get("unfinished")
    ):  # the journal may be ahead of the count
        return None
    kept = sum(step.name == OPTIMIZER_STEP for step in data.steps)
    return max(count - kept, 0)


def may_lack_beginning(index: Index) -> bool:
    """Whether ``last=`` may have dropped the first ops of the first step.

    It is surely whole if it begins where later steps begin, and has as many ops as the largest of them. One
    later step is no evidence: a window of accumulated gradients may be cut to the size of a last, short one.
    """
    data, steps = index.raw, innermost_steps(index.step_infos)
    if not data.info.get("dropped") or not steps:
        return bool(steps and data.info.get("incomplete"))
    first, *later = steps
    if not len(data.ops):
        return first.first_call == 0
    begins = {_begin_of(data, step) for step in later}
    most = max((step.end_op - step.first_op for step in later), default=0)
    return len(later) < 2 or _begin_of(data, first) not in begins or first.end_op - first.first_op < most


def _begin_of(data: TraceData, step: StepInfo) -> tuple[int, int]:
    """The name and the stack of the first op of a step."""
    at = min(step.first_op, len(data.ops) - 1)
    return int(data.ops.name[at]), int(data.ops.frame[at])


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


def _inside(first: int, end: int, steps: Sequence[StepInfo]) -> bool:
    return any(step.first_op <= first and end <= step.end_op for step in steps)


@dataclass(slots=True)
class _StepEnd:
    """The end of a step: an optimizer's step, or the update of a scaler that skipped one."""

    first_op: int
    end_op: int
    end_call: int
    time: int
    #: The storages of the weights that were changed; below 0 the optimizer, which may change others next.
    weights: set[int] = field(default_factory=set)


class _Turns:
    """Which optimizers take turns, by the weights that each of their steps changed."""

    def __init__(self, ends: Sequence[_StepEnd]) -> None:
        self.ends = ends
        self._first: dict[int, int] = {}  # the first and the last step that changed each weight
        self._last: dict[int, int] = {}
        runs: list[int] = []  # how many steps of one optimizer follow each other
        for at, ending in enumerate(ends):
            for weight in ending.weights:
                self._first.setdefault(weight, at)
                self._last[weight] = at
            if at and ending.weights & ends[at - 1].weights:
                runs[-1] += 1
            else:
                runs.append(1)
        self._in_a_row = [run for run in runs for _ in range(run)]

    def are_taken(self, at: int) -> bool:
        """Whether the optimizers of a step and of the one before it take turns.

        In a GAN at least one of them steps once at a time, and the other one steps again after it. Where each
        steps once in all they are taken for one step.
        """
        before, after = self.ends[at - 1].weights, self.ends[at].weights
        returns = self._start_of(after) < self._end_of(before)
        single = min(self._in_a_row[at - 1 : at + 1]) == 1
        once = self._start_of(before) == at - 1 and self._end_of(after) == at
        return (single and returns) or once

    def _start_of(self, weights: set[int]) -> int:
        return min(self._first[weight] for weight in weights)

    def _end_of(self, weights: set[int]) -> int:
        return max(self._last[weight] for weight in weights)


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
        again: set[int] | None = None  # the frames that run again in further steps
        if len(ends) > 1:
            again = {-1, *np.unique(frames[ends[0].end_op : ends[-1].end_op]).tolist()}
        for at, ending in enumerate(ends):
            for step in self._named:
                if first < step.end_op <= ending.first_op:
                    first, call = step.end_op, max(call, step.end_call)
            is_last = at + 1 == len(ends)
            limit = len(self._data.ops) if is_last else ends[at + 1].first_op
            if not len(self._data.ops):  # module calls alone
                yield self._with_times(0, 0, call, ending.end_call, ending.time)
                call = ending.end_call
                continue
            start = self._first_op(first, ending.end_op, None if at else again, single=len(ends) == 1)
            end = self._end_op(start, ending.end_op, limit, again if is_last else None)
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
        marks = []
        for each in optimizer_steps(self._data):
            step = each.info
            if not _inside(step.first_op, step.end_op, self._named):
                end = _StepEnd(step.first_op, step.end_op, step.end_call, step.start + step.duration)
                end.weights = self._weights_read(step.first_op, step.end_op)
                if end.weights and each.optimizer >= 0:
                    end.weights.add(_FIRST_OPTIMIZER - each.optimizer)
                marks.append(end)
        skipped = [
            each
            for each in self._skipped_steps(marks)
            if not _inside(each.first_op, each.end_op, self._named)
        ]
        ends = sorted([*marks, *skipped], key=lambda each: each.end_op)
        turns = _Turns(ends)
        cut_short = bool(self._data.info.get("dropped"))  # the optimizers that began a step may be missing
        merged: list[_StepEnd] = []
        for at, ending in enumerate(ends):
            last = merged[-1] if merged else None
            is_first = len(merged) == 1 and cut_short and _FIRST_OPTIMIZER in ending.weights
            if last is None or is_first or last.weights & ending.weights or not self._is_one_step(turns, at):
                merged.append(replace(ending))
            else:
                merged[-1] = replace(ending, weights=ending.weights | last.weights)
        return merged

    def _is_one_step(self, turns: _Turns, at: int) -> bool:
        """Whether an optimizer's step and the one before it belong to one step of the training."""
        before, ending = turns.ends[at - 1 : at + 1]
        if not before.weights or not ending.weights:
            return False
        between = self._data.ops.phase[before.end_op : ending.end_op]
        return turns.are_taken(at) or not (between == _BACKWARD).any()

    def _weights_read(self, first: int, end: int) -> set[int]:
        """The storages of the weights that an optimizer read."""
        ops, values = self._data.ops, self._data.values
        reads = ops.inputs[ops.input_offsets[first] : ops.input_offsets[end]]
        readers = np.repeat(ops.phase[first:end], np.diff(ops.input_offsets[first : end + 1]))
        weights = reads[(values.kind[reads] == _PARAMETER) & (readers == _OPTIMIZER)]
        return set(values.storage[weights].tolist())

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

    def _end_op(self, start: int, end: int, limit: int, frames: set[int] | None) -> int:
        """The end of a step, with the ops after the optimizer that read its results: ``loss.item()``.

        Ops between them may take averages of weights. After the last step only ops in the frames of earlier
        steps are its own: behind them comes what the program does once.
        """
        ops, values, at = self._data.ops, self._data.values, end
        while at < limit and ops.phase[at] == _FORWARD and ops.call[at] < 0:
            reads = ops.inputs[ops.input_offsets[at] : ops.input_offsets[at + 1]]
            own = (values.producer[reads] >= start) & (values.producer[reads] < end)
            own &= ~np.isin(values.kind[reads], _WEIGHTS)
            repeats = frames is None or int(ops.frame[at]) in frames
            if (own.any() and repeats) or start <= ops.parent[at] < end:
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


def is_of_a_scaler(data: TraceData, op: int) -> bool:
    """Whether a gradient scaler ran an op, to multiply a loss by its scale."""
    frame = int(data.ops.frame[op])
    file = data.codes[int(data.frames.code[frame])].file if frame >= 0 else ""
    return file.replace("\\", "/").endswith(_SCALER_FILE)
