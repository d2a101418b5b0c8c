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


def optimizer_steps(data: TraceData) -> list[OptimizerStep]:
    """Every step of an optimizer in the order they began. Of a long run the first ones have an optimizer."""
    phases = data.ops.phase
    infos = sorted(
        (clip_times(step) for step in data.steps if step.name == OPTIMIZER_STEP),
        key=lambda step: (step.start, step.first_op),
    )
    steps, end = [], 0
    for info, optimizer in zip(infos, _optimizers_of(data, infos), strict=True):
        backward = bool((phases[end : info.end_op] == _BACKWARD).any())
        steps.append(OptimizerStep(info, optimizer, backward))
        end = max(end, info.end_op)
    return steps


def _optimizers_of(data: TraceData, infos: list[StepInfo]) -> list[int]:
    """The optimizer of each step. Its time was noted right before the step began."""
    training = data.info.get("training")
    training = training if isinstance(training, dict) else {}
    listed, count = _list(training.get("optimizers")), training.get("count")
    if len(listed) == 1 and type(count) is int and count >= len(infos):
        return [0] * len(infos)
    rows = [
        (_clip(row[1]), row[0])
        for row in _list(training.get("steps"))
        if isinstance(row, list) and len(row) > 1 and all(type(number) is int for number in row[:2])
        and 0 <= row[0] < len(listed)
    ]  # fmt: skip
    owners = [-1] * len(infos)
    begins = np.array([info.start for info in infos], dtype=np.int64)
    places = np.searchsorted(begins, np.array([time for time, _ in rows], dtype=np.int64)).tolist()
    for (_, optimizer), place in zip(rows, places, strict=True):
        if place < len(owners):
            owners[place] = optimizer
    if not any(places) and len(rows) != 1 and owners:  # the steps of these rows were not kept
        owners[0] = -1
    return owners


def clip_times(step: StepInfo) -> StepInfo:
    """A step with its times clipped: those of a damaged file may be any."""
    return replace(step, start=_clip(step.start), duration=_clip(step.duration))


def _clip(time: int) -> int:
    return min(max(time, 0), _LATEST)


def _list(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else []
