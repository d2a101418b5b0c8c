"""The steps of a run: which of them ``step=`` means, and the time, loss, gradient norm and peak of each."""

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
from sightline.trace.training_steps import innermost, scaler_updates

_RANGE: Final = re.compile(r"(\d{0,9})(:?)(\d{0,9})")
_NUMBERED: Final = re.compile(r"step(\d{1,9})")
_SHOWN: Final = 6
_NO_STEPS: Final = "this recording has no steps: one ends with optimizer.step(), or is named by sl.step."


def numbered_steps(index: Index) -> dict[int, StepInfo]:
    """The steps by their numbers: those in their names where all have one, else counted from 0."""
    steps = innermost(index.step_infos)
    names = [_NUMBERED.fullmatch(step.name) for step in steps]
    numbers = [int(name[1]) for name in names if name is not None]
    if len(set(numbers)) < len(steps) or numbers != sorted(numbers):
        numbers = list(range(len(steps)))
    return dict(zip(numbers, steps, strict=True))


def step_span(index: Index, step: Any) -> StepInfo:
    """The stretch that is meant: a number, ``slice(3, 5)``, ``"3:5"``, ``"last"``, or the name of a step."""
    known = numbered_steps(index)
    named = [each for each in index.step_infos if each.name == step]
    if isinstance(step, str) and named:
        return _joined(named, step) if known else named[0]
    wanted = _wanted(step)
    if not known:
        raise NothingMatched(f"step={argument_text(step)}: {_NO_STEPS}")
    if wanted is None:
        last = max(known)
        return _joined([known[last]], f"step {last}")
    chosen = [known[number] for number in sorted(known) if number in wanted]
    if not chosen:
        raise NothingMatched(f"step={argument_text(step)} is not there; {_there(known)}.")
    numbers = [number for number in sorted(known) if number in wanted]
    text = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} … {numbers[-1]}"
    return _joined(chosen, text)


def _wanted(step: Any) -> range | None:
    """The numbers that are meant; None for the last one."""
    if step == "last":
        return None
    first: Any = None
    end: Any = None
    if isinstance(step, slice) and step.step in (None, 1):
        first, end = step.start or 0, step.stop
    elif isinstance(step, int) and not isinstance(step, bool):
        first, end = step, step + 1
    elif isinstance(step, str) and step and (found := _RANGE.fullmatch(step)):
        first = int(found[1] or 0)
        end = (int(found[3]) if found[3] else None) if found[2] else first + 1
    whole = type(first) is int and (end is None or type(end) is int)
    if not whole or first < 0 or (end is not None and end <= first):
        raise UsageError(
            f"step={argument_text(step)} must be a step, counted from 0: 3, '3:5', 'last', or a name."
        )
    return range(first, 1 << 60 if end is None else end)


def _joined(steps: list[StepInfo], name: str) -> StepInfo:
    """From the first to the last of some steps, with what is between them."""
    first, last = steps[0], steps[-1]
    end = max(step.start + step.duration for step in steps)
    return StepInfo(
        name, first.first_op, last.end_op, first.first_call, last.end_call, first.start, end - first.start
    )


def _there(known: dict[int, StepInfo]) -> str:
    """Which steps there are, to end a sentence."""
    numbers = sorted(known)
    if len(numbers) == 1:
        return f"this recording has step {numbers[0]} alone"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"this recording has the steps {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"this recording has the steps {shown}{', …' if len(numbers) > _SHOWN else ''}"


