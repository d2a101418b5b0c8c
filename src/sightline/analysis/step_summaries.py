"""The steps of a run: those that ``step=`` selects, and the time, loss, gradient norm and peak of each."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from sightline.analysis.gradient_norms import GradientNorms, ops_named
from sightline.analysis.memory import memory_of
from sightline.data.index import Index
from sightline.data.optimizer_steps import OptimizerStep, optimizer_steps
from sightline.data.trace_data import I64, KINDS, LEVELS, MUTATES, PHASES, REQUIRES_GRAD, StepInfo, TraceData
from sightline.data.training_steps import innermost_steps, is_of_a_scaler, may_lack_beginning, scaler_updates
from sightline.errors import NothingMatched, UsageError
from sightline.hints import Hint
from sightline.patterns import bare_name

_RANGE: Final = re.compile(r"(\d{0,9})(:?)(\d{0,9})")
_NUMBERED: Final = re.compile(r"step(\d{1,9})")
_MAX_LISTED: Final = 6
_NO_STEPS: Final = "this recording has no steps: one ends with optimizer.step(), or is named by sl.step."


def numbered_steps(index: Index) -> dict[int, StepInfo]:
    """The steps by their numbers: those in their names where all have one, else counted from 0."""
    steps = innermost_steps(index.step_infos)
    names = [_NUMBERED.fullmatch(step.name) for step in steps]
    numbers = [int(name[1]) for name in names if name is not None]
    if len(set(numbers)) < len(steps) or numbers != sorted(numbers):
        numbers = list(range(len(steps)))
    return dict(zip(numbers, steps, strict=True))


def step_span(index: Index, step: Any) -> StepInfo:
    """The span of a step: by number, ``slice(3, 5)``, ``"3:5"``, ``"last"``, or name."""
    steps = numbered_steps(index)
    named = [each for each in index.step_infos if each.name == step]
    if isinstance(step, str) and named:
        return _merge_steps(named, step) if steps else named[0]
    selected = _selected_numbers(step)
    if not steps:
        raise NothingMatched(f"{Hint.option('step', step)}: {_NO_STEPS}")
    if selected is None:
        last = max(steps)
        return _merge_steps([steps[last]], f"step {last}")
    numbers = [number for number in sorted(steps) if number in selected]
    if not numbers:
        present = sorted(steps)
        if len(present) == 1:
            text = f"step {present[0]} alone"
        elif present[-1] - present[0] == len(present) - 1:
            text = f"the steps {present[0]} to {present[-1]}"
        else:
            listed = ", ".join(map(str, present[:_MAX_LISTED]))
            text = f"the steps {listed}{', …' if len(present) > _MAX_LISTED else ''}"
        raise NothingMatched(f"{Hint.option('step', step)} is not there; this recording has {text}.")
    text = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} … {numbers[-1]}"
    return _merge_steps([steps[number] for number in numbers], text)


def _selected_numbers(step: Any) -> range | None:
    """The numbers that ``step=`` selects; None for the last step."""
    if step == "last":
        return None
    first: Any = None
    end: Any = None
    if isinstance(step, slice) and step.step in (None, 1):
        first, end = step.start or 0, step.stop
    elif isinstance(step, int) and not isinstance(step, bool):
        first, end = step, step + 1
    elif isinstance(step, str) and step and (match := _RANGE.fullmatch(step)):
        first = int(match[1] or 0)
        end = (int(match[3]) if match[3] else None) if match[2] else first + 1
    whole = type(first) is int and (end is None or type(end) is int)
    if not whole or first < 0 or (end is not None and end <= first):
        raise UsageError(
            f"{Hint.option('step', step)} must be a step, counted from 0: 3, '3:5', 'last', or a name."
        )
    return range(first, 1 << 60 if end is None else end)


def _merge_steps(steps: list[StepInfo], name: str) -> StepInfo:
    """One step from the beginning of the first to the end of the last."""
    first, last = steps[0], steps[-1]
    end = max(step.start + step.duration for step in steps)
    return StepInfo(
        name, first.first_op, last.end_op, first.first_call, last.end_call, first.start, end - first.start
    )


_BACKWARD, _OPTIMIZER = PHASES.index("backward"), PHASES.index("optimizer")
_PARAMETER = KINDS.index("parameter")
#: Ops that keep the value of a single number.
_SAME: Final = frozenset(
    "_to_copy clone detach alias view squeeze reshape mean sum to float item lift_fresh contiguous".split()
)
_SUMS: Final = frozenset({"add", "add_", "+", "+="})
_DIFFERENCES: Final = frozenset({"sub", "sub_", "-", "-="})
_ZEROS: Final = frozenset({"zeros", "zeros_like", "zero_", "new_zeros"})
_QUOTIENTS: Final = frozenset({"div", "div_", "/", "/="})
_MULTIPLES: Final = _QUOTIENTS | {"mul", "mul_", "*"}
_MAX_OPS: Final = 16  #: between a loss and the tensor that was read


@dataclass(frozen=True, slots=True)
class BackwardPasses:
    """The backward passes of a step that one expression started, for one optimizer."""

    frame: int
    count: int
    known: int  #: how many of their losses are known
    divided_before: float  #: by how much the program had divided the losses that are shown
    divided_after: float  #: and by how much it divides them after that, before the backward pass
    adds_up: bool = True  #: the update is made with the sum of their gradients, each with the same weight


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A step in numbers; unknown ones are None or empty."""

    number: int
    info: StepInfo
    ops: int
    losses: tuple[tuple[float, ...], ...]  #: known losses, for each of ``passes``
    norm: float | None  #: of all gradients that the step used, before they were clipped
    peak: int
    skipped: bool  #: a gradient scaler found an infinity, and the optimizer did not step
    passes: tuple[BackwardPasses, ...] = ()  #: those whose losses are known
    incomplete: bool = False  #: ``last=`` may have dropped its first ops: losses and peak are unknown
    clipped: bool = False  #: the gradients were clipped after that


