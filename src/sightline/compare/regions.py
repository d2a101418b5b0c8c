"""A `Region`: the ops of both sides between values that agree and one that differs.

`RegionOps` pairs the ops of a region, and makes the `Reason` that names two of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sightline.compare.op_pairs import Alignment
from sightline.compare.sequences import best_pairs
from sightline.compare.side import OpLabel, Side
from sightline.compare.values import State

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


SIDES: Final = {"a": "first", "b": "second"}
_MAX_COMPARED: Final = 400  #: ops of a region that are compared each with each


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
    side: str = ""  #: "a" or "b" where only one side has what the text is about

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
        inside = set(region.ops_b)
        pairs = [(x, alignment.ops_a[x]) for x in region.ops_a if alignment.ops_a[x] in inside]
        left, right = self.unpaired(region)
        if left and right and len(left) * len(right) <= _MAX_COMPARED * _MAX_COMPARED:
            names = alignment.a.name[left][:, None] == alignment.b.name[right][None, :]
            pairs += [(left[x], right[y]) for x, y in best_pairs(names.astype(np.int32))]
        return sorted(pairs)

    def unpaired(self, region: Region) -> tuple[list[int], list[int]]:
        alignment = self._alignment
        inside_a, inside_b = set(region.ops_a), set(region.ops_b)
        return (
            [op for op in region.ops_a if not alignment.a.layout[op] and alignment.ops_a[op] not in inside_b],
            [op for op in region.ops_b if not alignment.b.layout[op] and alignment.ops_b[op] not in inside_a],
        )

    def one_sided(self, region: Region) -> tuple[list[int], list[int]]:
        """The computing ops without a counterpart in the region of the other side."""
        pairs = self.pairs(region)
        paired_a, paired_b = {x for x, _ in pairs}, {y for _, y in pairs}
        left, right = self.unpaired(region)
        alignment = self._alignment
        return (
            [op for op in left if op not in paired_a and alignment.ops_a[op] < 0],
            [op for op in right if op not in paired_b and alignment.ops_b[op] < 0],
        )

    def value_reason(
        self, region: Region, kind: str, text: str, value: int, other: int, which: str = ""
    ) -> Reason:
        """A reason about a value, labelled with the ops that first use it."""
        first_uses = []
        for side, ops, used in (
            (self._alignment.a, region.ops_a, value),
            (self._alignment.b, region.ops_b, other),
        ):
            using = [
                op
                for op in ops
                if used in side.inputs(op) or any(side.origin[v] == used for v in side.inputs(op))
            ]
            computing = [op for op in using if not side.layout[op]]
            first_uses.append((computing or using or [-1])[0])
        return Reason(kind, text, *self.region_labels(region, *first_uses), which)

    def labels(self, x: int, y: int) -> tuple[OpLabel | None, OpLabel | None]:
        """The labels of two ops; None for -1."""
        a, b = self._alignment.a, self._alignment.b
        return a.op_label(x) if x >= 0 else None, b.op_label(y) if y >= 0 else None

    def region_labels(self, region: Region, x: int, y: int) -> tuple[OpLabel | None, OpLabel | None]:
        """The labels of two ops; for -1 that of the last op of its side."""
        x = x if x >= 0 else _last_op(self._alignment.a, region.ops_a)
        y = y if y >= 0 else _last_op(self._alignment.b, region.ops_b)
        return self.labels(x, y)


def _last_op(side: Side, ops: list[int]) -> int:
    """The last computing op, or the last of all; -1 where there is none."""
    computing = [op for op in ops if not side.layout[op]]
    return (computing or ops or [-1])[-1]