_BACKWARD, _OPTIMIZER = PHASES.index("backward"), PHASES.index("optimizer")
#: Ops that leave a single number what it is.
_SAME: Final = frozenset(
    "_to_copy clone detach alias view squeeze reshape mean sum to float item lift_fresh contiguous".split()
)
_SUMS: Final = frozenset({"add", "add_", "+", "+="})
_DIFFERENCES: Final = frozenset({"sub", "sub_", "-", "-="})
_ZEROS: Final = frozenset({"zeros", "zeros_like", "zero_", "new_zeros"})
_MULTIPLES: Final = frozenset({"mul", "div", "mul_", "div_", "*", "/"})
_NORMS: Final = frozenset({"linalg_vector_norm", "norm", "vector_norm"})
_CLIPPING: Final = frozenset({"clip_grad_norm_", "get_total_norm", "_get_total_norm"})
_LONGEST: Final = 16  #: ops between a loss and what was read of it


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A step in numbers; what is not known is None or empty."""

    number: int
    info: StepInfo
    ops: int
    losses: tuple[tuple[float, ...], ...]  #: for each line that started a backward pass, those that were read
    norm: float | None
    peak: int
    skipped: bool  #: a gradient scaler found an infinity, and the optimizer did not step


def step_summaries(index: Index) -> list[StepSummary]:
    """Every step of a run, in order."""
    steps = numbered_steps(index)
    if not steps:
        return []
    numbers, peaks = _Numbers(index), _peaks(index, [*steps.values()])
    updates, phase = np.array(scaler_updates(index.raw), dtype=np.int64), index.raw.ops.phase
    made = []
    for (number, info), peak in zip(steps.items(), peaks, strict=True):
        phases = phase[info.first_op : info.end_op]
        updated = ((updates >= info.first_op) & (updates < info.end_op)).any()
        skipped = bool(updated and (phases == _BACKWARD).any() and not (phases == _OPTIMIZER).any())
        losses, norm = numbers.losses(info), numbers.norm(info)
        ops = info.end_op - info.first_op
        made.append(StepSummary(number, info, ops, losses, norm, peak, skipped))
    return made


def _peaks(index: Index, steps: Sequence[StepInfo]) -> list[int]:
    """The most that was held in each step, on the device that held most."""
    held = memory_of(index)
    if not held.devices:
        return [0] * len(steps)
    moments, levels = held.level(held.devices[0])
    found = []
    for step in steps:
        first = max(int(np.searchsorted(moments, step.start, side="right")) - 1, 0)
        end = max(int(np.searchsorted(moments, step.start + step.duration)), first + 1)
        found.append(int(levels[first:end].max(initial=0)))
    return found


class _Numbers:
    """The numbers that were read of a run's tensors."""

    def __init__(self, index: Index) -> None:
        self._index, self._data = index, index.raw
        self._origin = cache(self._read_origin)  # families of a counter, read at every step, overlap

    def losses(self, step: StepInfo) -> tuple[tuple[float, ...], ...]:
        """The losses of a step by the line that started their backward pass, those that are known."""
        found: dict[int, list[float]] = {}
        for root, frame in self._roots:
            if step.first_op <= root[0] < step.end_op:
                number = self._known(self._family(root[1]))
                if number is not None:
                    found.setdefault(frame, []).append(number)
        return tuple(map(tuple, found.values()))

    def norm(self, step: StepInfo) -> float | None:
        """The norm of the gradients, as clipping measured it; else by the statistics of the gradients."""
        clipped = [value for op, value in self._clipped if step.first_op <= op < step.end_op]
        if clipped:
            return self._known(clipped[-1:])
        squares = {name: each for op, name, each in self._gradients if step.first_op <= op < step.end_op}
        return math.sqrt(sum(squares.values())) if squares else None

    # -- what was read -----------------------------------------------------------------------------------

    def _known(self, values: Sequence[int]) -> float | None:
        """What was read of the first of some values of which anything was; else its statistics."""
        for value in values:
            if value in self._read:
                return self._read[value]
        for value in reversed(values):
            numbers = self._index.numbers(value)
            if numbers is not None:
                return math.nan if numbers.nans else numbers.mean if not numbers.infs else math.inf
        return None

    @cached_property
    def _read(self) -> dict[int, float]:
        """The number that was read of each value, by what the value was made from without changing it."""
        ops, forms = self._data.ops, self._data.forms
        alone = (np.diff(ops.input_offsets) == 1) & (np.diff(ops.output_offsets) == 0) & (ops.result >= 0)
        found: dict[int, float] = {}
        for op in np.flatnonzero(alone).tolist():
            result = forms[int(ops.result[op])].args
            if len(result) == 1 and type(result[0]) in (int, float):
                for value in self._family(int(ops.inputs[ops.input_offsets[op]]), _SAME):
                    found.setdefault(value, float(result[0]))
        return found

    def _family(self, value: int, through: frozenset[str] = _SAME | _MULTIPLES) -> list[int]:
        """A single number, and the ones it was made from by ops that leave it what it is, or a multiple."""
        found = [value]
        while len(found) < _LONGEST:
            earlier = self._origin(found[-1], through)
            if earlier < 0 or earlier in found:
                break
            found.append(earlier)
        return found

    def _read_origin(self, value: int, through: frozenset[str]) -> int:
        """What a single number was made from by an op that leaves it what it is, or a multiple; else -1."""
        values, ops, metas = self._data.values, self._data.ops, self._data.metas
        producer = int(values.producer[value])
        if producer < 0 or metas[values.meta[value]].numel != 1:
            return -1
        name = bare_name(self._data.names[ops.name[producer]], LEVELS[ops.level[producer]])
        given = ops.inputs_of(producer)
        if name in _SUMS:  # a running sum that begins at zero
            given = [each for each in given if not self._is_zero(each)]
            name = "to" if len(given) == 1 else name
        if name not in through or not given or any(metas[values.meta[each]].numel != 1 for each in given):
            return -1
        return int(given[0]) if name in _SAME else self._with_gradient(given)

    def _is_zero(self, value: int) -> bool:
        """Whether a single number is known to be 0: it was made so, or taken from itself."""
        ops = self._data.ops
        producer = int(self._data.values.producer[value])
        if producer < 0:
            return value in self._made_zero
        name = bare_name(self._data.names[ops.name[producer]], LEVELS[ops.level[producer]])
        given = ops.inputs_of(producer)
        return (
            value in self._made_zero
            or name in _ZEROS
            or (name in _DIFFERENCES and len(given) == 2 and given[0] == given[1])
        )

    @cached_property
    def _made_zero(self) -> set[int]:
        """What ``torch.tensor(0.0)`` returned."""
        ops, forms = self._data.ops, self._data.forms
        made = self._ops_named(frozenset({"tensor"}), "api")
        made = made[np.diff(ops.output_offsets)[made] == 1]
        zeros = [op for op in made.tolist() if forms[int(ops.form[op])].args[:1] == (0,)]
        return set(ops.outputs[ops.output_offsets[zeros]].tolist())

    def _with_gradient(self, given: Sequence[int]) -> int:
        """Of the factors of a product the one that is no constant."""
        flags = self._data.values.flags
        return next((each for each in given if flags[each] & REQUIRES_GRAD), given[0])

    # -- which tensors are meant -------------------------------------------------------------------------

    @cached_property
    def _roots(self) -> list[tuple[tuple[int, int], int]]:
        """Where backward passes start: the op and the value, and the frame."""
        ops = self._data.ops
        starts = self._ops_named(frozenset({"backward"}), "api")
        if not len(starts):  # dispatcher ops alone: the gradient of the loss is 1
            starts = self._ops_named(frozenset({"ones_like"}), "aten")
            after = np.minimum(starts + 1, len(ops) - 1)
            starts = starts[(ops.phase[starts] == _BACKWARD) | (ops.phase[after] == _BACKWARD)]
        found = []
        for op in starts.tolist():
            given = ops.inputs_of(op)
            found += [((op, value), int(ops.frame[op])) for value in given[:1]]
        return found

    @cached_property
    def _clipped(self) -> list[tuple[int, int]]:
        """The norms that gradients are clipped by: the op and the value."""
        data, ops = self._data, self._data.ops
        clips = [code.function.rpartition(".")[2] in _CLIPPING for code in data.codes]
        if not any(clips):
            return []
        inside = np.append(np.array(clips, dtype=np.bool_)[data.frames.code], False)[ops.frame]
        norms = self._ops_named(_NORMS)
        norms = norms[inside[norms] & (np.diff(ops.output_offsets)[norms] == 1)]
        return list(zip(norms.tolist(), ops.outputs[ops.output_offsets[norms]].tolist(), strict=True))

    def _ops_named(self, wanted: frozenset[str], level: str | None = None) -> I64:
        """The ops of these names, without namespaces and overloads."""
        ops, names = self._data.ops, self._data.names
        found = np.zeros(len(ops), dtype=np.bool_)
        for number, each in enumerate(LEVELS):
            if level in (None, each):
                meant = [at for at, name in enumerate(names) if bare_name(name, each) in wanted]
                found |= (ops.level == number) & np.isin(ops.name, meant)
        return np.flatnonzero(found)

    @cached_property
    def _gradients(self) -> list[tuple[int, str, float]]:
        """The squared norms of gradients that were measured: the op that made each, and its name."""
        values, names, stats = self._data.values, self._data.names, self._data.stats
        grads = np.array([name.endswith(".grad") for name in names] or [False])
        chosen = np.flatnonzero(grads[values.name[stats.value]] & (values.name[stats.value] >= 0))
        held = stats.value[chosen]
        squares = (stats.l2[chosen] ** 2).tolist()
        named = (names[name] for name in values.name[held].tolist())
        return list(zip(values.producer[held].tolist(), named, squares, strict=True))