#: The results of `step_numbers`, as long as their index lives: the first screen and several checks need them.
_numbers: Final[WeakKeyDictionary[Index, list[StepSummary]]] = WeakKeyDictionary()


def step_summaries(index: Index) -> list[StepSummary]:
    """Every step of a run, in order, with its peak on the device with the highest peak."""
    steps = step_numbers(index)
    held = memory_of(index) if steps else None
    if held is None or not held.devices:
        return list(steps)
    moments, levels = held.level(held.devices[0])
    summaries = []
    for step in steps:
        start, duration = step.info.start, step.info.duration
        first = max(int(np.searchsorted(moments, start, side="right")) - 1, 0)
        end = max(int(np.searchsorted(moments, start + duration)), first + 1)
        peak = 0 if step.incomplete else int(levels[first:end].max(initial=0))
        summaries.append(replace(step, peak=peak))
    return summaries


def step_numbers(index: Index) -> list[StepSummary]:
    """Every step of a run, in order, without its peak of memory."""
    if index in _numbers:
        return _numbers[index]
    summaries: list[StepSummary] = []
    reader = _ScalarReader(index)
    steps = numbered_steps(index)
    norms = GradientNorms(index, list(steps.values()), reader.number)
    incomplete = may_lack_beginning(index)
    for number, info in steps.items():
        skipped = reader.is_skipped(info)
        losses, passes = ((), ()) if incomplete else reader.losses(info)
        ops, norm = info.end_op - info.first_op, norms.of(info, skipped=skipped)
        clipped = norms.is_clipped(info)
        summaries.append(
            StepSummary(number, info, ops, losses, norm, 0, skipped, passes, incomplete, clipped)
        )
        incomplete = False  # the others are whole
    _numbers[index] = summaries
    return summaries


def backward_ops(data: TraceData) -> I64:
    """The ops that start backward passes: calls of ``backward``.

    Where no API calls were recorded they are the ops that make the gradient of the loss, which is 1.
    """
    starts = ops_named(data, frozenset({"backward"}), "api")
    if len(starts) or data.info.get("ops") != "aten":
        return starts
    starts = ops_named(data, frozenset({"ones_like"}), "aten")
    frames, functions = data.frames, [code.function for code in data.codes]
    # ``torch.autograd.grad`` makes its first gradient in the same function, but is no backward pass.
    chosen = []
    for frame in data.ops.frame[starts].tolist():
        caller = int(frames.parent[frame]) if frame >= 0 else -1
        called = caller >= 0 and functions[frames.code[caller]] == "backward"
        chosen.append(called and functions[frames.code[frame]] == "_make_grads")
    return starts[chosen]


