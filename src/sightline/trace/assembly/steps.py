"""Steps batch by batch: marks get the places of ops and calls, and in the end become stretches of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sightline.trace.assembly.numbers import Numbers
from sightline.trace.assembly.ops import Ops
from sightline.trace.assembly.raw import StepMark
from sightline.trace.data import StepInfo

_END = 1 << 62


class Placed(NamedTuple):
    """A mark, and the first op and call after it."""

    mark: StepMark
    op: int
    call: int


def opening(opened: Sequence[StepMark], end: StepMark) -> int:
    """Which of the open marks one ends: the last of its name, -1 for none.

    An optimizer whose step raised leaves its mark open.
    """
    return next((at for at in range(len(opened) - 1, -1, -1) if opened[at].name == end.name), -1)


class Steps:
    """The marks of a recording so far."""

    def __init__(self) -> None:
        self.waiting: list[StepMark] = []  #: those whose ops have not come yet
        self._placed: list[Placed] = []

    def place(self, end: int, ops: Ops, calls: Numbers, first_call: int) -> None:
        """Place the marks before ``end``; ``calls`` are the ids of the calls that began in this batch."""
        now = [mark for mark in self.waiting if mark.op < end]
        self.waiting = [mark for mark in self.waiting if mark.op >= end]
        for mark in now:
            op = ops.base + int(np.searchsorted(ops.ids, mark.op))
            self._placed.append(Placed(mark, op, first_call + int(np.searchsorted(calls, mark.op))))

    def infos(self, begin: int, elapsed: int, ops: int, calls: int) -> list[StepInfo]:
        """The steps in order of their beginning; one that is still open goes on to the end."""
        opened: list[Placed] = []
        found: list[tuple[Placed, Placed]] = []
        for placed in self._placed:
            if placed.mark.begins:
                opened.append(placed)
            else:
                at = opening([each.mark for each in opened], placed.mark)
                found += [(opened.pop(at), placed)] if at >= 0 else []
        end = Placed(StepMark("", _END, begin + elapsed, begins=False), ops, calls)
        found += ((placed, end) for placed in opened)
        steps = []
        for first, last in sorted(found, key=lambda pair: pair[0].mark.op):
            start = max(first.mark.time - begin, 0)
            duration = last.mark.time - begin - start
            steps.append(StepInfo(first.mark.name, first.op, last.op, first.call, last.call, start, duration))
        return steps
