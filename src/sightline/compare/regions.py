"""A `Region`: the ops of both sides between values that agree and one that differs.

`RegionOps` pairs the ops of a region, and makes the `Reason` that names two of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sightline.compare.op_pairs import Alignment, PairedSide
from sightline.compare.sequences import best_pairs
from sightline.compare.side import OpLabel
from sightline.compare.values import UNKNOWN, State
from sightline.text_encoding import printable

_MAX_REGION: Final = 2000  #: ops of a region on each side


@dataclass
class RegionSide:
    """A region on one side."""

    ops: list[int] = field(default_factory=list)
    edge: list[int] = field(default_factory=list)  #: values that agree, which the ops start from
    leaves: list[int] = field(default_factory=list)  #: parameters, inputs and constants


@dataclass
class Region:
    """The ops between the last values that agree and a pair, on both sides."""

    a: RegionSide = field(default_factory=RegionSide)
    b: RegionSide = field(default_factory=RegionSide)
    error: float = 0.0  #: the largest error of the values at the edge
    begins_earlier: bool = False  #: whether an input differs already

    @property
    def sides(self) -> tuple[RegionSide, RegionSide]:
        return self.a, self.b


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
        for paired, part in zip(self._alignment.sides, region.sides, strict=True):
            self._walk(region, paired, part, paired.pair(one, other), beyond)
            part.ops.sort()
        return region

    def _walk(
        self, region: Region, paired: PairedSide, part: RegionSide, goal: tuple[int, int], beyond: int
    ) -> None:
        """Collect the ops of one side behind the first value of a pair, up to values that agree."""
        a, b, side, value = self._alignment.a, self._alignment.b, paired.side, goal[0]
        seen: set[int] = set()
        seen_ops: set[int] = set()
        waiting = deque([(value, beyond)])
        while waiting:
            at, left = waiting.popleft()
            if at in seen:
                continue
            seen.add(at)
            producer = side.producer[at]
            if producer < 0:
                part.leaves.append(at)
                continue
            partner, verdict = paired.values[at], UNKNOWN
            if partner >= 0 and (at, partner) != goal:
                one, other = paired.pair(at, partner)
                # Statistics of a view do not show its order: one of the two has to be computed.
                if a.origin[one] == one or b.origin[other] == other:
                    verdict = self._alignment.compare(one, other)
            if verdict.agrees and (verdict.state is State.SAME or not left):
                part.edge.append(at)
                region.error = max(region.error, verdict.error)
                continue
            left -= verdict.state is not State.UNKNOWN
            if verdict.state is State.DIFFERENT and at != value:
                region.begins_earlier = True
                continue
            if len(part.ops) >= _MAX_REGION:
                return
            if producer not in seen_ops:
                seen_ops.add(producer)
                part.ops.append(producer)
                waiting += ((source, left) for source in side.inputs(producer))


_MAX_COMPARED: Final = 400  #: ops of a region that are compared each with each


@printable
@dataclass(frozen=True)
class Reason:
    """The likeliest reason of a divergence.

    ``kind`` is "compiled", "module", "parameter", "constant", "op", "precision", "layout", "wiring",
    "random", "input" or "unexplained". ``a`` and ``b`` are the ops it is about; one side may have none.
    """

    kind: str
    text: str  #: ``eps 1e-05 against 1e-06``
    a: OpLabel | None = None
    b: OpLabel | None = None
    side: str = ""  #: "a" or "b" where the text is about something that only this side has

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "a": self.a.to_dict() if self.a else None,
                "b": self.b.to_dict() if self.b else None}  # fmt: skip


class RegionOps:
    """Which ops of the two sides of a region correspond, which stand alone, and how they are named."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment

    def pairs(self, region: Region) -> list[tuple[int, int]]:
        """The corresponding ops of a region, by the alignment or else by name."""
        alignment = self._alignment
        inside = set(region.b.ops)
        pairs = [(x, alignment.ops_a[x]) for x in region.a.ops if alignment.ops_a[x] in inside]
        left, right = self._unpaired(region)
        if left and right and len(left) * len(right) <= _MAX_COMPARED * _MAX_COMPARED:
            names = alignment.a.name[left][:, None] == alignment.b.name[right][None, :]
            pairs += [(left[x], right[y]) for x, y in best_pairs(names.astype(np.int32))]
        return sorted(pairs)

    def _unpaired(self, region: Region) -> list[list[int]]:
        """The computing ops of each side that have no partner in the region."""
        inside = set(region.b.ops), set(region.a.ops)
        return [
            [op for op in part.ops if not paired.side.layout[op] and paired.ops[op] not in others]
            for paired, part, others in zip(self._alignment.sides, region.sides, inside, strict=True)
        ]

    def one_sided(self, region: Region) -> list[list[int]]:
        """The computing ops of each side without a counterpart in the region of the other side."""
        matched = list(map(set, zip(*self.pairs(region), strict=True))) or [set(), set()]
        return [
            [op for op in ops if op not in known and paired.ops[op] < 0]
            for paired, ops, known in zip(self._alignment.sides, self._unpaired(region), matched, strict=True)
        ]

    def value_reason(
        self, region: Region, kind: str, text: str, pair: tuple[int, int], letter: str = ""
    ) -> Reason:
        """A reason about a pair of values, labelled with the ops that first use them."""
        first_uses = []
        for paired, part, value in zip(self._alignment.sides, region.sides, pair, strict=True):
            side = paired.side
            using = [op for op in part.ops
                     if any(value in (each, side.origin[each]) for each in side.inputs(op))]  # fmt: skip
            computing = [op for op in using if not side.layout[op]]
            first_uses.append((computing or using or [-1])[0])
        return Reason(kind, text, *self.region_labels(region, *first_uses), letter)

    def region_labels(self, region: Region, x: int, y: int) -> tuple[OpLabel | None, OpLabel | None]:
        """The labels of two ops; for -1 that of the last computing op of its side, or its last op."""
        labels: list[OpLabel | None] = []
        for paired, part, op in zip(self._alignment.sides, region.sides, (x, y), strict=True):
            if op < 0:
                computing = [each for each in part.ops if not paired.side.layout[each]]
                op = (computing or part.ops or [-1])[-1]
            labels.append(paired.side.op_label(op) if op >= 0 else None)
        return labels[0], labels[1]