class _ScalarReader:
    """The single numbers that the run read from its tensors: losses, and whether a gradient is infinite."""

    def __init__(self, index: Index) -> None:
        self._index, self._data = index, index.raw
        self._frames: dict[tuple[int, ...], int] = {}  # of what starts backward passes, the first
        self._origin = cache(self._find_origin)  # the chains of a counter, read at every step, overlap
        self._shown = cache(self._find_shown)

    def losses(self, step: StepInfo) -> tuple[tuple[tuple[float, ...], ...], tuple[BackwardPasses, ...]]:
        """The known losses of a step by what started their backward pass, and these passes."""
        losses, passes = [], []
        for source, roots in self._sources_of(step):
            shown = self._shown(source)
            numbers = [self._loss(value, shown) for _, value in roots]
            known = [number for number in numbers if number is not None]
            if known:
                losses.append(tuple(known))
                weights = {self._weight(value, shown) for _, value in roots}
                before, after, _ = next(iter(weights)) if len(weights) == 1 else (1.0, 1.0, ())
                adds_up = len(weights) == 1 and self._are_of_one_update([op for op, _ in roots])
                frame = self._frames[source]
                passes.append(BackwardPasses(frame, len(roots), len(known), before, after, adds_up))
        return tuple(losses), tuple(passes)

    def _sources_of(self, step: StepInfo) -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
        """The sources of the backward passes in a step, in the order of the first of each."""
        found = []
        for source, roots in self._sources.items():
            first, end = (bisect_left(roots, (op,)) for op in (step.first_op, step.end_op))
            if first < end:
                found.append((source, roots[first:end]))
        return sorted(found, key=lambda each: each[1][0])

    @cached_property
    def _sources(self) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        """The op and the value of each loss in order, by the expression that starts its pass."""
        sources: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for op, value, frame in self._roots:
            source = *self._expression(frame), self._next_optimizer(op)
            self._frames.setdefault(source, frame)
            sources.setdefault(source, []).append((op, value))
        return sources

    def _find_shown(self, source: tuple[int, ...]) -> int:
        """Which number of a loss is shown, counted from the one that the backward pass starts from.

        It is the one that the program reads, also in steps in which it reads none. Else it is the one that
        the pass starts from, unless several passes share an update: then it is that before their division.
        """
        roots = self._sources[source]
        chains = [self._same_number(value) for _, value in roots]
        reads = [at for chain in chains for at, value in enumerate(chain) if value in self._read]
        if reads:
            return min(reads)
        begins, ends = self._updates
        ops = np.array([op for op, _ in roots], dtype=np.int64)
        updates = np.searchsorted(ends, ops, side="right")
        inside = updates < len(begins)
        inside[inside] = ops[inside] >= begins[updates[inside]]  # evaluations of a closure share no update
        if len(np.unique(updates[~inside])) == np.count_nonzero(~inside):
            return 0
        measured = [
            at for chain in chains for at, value in enumerate(chain) if self._index.numbers(value) is not None
        ]
        return max(measured, default=0)

    def _loss(self, root: int, shown: int) -> float | None:
        """A number of a loss: as it was read or measured, else by the divisions between it and another."""
        chain = self._same_number(root)
        shown = min(shown, len(chain) - 1)
        divisors = [self._divisor(value) for value in chain]
        for at, number in self._known(chain):
            first, end = sorted((at, shown))
            if not any(map(self._is_weighted, chain[first:end])):
                divisor = math.prod(divisors[shown:at])  # 0 where the program multiplies by infinity
                return (number / divisor if divisor else number * math.inf) * math.prod(divisors[at:shown])
        return None

    def _is_weighted(self, value: int) -> bool:
        """Whether a number is a product with a tensor that may be any; a loss is shown without a scale."""
        name, inputs = self._producer(value)
        several = name in _MULTIPLES and len(inputs) > 1
        return several and not is_of_a_scaler(self._data, int(self._data.values.producer[value]))

    def _expression(self, frame: int) -> tuple[int, ...]:
        """The user's expression that a frame is in: a closure's is one, wherever it is called from."""
        frames = self._data.frames
        user = int(self._index.user_frames[frame]) if frame >= 0 else -1
        if user < 0:
            return ()
        columns = frames.code, frames.line, frames.column, frames.end_line, frames.end_column
        return tuple(int(column[user]) for column in columns)

    def _next_optimizer(self, op: int) -> int:
        """The optimizer that steps next after an op began; -1 if it is not known."""
        at = int(np.searchsorted(self._updates[1], op, side="right"))
        return self._optimizers[at] if at < len(self._optimizers) else -1

    def _are_of_one_update(self, ops: Sequence[int]) -> bool:
        """Whether an optimizer uses the gradients of several backward passes together.

        Each pass of a closure that it calls several times is an evaluation of its own.
        """
        begins, ends = self._updates
        updates = set(np.searchsorted(ends, np.array(ops), side="right").tolist())
        update = updates.pop()
        inside = sum(op >= begins[update] for op in ops) if update < len(begins) else 0
        return not updates and inside < 2

    def _weight(self, root: int, shown: int) -> tuple[float, float, tuple[int, ...]]:
        """How a loss is weighted: its divisor when it is shown, its further one before its backward pass.

        Besides, the values that are no constants by which it is multiplied: the scale of a scaler.
        """
        chain = self._same_number(root)
        shown = min(shown, len(chain) - 1)
        divisors = [self._divisor(value) for value in chain]
        factors: list[int] = []
        for value, earlier in pairwise(chain[: shown + 1]):
            name, inputs = self._producer(value)
            others = [each for each in inputs if name in _MULTIPLES and each != earlier]
            factors += [self._same_number(each)[-1] for each in others]
        return math.prod(divisors[shown:]), math.prod(divisors[:shown]), tuple(factors)

    def _divisor(self, value: int) -> float:
        """The constant that the op which produced a single number divided by; 1 for any other op."""
        name, _ = self._producer(value)
        if name not in _MULTIPLES:
            return 1.0
        form = self._data.forms[int(self._data.ops.form[self._data.values.producer[value]])]
        constants = [arg for arg in form.args if type(arg) in (int, float)]
        if len(constants) != 1 or not constants[0]:
            return 1.0
        return float(constants[0]) if name in _QUOTIENTS else 1 / constants[0]

    @cached_property
    def _updates(self) -> tuple[I64, I64]:
        """Where the steps of optimizers begin and end."""
        spans = sorted((each.info.end_op, each.info.first_op) for each in self._steps_of_optimizers)
        ends, begins = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        return begins, ends

    @cached_property
    def _optimizers(self) -> list[int]:
        """The optimizer of each of them."""
        return [
            each.optimizer for each in sorted(self._steps_of_optimizers, key=lambda each: each.info.end_op)
        ]

    @cached_property
    def _steps_of_optimizers(self) -> list[OptimizerStep]:
        return optimizer_steps(self._data)

    # -- gradient scalers --------------------------------------------------------------------------------

    def is_skipped(self, step: StepInfo) -> bool:
        """Whether a gradient scaler found an infinity after the backward pass, so that no optimizer stepped.

        It hands the number of them to its update. Where that is not known, a step that changed no weight was
        skipped; the optimizer may be none of torch's, whose steps are not seen.
        """
        first, end = step.first_op, step.end_op
        updates = self._scaler_updates
        updates = updates[np.searchsorted(updates, first) : np.searchsorted(updates, end)]
        phases = self._data.ops.phase[first:end]
        if not len(updates) or not (phases == _BACKWARD).any() or (phases == _OPTIMIZER).any():
            return False
        found = [self.number([self._data.ops.inputs_of(op)[-1]]) for op in updates.tolist()]
        if None not in found:
            return any(found)
        changes = self._changes_of_weights
        return bool(np.searchsorted(changes, first) == np.searchsorted(changes, end))

    @cached_property
    def _scaler_updates(self) -> I64:
        return np.array(scaler_updates(self._data), dtype=np.int64)

    @cached_property
    def _changes_of_weights(self) -> I64:
        """The ops that change a parameter in place, in order."""
        values, flags = self._data.values, self._data.ops.flags
        weights = np.unique(values.storage[values.kind == _PARAMETER])
        changed = (values.producer >= 0) & (values.storage >= 0) & np.isin(values.storage, weights)
        makers = np.unique(values.producer[changed])
        changes: I64 = makers[(flags[makers] & MUTATES) != 0]
        return changes

    # -- numbers -----------------------------------------------------------------------------------------

    def number(self, values: Sequence[int]) -> float | None:
        """The number that was read from the first of these values that was read; else from its statistics."""
        return next((number for _, number in self._known(values)), None)

    def _known(self, values: Sequence[int]) -> Iterator[tuple[int, float]]:
        """The known numbers among values, and their places: those that were read, then those measured."""
        for at, value in enumerate(values):
            if value in self._read:
                yield at, self._read[value]
        for at, value in reversed([*enumerate(values)]):
            stats = self._index.numbers(value)
            if stats is not None:
                yield at, math.nan if stats.nans else stats.mean if not stats.infs else math.inf

    @cached_property
    def _read(self) -> dict[int, float]:
        """The number that the run read from each value (``item``), or from a copy of it."""
        ops, forms = self._data.ops, self._data.forms
        reads = (np.diff(ops.input_offsets) == 1) & (np.diff(ops.output_offsets) == 0) & (ops.result >= 0)
        numbers: dict[int, float] = {}
        for op in np.flatnonzero(reads).tolist():
            result = forms[int(ops.result[op])].args
            if len(result) == 1 and type(result[0]) in (int, float):
                for value in self._same_number(int(ops.inputs[ops.input_offsets[op]]), _SAME):
                    numbers.setdefault(value, float(result[0]))
        return numbers

    def _same_number(self, value: int, skipped: frozenset[str] = _SAME | _MULTIPLES) -> list[int]:
        """A single number, and those it was computed from by ops that keep it, or scale it."""
        chain = [value]
        while len(chain) < _MAX_OPS:
            earlier = self._origin(chain[-1], skipped)
            if earlier < 0 or earlier in chain:
                break
            chain.append(earlier)
        return chain

    def _find_origin(self, value: int, skipped: frozenset[str]) -> int:
        """The input of the op that produced a single number, if the op keeps or scales it; else -1."""
        values, metas = self._data.values, self._data.metas
        if metas[values.meta[value]].numel != 1:
            return -1
        name, inputs = self._producer(value)
        if name in _SUMS:  # a running sum that begins at zero
            inputs = [each for each in inputs if not self._is_zero(each)]
            name = "to" if len(inputs) == 1 else name
        if name not in skipped or not inputs or any(metas[values.meta[each]].numel != 1 for each in inputs):
            return -1
        if name in _SAME:
            return inputs[0]
        if name in _QUOTIENTS and len(inputs) > 1:  # before the division it is a sum over tokens, not a loss
            return -1
        # Of the factors of a product, the one that is not a constant.
        trained = [each for each in inputs if values.flags[each] & REQUIRES_GRAD]
        computed = [each for each in inputs if self._producer(each)[0] not in ("", "tensor")]
        return (trained or computed or inputs)[0]

    def _producer(self, value: int) -> tuple[str, list[int]]:
        """The bare name and the inputs of the op that produced a value; empty without one."""
        ops, op = self._data.ops, int(self._data.values.producer[value])
        if op < 0:
            return "", []
        name = bare_name(self._data.names[ops.name[op]], LEVELS[ops.level[op]])
        return name, ops.inputs_of(op)

    def _is_zero(self, value: int) -> bool:
        """Whether a single number is known to be 0: created as zero, or subtracted from itself."""
        if value in self._literal_zeros:
            return True
        name, inputs = self._producer(value)
        return name in _ZEROS or (name in _DIFFERENCES and len(inputs) == 2 and inputs[0] == inputs[1])

    @cached_property
    def _literal_zeros(self) -> set[int]:
        """The results of ``torch.tensor(0.0)``."""
        ops, forms = self._data.ops, self._data.forms
        creators = ops_named(self._data, frozenset({"tensor"}), "api")
        creators = creators[np.diff(ops.output_offsets)[creators] == 1]
        zeros = [op for op in creators.tolist() if forms[int(ops.form[op])].args[:1] == (0,)]
        return set(ops.outputs[ops.output_offsets[zeros]].tolist())

    # -- losses ----------------------------------------------------------------------------

    @cached_property
    def _roots(self) -> list[tuple[int, int, int]]:
        return backward_starts(self._data)


def backward_starts(data: TraceData) -> list[tuple[int, int, int]]:
    """Where backward passes start: the op, the value and the frame."""
    ops, starts = data.ops, backward_ops(data)
    starts = starts[np.diff(ops.input_offsets)[starts] > 0]
    values, frames = ops.inputs[ops.input_offsets[starts]], ops.frame[starts]
    return list(zip(starts.tolist(), values.tolist(), frames.tolist(), strict=True))
