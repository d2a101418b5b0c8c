"""What a recording says of the training loop: optimizers, their steps, schedulers, norms of gradients.

It is read with care: a file may say anything, and what is not as it should be is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sightline.analysis.problems.context import BACKWARD, ProblemContext
from sightline.notation import position_text
from sightline.trace.data import KINDS


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer that stepped."""

    type: str
    parameters: int
    names: frozenset[str]  #: of the parameters it holds, as far as they are known
    foreign: int  #: how many with a gradient are of no module that was seen
    count: int  #: how often it stepped
    place: str
    called: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an optimizer."""

    optimizer: int
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
    made: str  #: where; empty if it was there before
    stepped: str


class LoopRecord:
    """The training loop of a recording."""

    def __init__(self, context: ProblemContext) -> None:
        self._context = context
        told = context.data.info.get("training")
        self._told: dict[str, Any] = told if isinstance(told, dict) else {}

    @cached_property
    def optimizers(self) -> list[OptimizerRecord]:
        found = []
        for one in self._rows("optimizers", dict):
            names = one.get("names")
            found.append(
                OptimizerRecord(
                    str(one.get("type")), _whole(one.get("parameters")),
                    frozenset(map(str, names if isinstance(names, list) else ())),
                    _whole(one.get("foreign", 0)),
                    _whole(one.get("steps")), *places_of(one.get("place")),
                )
            )  # fmt: skip
        return found

    @cached_property
    def steps(self) -> list[StepRecord]:
        starts = self._context.data.ops.start
        found = []
        for row in self._rows("steps", list):
            if len(row) == 5 and all(type(number) is int for number in row[:3]):
                if 0 <= row[0] < len(self.optimizers):
                    at = int(np.searchsorted(starts, row[1]))
                    found.append(StepRecord(row[0], at, row[2], _rate(row[3]), _rate(row[4])))
        return found

    @cached_property
    def schedulers(self) -> list[ScheduleRecord]:
        return [
            ScheduleRecord(
                str(one.get("type")), _whole(one.get("optimizer")), _whole(one.get("steps")),
                one.get("early") is True, places_of(one.get("made"))[-1] or places_of(one.get("made"))[0],
                places_of(one.get("place"))[-1] or places_of(one.get("place"))[0],
            )
            for one in self._rows("schedulers", dict)
        ]  # fmt: skip

    def of(self, optimizer: int) -> list[StepRecord]:
        """The steps of one optimizer."""
        return [step for step in self.steps if step.optimizer == optimizer]

    @cached_property
    def held(self) -> frozenset[str]:
        """Every parameter that an optimizer holds, under all names it has."""
        names = frozenset().union(*(one.names for one in self.optimizers))
        return frozenset().union(
            names, *(paths for paths in self.aliases.values() if not paths.isdisjoint(names))
        )

    @cached_property
    def aliases(self) -> dict[int, set[str]]:
        """Every name of every parameter, by its key."""
        found: dict[int, set[str]] = {}
        for module in self._context.data.modules:
            for info in module.parameters:
                if not info.buffer:
                    names = found.setdefault(info.key, {info.path})
                    names.update(f"{alias}.{info.name}" if alias else info.name for alias in module.aliases)
        return found

    @cached_property
    def gradients(self) -> dict[str, list[int]]:
        """The values of the gradients of each parameter, by its name."""
        data = self._context.data
        named = np.flatnonzero((data.values.kind == KINDS.index("gradient")) & (data.values.name >= 0))
        found: dict[str, list[int]] = {}
        for value in named.tolist():
            name = data.names[int(data.values.name[value])]
            if name.endswith(".grad"):
                found.setdefault(name.removesuffix(".grad"), []).append(value)
        return found

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names of parameters as the model lists them."""
        place: dict[str, int] = {}
        for paths in self.aliases.values():
            at = len(place)
            place |= dict.fromkeys(paths, at)
        return sorted(names, key=lambda name: place.get(name, len(place)))

    @cached_property
    def backward(self) -> list[int]:
        """The ops of backward passes."""
        found: list[int] = np.flatnonzero(
            self._context.aten & (self._context.data.ops.phase == BACKWARD)
        ).tolist()
        return found

    def norms(self) -> list[dict[str, float]]:
        """The norms of gradients by parameter, for each step in which they were taken."""
        found: dict[int, dict[str, float]] = {}
        told = self._context.data.info.get("gradients")
        for row in told if isinstance(told, list) else ():
            if (
                isinstance(row, list | tuple)
                and len(row) == 3
                and all(isinstance(one, list) for one in row[1:])
            ):
                norms = found.setdefault(_whole(row[0]), {})
                for name, norm in zip(row[1], row[2], strict=False):
                    if type(norm) is float:
                        norms[str(name)] = norm
        return list(found.values())

    def _rows(self, name: str, kind: type) -> list[Any]:
        told = self._told.get(name)
        return [one for one in told if isinstance(one, kind)] if isinstance(told, list) else []


def places_of(told: Any) -> tuple[str, str]:
    """A line as the views write it, and the user's own line if that one is a library's."""
    texts = []
    for at in (0, 3):
        part = told[at : at + 3] if isinstance(told, list) else []
        fits = len(part) == 3 and type(part[1]) is int
        texts.append(f"{position_text(str(part[0]), part[1])} in {part[2]}" if fits else "")
    return texts[0], texts[1]


def _whole(number: Any) -> int:
    return number if type(number) is int else -1


def _rate(number: Any) -> float | None:
    return float(number) if type(number) in (int, float) else None
