"""Which step somebody means: ``3``, ``"3:5"``, ``"last"`` or a name; and that stretch of the recording."""

from __future__ import annotations

import re
from typing import Any, Final

from sightline.errors import NothingMatched, UsageError
from sightline.given import said
from sightline.trace.data import StepInfo
from sightline.trace.tables import Index
from sightline.trace.training_steps import innermost

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
        raise NothingMatched(f"step={said(step)}: {_NO_STEPS}")
    if wanted is None:
        last = max(known)
        return _joined([known[last]], f"step {last}")
    chosen = [known[number] for number in sorted(known) if number in wanted]
    if not chosen:
        raise NothingMatched(f"step={said(step)} is not there; {_there(known)}.")
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
        raise UsageError(f"step={said(step)} must be a step, counted from 0: 3, '3:5', 'last', or a name.")
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
