"""A `Region`: the ops of both sides between values that agree and one that differs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from sightline.diff.op_pairs import Alignment
from sightline.diff.side import Side
from sightline.diff.values import State

_MAX_REGION: Final = 2000  #: ops of a region on each side


@dataclass
class Region:
    """The ops between the last values that agree and a pair, on both sides."""

    ops_a: list[int] = field(default_factory=list)
    ops_b: list[int] = field(default_factory=list)
    edge_a: list[int] = field(default_factory=list)  #: values that agree, which the ops start from
    edge_b: list[int] = field(default_factory=list)
    leaves_a: list[int] = field(default_factory=list)  #: parameters, inputs and constants
    leaves_b: list[int] = field(default_factory=list)
    error: float = 0.0  #: the largest error of the values at the edge
    begins_earlier: bool = False  #: whether an input differs already
    cut: bool = False  #: whether there were too many ops


class Regions:
    """Finds the region behind a pair of values."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment

    def behind(self, one: int, other: int, beyond: int = 0) -> Region:
        """The region of a pair of values.

        Values that agree only by their statistics may hide a difference: on each path the region goes on
        past ``beyond`` of them.
        """
        region = Region()
        alignment = self._alignment
        self._walk(region, alignment.a, alignment.values_a, (one, other), True, beyond)
        self._walk(region, alignment.b, alignment.values_b, (other, one), False, beyond)
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
        seen_ops: set[int] = set()
        waiting = deque([(value, beyond)])
        while waiting:
            at, left = waiting.popleft()
            if at in seen:
                continue
            seen.add(at)
            partner = partners[at]
            producer = side.producer[at]
            verdict = None
            if partner >= 0 and not (at == value and partner == goal):
                verdict = self._alignment.compare(*((at, partner) if first else (partner, at)))
            if producer < 0:
                leaves.append(at)
                continue
            if (
                verdict is not None
                and verdict.state is not State.UNKNOWN
                and self._is_computed(at, partner, first)
            ):
                if verdict.agrees and (verdict.state is State.SAME or not left):
                    edge.append(at)
                    region.error = max(region.error, verdict.error)
                    continue
                left -= 1
                if not verdict.agrees and at != value:
                    region.begins_earlier = True
                    continue
            if len(ops) >= _MAX_REGION:
                region.cut = True
                return
            if producer not in seen_ops:
                seen_ops.add(producer)
                ops.append(producer)
                waiting += ((source, left) for source in side.inputs(producer))

    def _is_computed(self, value: int, partner: int, first: bool) -> bool:
        """Whether a value was computed on either side: statistics of a view do not show its order."""
        alignment = self._alignment
        one, other = (value, partner) if first else (partner, value)
        return alignment.a.origin[one] == one or alignment.b.origin[other] == other
