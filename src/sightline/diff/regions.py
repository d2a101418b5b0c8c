"""What lies between values that agree and one that differs: the ops of both sides and their inputs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from sightline.diff.alignment import Alignment
from sightline.diff.side import Side
from sightline.diff.values import State

_LARGEST: Final = 2000  #: ops of a region; what is further away is not looked at


@dataclass
class Region:
    """The ops between the last values that agree and a pair, on both sides."""

    ops_a: list[int] = field(default_factory=list)
    ops_b: list[int] = field(default_factory=list)
    edge_a: list[int] = field(default_factory=list)  #: values that agree, which the ops begin with
    edge_b: list[int] = field(default_factory=list)
    leaves_a: list[int] = field(
        default_factory=list
    )  #: values that no op made: parameters, inputs, constants
    leaves_b: list[int] = field(default_factory=list)
    error: float = 0.0  #: how far apart the values at the edge are, at most
    begins_earlier: bool = False  #: an input differs already
    cut: bool = False  #: there were too many ops


class Regions:
    """Finds the region behind a pair of values."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment

    def behind(self, one: int, other: int, beyond: int = 0) -> Region:
        """The region of a pair of values; whether they differ is for others to say.

        Values that agree only by their statistics may hide a difference: ``beyond`` so many of them on each
        way the region goes on.
        """
        region = Region()
        made = self._alignment
        self._walk(region, made.a, made.values_a, (one, other), True, beyond)
        self._walk(region, made.b, made.values_b, (other, one), False, beyond)
        region.ops_a.sort()
        region.ops_b.sort()
        return region

    def _walk(
        self, region: Region, side: Side, partners: list[int], pair: tuple[int, int], first: bool, beyond: int
    ) -> None:
        value, goal = pair
        ops, edge, leaves = (
            (region.ops_a, region.edge_a, region.leaves_a)
            if first
            else (region.ops_b, region.edge_b, region.leaves_b)
        )
        seen: set[int] = set()
        met: set[int] = set()
        waiting = deque([(value, beyond)])
        while waiting:
            at, left = waiting.popleft()
            if at in seen:
                continue
            seen.add(at)
            partner = partners[at]
            maker = side.producer[at]
            verdict = None
            if partner >= 0 and not (at == value and partner == goal):
                verdict = self._alignment.compare(*((at, partner) if first else (partner, at)))
            if maker < 0:
                leaves.append(at)
                continue
            if (
                verdict is not None
                and verdict.state is not State.UNKNOWN
                and self._is_solid(at, partner, first)
            ):
                if verdict.agrees and (verdict.state is State.SAME or not left):
                    edge.append(at)
                    region.error = max(region.error, verdict.error)
                    continue
                left -= 1
                if not verdict.agrees and at != value:
                    region.begins_earlier = True
                    continue
            if len(ops) >= _LARGEST:
                region.cut = True
                return
            if maker not in met:
                met.add(maker)
                ops.append(maker)
                waiting += ((given, left) for given in side.inputs(maker))

    def _is_solid(self, value: int, partner: int, first: bool) -> bool:
        """Whether a value was computed: one that only shows another says nothing of its order."""
        made = self._alignment
        one, other = (value, partner) if first else (partner, value)
        return _computed(made.a, one) or _computed(made.b, other)


def _computed(side: Side, value: int) -> bool:
    return side.origin[value] == value
