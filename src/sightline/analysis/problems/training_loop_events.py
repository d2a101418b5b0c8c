"""The training loop of a recording: optimizers, their steps, schedulers, norms of gradients.

A recording's file may be damaged or hostile: entries of the wrong form are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sightline.analysis.problems.context import BACKWARD, ProblemContext
from sightline.data.trace_data import KINDS, TraceData
from sightline.notation import position_text


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer that stepped."""

    type: str
    parameters: int
    names: frozenset[str]  #: of the parameters it holds, as far as they belong to a recorded module
    foreign: int  #: how many parameters with a gradient belong to none
    idle: int  #: how many belong to none, require a gradient, and had none in any step
    count: int  #: how often it stepped
    place: str
    called: str
    rates: tuple[RateCurve, ...] = ()  #: the learning rate of each parameter group


@dataclass(frozen=True, slots=True)
class RateCurve:
    """The learning rate of a parameter group: the first, where it turns, the last."""

    points: tuple[float, ...]
    more: int = 0  #: turning points that were not kept
    after: int = 0  #: how often the optimizer had stepped when the group came

    @classmethod
    def of(cls, rates: Iterable[float]) -> RateCurve:
        """The curve of the rates of consecutive steps.

        >>> RateCurve.of([0.0, 0.5, 1.0, 1.0, 0.5, 0.1]).points
        (0.0, 1.0, 0.1)
        """
        points: list[float] = []
        for rate in rates:
            if len(points) > 1 and (points[-1] - points[-2]) * (rate - points[-1]) > 0:
                points[-1] = rate
            elif not points or rate != points[-1]:
                points.append(rate)
        return cls(tuple(points))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an optimizer."""

    optimizer: int
    time: int  #: of its beginning, ns since the recording began
    position: int  #: the first op after its beginning
    graded: int  #: how many of its parameters had a gradient; -1 where it computes them itself
    lowest: float | None  #: of its learning rates
    highest: float | None


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A scheduler."""

    type: str
    optimizer: int  #: -1 for one that has not stepped
    steps: int
    early: bool  #: it stepped before its optimizer did
    created_at: str  #: the source line; empty if it was created before the recording
    stepped_at: str


