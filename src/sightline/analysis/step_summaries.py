"""The steps of a run: those that ``step=`` selects, and the time, loss, gradient norm and peak of each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import numpy as np

from sightline.analysis.memory import memory_of
from sightline.argument_checks import argument_text
from sightline.errors import NothingMatched, UsageError
from sightline.patterns import bare_name
from sightline.trace.data import I64, LEVELS, PHASES, REQUIRES_GRAD, StepInfo
from sightline.trace.index import Index
from sightline.trace.training_steps import innermost_steps, scaler_updates

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
        raise NothingMatched(f"step={argument_text(step)}: {_NO_STEPS}")
    if selected is None:
        last = max(steps)
        return _merge_steps([steps[last]], f"step {last}")
    numbers = [number for number in sorted(steps) if number in selected]
    if not numbers:
        raise NothingMatched(f"step={argument_text(step)} is not there; {_steps_text(steps)}.")
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
            f"step={argument_text(step)} must be a step, counted from 0: 3, '3:5', 'last', or a name."
        )
    return range(first, 1 << 60 if end is None else end)


def _merge_steps(steps: list[StepInfo], name: str) -> StepInfo:
    """One step from the first to the last of several, with what ran in between."""
    first, last = steps[0], steps[-1]
    end = max(step.start + step.duration for step in steps)
    return StepInfo(
        name, first.first_op, last.end_op, first.first_call, last.end_call, first.start, end - first.start
    )


def _steps_text(steps: dict[int, StepInfo]) -> str:
    """Which steps a recording has, to end a sentence."""
    numbers = sorted(steps)
    if len(numbers) == 1:
        return f"this recording has step {numbers[0]} alone"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"this recording has the steps {numbers[0]} to {numbers[-1]}"
    listed = ", ".join(map(str, numbers[:_MAX_LISTED]))
    return f"this recording has the steps {listed}{', …' if len(numbers) > _MAX_LISTED else ''}"


_BACKWARD, _OPTIMIZER = PHASES.index("backward"), PHASES.index("optimizer")
#: Ops that keep the value of a single number.
_SAME: Final = frozenset(
    "_to_copy clone detach alias view squeeze reshape mean sum to float item lift_fresh contiguous".split()
)
_SUMS: Final = frozenset({"add", "add_", "+", "+="})
_DIFFERENCES: Final = frozenset({"sub", "sub_", "-", "-="})
_ZEROS: Final = frozenset({"zeros", "zeros_like", "zero_", "new_zeros"})
_QUOTIENTS: Final = frozenset({"div", "div_", "/", "/="})
_MULTIPLES: Final = _QUOTIENTS | {"mul", "mul_", "*"}
_NORMS: Final = frozenset({"linalg_vector_norm", "norm", "vector_norm"})
_CLIPPING: Final = frozenset({"clip_grad_norm_", "get_total_norm", "_get_total_norm"})
_MAX_OPS: Final = 16  #: between a loss and the tensor that was read


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A step in numbers; unknown ones are None or empty."""

    number: int
    info: StepInfo
    ops: int
    losses: tuple[tuple[float, ...], ...]  #: known losses, for each line that started a backward pass
    norm: float | None
    peak: int
    skipped: bool  #: a gradient scaler found an infinity, and the optimizer did not step


def step_summaries(index: Index) -> list[StepSummary]:
    """Every step of a run, in order."""
    steps = numbered_steps(index)
    if not steps:
        return []
    reader, peaks = _ScalarReader(index), _peaks(index, [*steps.values()])
    updates, phase = np.array(scaler_updates(index.raw), dtype=np.int64), index.raw.ops.phase
    summaries = []
    for (number, info), peak in zip(steps.items(), peaks, strict=True):
        phases = phase[info.first_op : info.end_op]
        updated = ((updates >= info.first_op) & (updates < info.end_op)).any()
        skipped = bool(updated and (phases == _BACKWARD).any() and not (phases == _OPTIMIZER).any())
        losses, norm = reader.losses(info), reader.norm(info)
        ops = info.end_op - info.first_op
        summaries.append(StepSummary(number, info, ops, losses, norm, peak, skipped))
    return summaries


def _peaks(index: Index, steps: Sequence[StepInfo]) -> list[int]:
    """The peak of each step, on the device with the highest peak."""
    held = memory_of(index)
    if not held.devices:
        return [0] * len(steps)
    moments, levels = held.level(held.devices[0])
    peaks = []
    for step in steps:
        first = max(int(np.searchsorted(moments, step.start, side="right")) - 1, 0)
        end = max(int(np.searchsorted(moments, step.start + step.duration)), first + 1)
        peaks.append(int(levels[first:end].max(initial=0)))
    return peaks


