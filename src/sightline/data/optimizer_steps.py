"""The steps of optimizers in a run, and which optimizer made each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from sightline.data.trace_data import OPTIMIZER_STEP, PHASES, StepInfo, TraceData

_BACKWARD: Final = PHASES.index("backward")
_LATEST: Final = 1 << 51  #: nanoseconds; the times of a damaged file may be any


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of an optimizer."""

    info: StepInfo
    optimizer: int  #: which of those that the recording lists; -1 where it is not known
    follows_backward: bool  #: a backward pass ran after the optimizer step before it
    gradients: int = -1  #: how many it found; -1 where it is not known, or it makes them itself


def optimizer_steps(data: TraceData) -> list[OptimizerStep]:
    """Every step of an optimizer in the order they began. Of a long run the first ones have an optimizer."""
    phases = data.ops.phase
    infos = sorted(
        (clip_times(step) for step in data.steps if step.name == OPTIMIZER_STEP),
        key=lambda step: (step.start, step.first_op),
    )
    steps, end = [], 0
    found = _gradients_of(data, infos)
    for info, optimizer, gradients in zip(infos, _optimizers_of(data, infos), found, strict=True):
        backward = bool((phases[end : info.end_op] == _BACKWARD).any())
        steps.append(OptimizerStep(info, optimizer, backward, gradients))
        end = max(end, info.end_op)
    return steps


def _optimizers_of(data: TraceData, infos: list[StepInfo]) -> list[int]:
    """The optimizer of each step; -1 where it is not known."""
    training = _training(data)
    listed, count = _list(training.get("optimizers")), training.get("count")
    if len(listed) == 1 and type(count) is int and count >= len(infos):
        return [0] * len(infos)
    rows = [row for row in _noted_steps(data) if 0 <= row[0] < len(listed)]
    owners, places = [-1] * len(infos), _places(rows, infos)
    for row, place in zip(rows, places, strict=True):
        if place < len(owners):
            owners[place] = row[0]
    if not any(places) and len(rows) != 1 and owners:  # the steps of these rows were not kept
        owners[0] = -1
    return owners


def _gradients_of(data: TraceData, infos: list[StepInfo]) -> list[int]:
    """How many gradients each step found; -1 where it is not known."""
    rows, found = _noted_steps(data), [-1] * len(infos)
    for row, place in zip(rows, _places(rows, infos), strict=True):
        if place < len(found) and len(row) > 2 and type(row[2]) is int:
            found[place] = row[2]
    if found and data.info.get("dropped") and len(rows) != _training(data).get("count"):
        found[0] = -1  # the row of a step that was not kept
    return found


def _training(data: TraceData) -> dict[str, Any]:
    training = data.info.get("training")
    return training if isinstance(training, dict) else {}


def _noted_steps(data: TraceData) -> list[list[Any]]:
    """The first steps of the run, as they were noted: the optimizer, the time, the number of gradients."""
    rows = _list(_training(data).get("steps"))
    return [
        row for row in rows
        if isinstance(row, list) and len(row) > 1 and all(type(number) is int for number in row[:2])
    ]  # fmt: skip


def _places(rows: list[list[Any]], infos: list[StepInfo]) -> list[int]:
    """Which step each of these rows is about. Its time was noted right before the step began."""
    begins = np.array([info.start for info in infos], dtype=np.int64)
    times = np.array([_clip(row[1]) for row in rows], dtype=np.int64)
    places: list[int] = np.searchsorted(begins, times).tolist()
    return places


def clip_times(step: StepInfo) -> StepInfo:
    """A step with its times clipped: those of a damaged file may be any."""
    return replace(step, start=_clip(step.start), duration=_clip(step.duration))


def _clip(time: int) -> int:
    return min(max(time, 0), _LATEST)


def _list(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else []