class LoopRecord:
    """The training loop of a recording."""

    def __init__(self, context: ProblemContext) -> None:
        self._context = context
        info = context.data.info.get("training")
        self._info: dict[str, Any] = info if isinstance(info, dict) else {}

    @cached_property
    def optimizers(self) -> list[OptimizerRecord]:
        records = []
        for row in self._rows("optimizers", dict):
            names, rates, curves = row.get("names"), row.get("rates"), []
            later, idle = row.get("later_groups"), row.get("idle")
            joined = {
                each[0]: each[1] for each in (later if isinstance(later, list) else ())
                if isinstance(each, list) and len(each) == 2 and all(type(number) is int for number in each)
            }  # fmt: skip
            for at, group in enumerate(
                rates if isinstance(rates, list) else ()
            ):  # those whose rates are known
                points = [_rate(number) for number in group[1:]] if isinstance(group, list) else []
                known = tuple(rate for rate in points if rate is not None)
                if points and len(known) == len(points):
                    curves.append(RateCurve(known, max(_int(group[0]), 0), max(joined.get(at, 0), 0)))
            records.append(
                OptimizerRecord(
                    str(row.get("type")), _int(row.get("parameters")),
                    frozenset(map(str, names if isinstance(names, list) else ())),
                    _int(row.get("foreign", 0)), len(idle) if isinstance(idle, list) else 0,
                    _int(row.get("steps")), *source_lines(row.get("place")), tuple(curves),
                )
            )  # fmt: skip
        return records

    @cached_property
    def steps(self) -> list[StepRecord]:
        starts = self._context.data.ops.start
        records = []
        for row in self._rows("steps", list):
            if len(row) == 5 and all(type(number) is int for number in row[:3]):
                if 0 <= row[0] < len(self.optimizers):
                    at = int(np.searchsorted(starts, row[1]))
                    records.append(StepRecord(row[0], row[1], at, row[2], _rate(row[3]), _rate(row[4])))
        return records

    @cached_property
    def schedulers(self) -> list[ScheduleRecord]:
        return [
            ScheduleRecord(
                str(row.get("type")), _int(row.get("optimizer")), _int(row.get("steps")),
                row.get("early") is True, _user_line(row.get("made")), _user_line(row.get("place")),
            )
            for row in self._rows("schedulers", dict)
        ]  # fmt: skip

    def steps_of(self, optimizer: int) -> list[StepRecord]:
        """The steps of one optimizer."""
        return [step for step in self.steps if step.optimizer == optimizer]

    def rates_of(self, optimizer: int) -> tuple[RateCurve, ...]:
        """The learning rates of an optimizer; without those of its groups, its lowest and its highest."""
        curves = self.optimizers[optimizer].rates
        if curves:
            return curves
        pairs = [(step.lowest, step.highest) for step in self.steps_of(optimizer)]
        known = [(low, high) for low, high in pairs if low is not None and high is not None]
        return tuple(dict.fromkeys(map(RateCurve.of, zip(*known, strict=True))))

    @cached_property
    def optimized(self) -> frozenset[str]:
        """Every parameter that an optimizer holds, under all its names."""
        names = frozenset().union(*(optimizer.names for optimizer in self.optimizers))
        return names.union(*(paths for paths in self.aliases.values() if not paths.isdisjoint(names)))

    @cached_property
    def aliases(self) -> dict[int, set[str]]:
        """Every name of every parameter, by its key."""
        return parameter_aliases(self._context.data)

    @cached_property
    def gradients(self) -> dict[str, list[int]]:
        """The values of the gradients of each parameter, by its name."""
        data = self._context.data
        named = np.flatnonzero((data.values.kind == KINDS.index("gradient")) & (data.values.name >= 0))
        gradients: dict[str, list[int]] = {}
        for value in named.tolist():
            name = data.names[int(data.values.name[value])]
            if name.endswith(".grad"):
                gradients.setdefault(name.removesuffix(".grad"), []).append(value)
        return gradients

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names of parameters as the model lists them."""
        ranks: dict[str, int] = {}
        for paths in self.aliases.values():
            ranks |= dict.fromkeys(paths, len(ranks))
        return sorted(names, key=lambda name: ranks.get(name, len(ranks)))

    @cached_property
    def backward(self) -> list[int]:
        """The ops of backward passes."""
        mask = self._context.aten & (self._context.data.ops.phase == BACKWARD)
        ops: list[int] = np.flatnonzero(mask).tolist()
        return ops

    def norms(self) -> list[dict[str, float]]:
        """The norms of gradients by parameter, for each step in which they were taken."""
        by_step: dict[int, dict[str, float]] = {}
        rows = self._context.data.info.get("gradients")
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, list | tuple) or len(row) != 3:
                continue
            if all(isinstance(column, list) for column in row[1:]):
                norms = by_step.setdefault(_int(row[0]), {})
                for name, norm in zip(row[1], row[2], strict=False):
                    if type(norm) is float:
                        norms[str(name)] = norm
        return list(by_step.values())

    def _rows(self, name: str, kind: type) -> list[Any]:
        rows = self._info.get(name)
        return [row for row in rows if isinstance(row, kind)] if isinstance(rows, list) else []


def parameter_aliases(data: TraceData, buffers: bool = False) -> dict[int, set[str]]:
    """Every name of every parameter, by its key: tied ones have several."""
    aliases: dict[int, set[str]] = {}
    for module in data.modules:
        for info in module.parameters:
            if buffers or not info.buffer:
                names = aliases.setdefault(info.key, {info.path})
                names.update(f"{alias}.{info.name}" if alias else info.name for alias in module.aliases)
    return aliases


def source_lines(position: Any) -> tuple[str, str]:
    """A source line as the views write it, and the user's own line if that one is a library's."""
    texts = []
    for at in (0, 3):
        part = position[at : at + 3] if isinstance(position, list) else []
        valid = len(part) == 3 and type(part[1]) is int
        texts.append(f"{position_text(str(part[0]), part[1])} in {part[2]}" if valid else "")
    return texts[0], texts[1]


def _user_line(position: Any) -> str:
    line, own = source_lines(position)
    return own or line


def _int(number: Any) -> int:
    return number if type(number) is int else -1


def _rate(number: Any) -> float | None:
    return float(number) if type(number) in (int, float) else None