class _ScalarReader:
    """The single numbers that the run read from its tensors: losses and gradient norms."""

    def __init__(self, index: Index) -> None:
        self._index, self._data = index, index.raw
        self._origin = cache(self._find_origin)  # the chains of a counter, read at every step, overlap

    def losses(self, step: StepInfo) -> tuple[tuple[float, ...], ...]:
        """The known losses of a step, by the line that started their backward pass."""
        by_frame: dict[int, list[float]] = {}
        for op, value, frame in self._roots:
            if step.first_op <= op < step.end_op:
                number = self._number(self._same_number(value))
                if number is not None:
                    by_frame.setdefault(frame, []).append(number)
        return tuple(map(tuple, by_frame.values()))

    def norm(self, step: StepInfo) -> float | None:
        """The norm of the gradients, as clipping computed it; else from the statistics of the gradients."""
        clipped = [value for op, value in self._clipped if step.first_op <= op < step.end_op]
        if clipped:
            return self._number(clipped[-1:])
        squares = {name: each for op, name, each in self._gradients if step.first_op <= op < step.end_op}
        return math.sqrt(sum(squares.values())) if squares else None

    # -- numbers -----------------------------------------------------------------------------------------

    def _number(self, values: Sequence[int]) -> float | None:
        """The number that was read from the first of these values that was read; else from its statistics."""
        for value in values:
            if value in self._read:
                return self._read[value]
        for value in reversed(values):
            stats = self._index.numbers(value)
            if stats is not None:
                return math.nan if stats.nans else stats.mean if not stats.infs else math.inf
        return None

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
        return next((each for each in inputs if values.flags[each] & REQUIRES_GRAD), inputs[0])

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
        creators = self._ops_named(frozenset({"tensor"}), "api")
        creators = creators[np.diff(ops.output_offsets)[creators] == 1]
        zeros = [op for op in creators.tolist() if forms[int(ops.form[op])].args[:1] == (0,)]
        return set(ops.outputs[ops.output_offsets[zeros]].tolist())

    # -- losses and gradients ----------------------------------------------------------------------------

    @cached_property
    def _roots(self) -> list[tuple[int, int, int]]:
        """Where backward passes start: the op, the value and the frame."""
        ops = self._data.ops
        starts = self._ops_named(frozenset({"backward"}), "api")
        if not len(starts):  # dispatcher ops alone: the gradient of the loss is 1
            starts = self._ops_named(frozenset({"ones_like"}), "aten")
            after = np.minimum(starts + 1, len(ops) - 1)
            starts = starts[(ops.phase[starts] == _BACKWARD) | (ops.phase[after] == _BACKWARD)]
        starts = starts[np.diff(ops.input_offsets)[starts] > 0]
        values, frames = ops.inputs[ops.input_offsets[starts]], ops.frame[starts]
        return list(zip(starts.tolist(), values.tolist(), frames.tolist(), strict=True))

    @cached_property
    def _clipped(self) -> list[tuple[int, int]]:
        """The norms that clipping computed: the op and the value."""
        data, ops = self._data, self._data.ops
        clips = [code.function.rpartition(".")[2] in _CLIPPING for code in data.codes]
        if not any(clips):
            return []
        inside = np.append(np.array(clips, dtype=np.bool_)[data.frames.code], False)[ops.frame]
        norms = self._ops_named(_NORMS)
        norms = norms[inside[norms] & (np.diff(ops.output_offsets)[norms] == 1)]
        return list(zip(norms.tolist(), ops.outputs[ops.output_offsets[norms]].tolist(), strict=True))

    def _ops_named(self, bare_names: frozenset[str], level: str | None = None) -> I64:
        """The ops of these names, without namespaces and overloads."""
        ops, names = self._data.ops, self._data.names
        mask = np.zeros(len(ops), dtype=np.bool_)
        for number, each in enumerate(LEVELS):
            if level in (None, each):
                ids = [id for id, name in enumerate(names) if bare_name(name, each) in bare_names]
                mask |= (ops.level == number) & np.isin(ops.name, ids)
        return np.flatnonzero(mask)

    @cached_property
    def _gradients(self) -> list[tuple[int, str, float]]:
        """The gradients that were measured: the op that produced each, its name, and its squared norm."""
        values, names, stats = self._data.values, self._data.names, self._data.stats
        grads = np.array([name.endswith(".grad") for name in names] or [False])
        chosen = np.flatnonzero(grads[values.name[stats.value]] & (values.name[stats.value] >= 0))
        ids = stats.value[chosen]
        with np.errstate(over="ignore"):
            squares = (stats.l2[chosen] ** 2).tolist()
        labels = (names[name] for name in values.name[ids].tolist())
        return list(zip(values.producer[ids].tolist(), labels, squares, strict=True))
