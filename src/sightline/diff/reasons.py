"""Why a region makes different values of the same inputs: the likeliest reason, with its places.

A `Region` is what lies between values that agree and one that differs: the ops of both sides, their inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sightline.diff.alignment import Alignment
from sightline.diff.constants import Constant, differing, floats, same
from sightline.diff.op_labels import OpLabel, OpLabels
from sightline.diff.op_names import MAKERS, RANDOM
from sightline.diff.sequences import best_pairs
from sightline.diff.side import Side
from sightline.diff.values import State
from sightline.notation import constant_text, dtype_name

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


_MANY: Final = 400  #: ops of a region that are compared each with each


@dataclass(frozen=True)
class Reason:
    """The likeliest reason of a divergence.

    ``kind`` is "module", "parameter", "constant", "op", "precision", "layout", "wiring", "random", "input" or
    "unexplained". ``a`` and ``b`` are its places; one side may have none.
    """

    kind: str
    text: str  #: ``eps 1e-05 against 1e-06``
    a: OpLabel | None = None
    b: OpLabel | None = None
    side: str = ""  #: "a" or "b" where only one side has what the text is about

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "a": self.a.to_dict() if self.a else None,
                "b": self.b.to_dict() if self.b else None}  # fmt: skip


class Reasons:
    """Finds reasons in the regions of one alignment."""

    def __init__(self, alignment: Alignment) -> None:
        self._made = alignment
        self.places = OpLabels(alignment.a), OpLabels(alignment.b)

    def of(self, region: Region) -> Reason:
        """The likeliest reason; the first that there is, in the order of how much they say."""
        return next(self._all(region))

    def strong(self, region: Region) -> Reason | None:
        """A reason that is one even where values are near: a constant or a parameter that differs."""
        for found in (self._parameter(region), self._constant(region), self._precision(region)):
            if found is not None:
                return found
        return None

    def _all(self, region: Region) -> Iterator[Reason]:
        for look in (self._input, self._module, self._parameter, self._constant, self._random, self._op,
                     self._precision, self._layout, self._wiring):  # fmt: skip
            found = look(region)
            if found is not None:
                yield found
        yield self._unexplained(region)

    # -- what is looked for --------------------------------------------------------------------

    def _input(self, region: Region) -> Reason | None:
        """A value that came from outside and differs."""
        made = self._made
        for value in region.leaves_a:
            other = made.values_a[value]
            if other < 0 or made.a.kind(value) in ("parameter", "buffer"):
                continue
            if made.compare(value, other).state is State.DIFFERENT:
                name = made.a.index.values[value].name or "an input"
                return self._at_first(region, "input", f"{name} itself differs", value, other)
        return None

    def _module(self, region: Region) -> Reason | None:
        """A module that only one side has called."""
        made = self._made
        lone = [self._lone_call(region.ops_a, made.a, made.calls.of_a, made.ops_a),
                self._lone_call(region.ops_b, made.b, made.calls.of_b, made.ops_b)]  # fmt: skip
        if (lone[0] is None) == (lone[1] is None):
            return None
        first = lone[0] is not None
        side, calls = (self._made.a, lone[0]) if first else (self._made.b, lone[1])
        assert calls is not None
        call, op = calls
        kind = side.module(call).type
        text = f"{side.label(call)} ({kind}) ran only on the {'first' if first else 'second'} side"
        one, other = self._places(region, op if first else -1, -1 if first else op)
        if first and one is not None:
            one = replace(one, name=side.label(call), module=side.label(call))
        elif other is not None:
            other = replace(other, name=side.label(call), module=side.label(call))
        return Reason("module", text, one, other, "a" if first else "b")

    def _lone_call(
        self, ops: list[int], side: Side, paired: Any, partners: list[int]
    ) -> tuple[int, int] | None:
        """The outermost call without a partner that ran one of the ops, and the op."""
        parents = side.data.calls.parent
        for op in ops:
            call = int(side.data.ops.call[op])
            if side.layout[op] or partners[op] >= 0 or call < 0 or paired[call] >= 0:
                continue
            while parents[call] >= 0 and paired[parents[call]] < 0:
                call = int(parents[call])
            if side.module(call).parameters or side.children.get(call) or len(ops) <= 8:
                return call, op
        return None

    def _parameter(self, region: Region) -> Reason | None:
        made = self._made
        for value in region.leaves_a:
            other, name = made.values_a[value], made.a.parameter_names.get(value)
            if other >= 0 and name and made.compare(value, other).state is State.DIFFERENT:
                its = made.b.parameter_names.get(other, name)
                both = name if name == its else f"{name} | {its}"
                return self._at_first(region, "parameter", f"{both} differs", value, other)
        lone = [self._lone_parameter(region.leaves_a, made.a, made.values_a),
                self._lone_parameter(region.leaves_b, made.b, made.values_b)]  # fmt: skip
        if (lone[0] < 0) != (lone[1] < 0):
            first = lone[0] >= 0
            side, value = (made.a, lone[0]) if first else (made.b, lone[1])
            text = f"{side.parameter_names[value]} is used only on the {'first' if first else 'second'} side"
            return self._at_first(region, "parameter", text, lone[0], lone[1], "a" if first else "b")
        return None

    def _lone_parameter(self, leaves: list[int], side: Side, partners: list[int]) -> int:
        """A parameter of a region that the other side does not use there."""
        for value in leaves:
            if value in side.parameter_names and partners[value] < 0:
                return value
        return -1

    def _constant(self, region: Region) -> Reason | None:
        for x, y in self._pairs(region):
            found = self._semantic(x, y)
            if found:
                shown = ", ".join(_constant_text(each, self._made.a.op_name(x)) for each in found[:3])
                return Reason("constant", shown, self.places[0].of(x), self.places[1].of(y))
        return self._lone_constants(region)

    def _semantic(self, x: int, y: int) -> list[Constant]:
        a, b = self._made.a, self._made.b
        name = a.op_name(x)
        if a.layout[x] or (name in MAKERS and not a.inputs(x) and name not in ("full", "arange")):
            return []
        return differing(a.index.ops[x], b.index.ops[y])

    def _lone_constants(self, region: Region) -> Reason | None:
        """Of ops that were fused on one side: the numbers that only one side has."""
        a, b = self._made.a, self._made.b
        alone = self._alone(region)
        if not (alone[0] and alone[1]):
            return None
        mine = [(number, op) for op in alone[0] for number in floats(a.index.ops[op])]
        its = [(number, op) for op in alone[1] for number in floats(b.index.ops[op])]
        left = [each for each in mine if not any(same(each[0], other[0]) for other in its)]
        right = [each for each in its if not any(same(each[0], other[0]) for other in mine)]
        if len(left) != 1 or len(right) != 1:
            return None
        text = f"{_number_text(left[0][0])} against {_number_text(right[0][0])}"
        return Reason("constant", text, self.places[0].of(left[0][1]), self.places[1].of(right[0][1]))

    def _random(self, region: Region) -> Reason | None:
        a, b = self._made.a, self._made.b
        drawn = [next((op for op in ops if side.op_name(op) in RANDOM), -1)
                 for side, ops in ((a, region.ops_a), (b, region.ops_b))]  # fmt: skip
        if max(drawn) < 0:
            return None
        first, second = self._places(region, *drawn)
        if min(drawn) >= 0:
            return Reason("random", "both sides draw random numbers", first, second)
        which = "a" if drawn[0] >= 0 else "b"
        text = f"draws random numbers, only on the {_SIDES[which]} side"
        return Reason("random", text, first, second, which)

    def _op(self, region: Region) -> Reason | None:
        """Ops that only one side has, or others in their place."""
        left, right = self._alone(region)
        left, right = self._harmful(left, self._made.a), self._harmful(right, self._made.b)
        if not left and not right:
            return None
        texts = [self._ops_text(ops, places) for ops, places in zip((left, right), self.places, strict=True)]
        places = self._places(region, left[0] if left else -1, right[0] if right else -1)
        if left and right:
            return Reason("op", f"{texts[0]} against {texts[1]}", *places)
        text = (
            f"{texts[0]} is missing on the second side"
            if left
            else f"{texts[1]} is missing on the first side"
        )
        return Reason("op", text, *places)

    def _harmful(self, ops: list[int], side: Side) -> list[int]:
        return [op for op in ops if not side.layout[op]]

    def _ops_text(self, ops: list[int], places: OpLabels) -> str:
        shown: dict[str, None] = {}
        for op in ops:
            place = places.of(op)
            numbers = floats(places._side.index.ops[op])
            shown.setdefault(f"{place.name} {_number_text(numbers[0])}" if numbers else place.name)
        names = list(shown)
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def _precision(self, region: Region) -> Reason | None:
        """A cast to a coarser precision that only one side has."""
        for first, side, ops, partners in (
            (True, self._made.a, region.ops_a, self._made.ops_a),
            (False, self._made.b, region.ops_b, self._made.ops_b),
        ):
            for op in ops:
                if partners[op] < 0 and is_coarser(side, op):
                    dtype = side.index.ops[op].outputs[0].dtype
                    text = f"rounds to {dtype_name(dtype)}, only on the {_SIDES['a' if first else 'b']} side"
                    return Reason(
                        "precision", text, *self._places(region, op if first else -1, -1 if first else op)
                    )
        return None

    def _layout(self, region: Region) -> Reason | None:
        """The same ops on elements in another order or shape."""
        a, b = self._made.a, self._made.b
        texts, firsts = [], []
        for side, ops, partners in ((a, region.ops_a, self._made.ops_a), (b, region.ops_b, self._made.ops_b)):
            lone = [
                op for op in ops if side.layout[op] and partners[op] < 0 and side.op_name(op) not in _SILENT
            ]
            texts.append(" ".join(_layout_text(side, op) for op in lone[:4]))
            firsts.append(lone[0] if lone else -1)
        paired = [(x, self._made.ops_a[x]) for x in region.ops_a if a.layout[x] and self._made.ops_a[x] >= 0]
        for x, y in paired:
            found = [each for each in differing(a.index.ops[x], b.index.ops[y]) if a.op_name(x) in _CUTS]
            if found:
                shown = f"{self.places[0].of(x).name}: " + ", ".join(map(_constant_text, found[:3]))
                return Reason("layout", shown, self.places[0].of(x), self.places[1].of(y))
        if texts[0] == texts[1]:
            return None
        text = f"{texts[0] or 'nothing'} against {texts[1] or 'nothing'}"
        return Reason("layout", text, *self._places(region, *firsts))

    def _wiring(self, region: Region) -> Reason | None:
        """Other values go in: other parts of the same, or of others."""
        made = self._made
        for x, y in self._pairs(region):
            for one, other in zip(made.a.inputs(x), made.b.inputs(y), strict=False):
                its, mine = made.values_a[one], made.values_b[other]
                crossed = its >= 0 and mine >= 0 and its != other and its not in made.b.inputs(y)
                if crossed and made.a.origin[one] == made.a.origin[mine]:
                    text = f"takes {self._source(made.a, one, 0)} against {self._source(made.b, other, 1)}"
                    return Reason("wiring", text, self.places[0].of(x), self.places[1].of(y))
        ours = {made.values_a[value] for value in region.edge_a}
        theirs = set(region.edge_b)
        if ours == theirs or not ours or not theirs:
            return None
        lone = sorted(ours - theirs), sorted(theirs - ours)
        texts = [
            f"takes {self._source(made.a, made.values_b[lone[0][0]], 0)}"
            if lone[0]
            else "takes nothing else",
            self._source(made.b, lone[1][0], 1) if lone[1] else "nothing else",
        ]
        ops = region.ops_a[-1] if region.ops_a else -1, region.ops_b[-1] if region.ops_b else -1
        return Reason("wiring", f"{texts[0]} against {texts[1]}", *self._places(region, *ops))

    def _source(self, side: Side, value: int, which: int) -> str:
        maker = side.producer[value]
        return (
            str(self.places[which].of(maker)) if maker >= 0 else side.index.values[value].name or "an input"
        )

    def _unexplained(self, region: Region) -> Reason:
        a, b = self._made.a, self._made.b
        last = region.ops_a[-1] if region.ops_a else -1, region.ops_b[-1] if region.ops_b else -1
        text = "the same ops on the same inputs"
        if min(last) >= 0:
            one, other = (side.index.ops[op].outputs[0] for side, op in ((a, last[0]), (b, last[1])))
            if one.device != other.device:
                text += f", on {one.device} and on {other.device}"
        return Reason("unexplained", text, *self._places(region, *last))

    # -- pairs in a region ---------------------------------------------------------------------

    def _pairs(self, region: Region) -> list[tuple[int, int]]:
        """The ops of both sides of a region that do the same, by what the alignment says or by name."""
        made = self._made
        inside = set(region.ops_b)
        pairs = [(x, made.ops_a[x]) for x in region.ops_a if made.ops_a[x] in inside]
        left, right = self._lone(region)
        if left and right and len(left) * len(right) <= _MANY * _MANY:
            names = made.a.name[left][:, None] == made.b.name[right][None, :]
            pairs += [(left[x], right[y]) for x, y in best_pairs(names.astype(np.int32))]
        return sorted(pairs)

    def _lone(self, region: Region) -> tuple[list[int], list[int]]:
        made = self._made
        inside_a, inside_b = set(region.ops_a), set(region.ops_b)
        return (
            [op for op in region.ops_a if not made.a.layout[op] and made.ops_a[op] not in inside_b],
            [op for op in region.ops_b if not made.b.layout[op] and made.ops_b[op] not in inside_a],
        )

    def _alone(self, region: Region) -> tuple[list[int], list[int]]:
        """The ops that compute and have no counterpart in the region of the other side."""
        pairs = self._pairs(region)
        ours, theirs = {x for x, _ in pairs}, {y for _, y in pairs}
        left, right = self._lone(region)
        made = self._made
        return (
            [op for op in left if op not in ours and made.ops_a[op] < 0],
            [op for op in right if op not in theirs and made.ops_b[op] < 0],
        )

    def _at_first(
        self, region: Region, kind: str, text: str, value: int, other: int, which: str = ""
    ) -> Reason:
        """A reason that is a value: placed where it is first used."""
        found = []
        for side, ops, wanted in ((self._made.a, region.ops_a, value), (self._made.b, region.ops_b, other)):
            using = [
                op
                for op in ops
                if wanted in side.inputs(op) or any(side.origin[v] == wanted for v in side.inputs(op))
            ]
            computing = [op for op in using if not side.layout[op]]
            found.append((computing or using or [-1])[0])
        return Reason(kind, text, *self._places(region, *found), which)

    def _places(self, region: Region, x: int, y: int) -> tuple[OpLabel | None, OpLabel | None]:
        """Places of two ops; where a side has none, that of the last op of its region."""
        x = x if x >= 0 else _last(self._made.a, region.ops_a)
        y = y if y >= 0 else _last(self._made.b, region.ops_b)
        return self.places[0].of(x) if x >= 0 else None, self.places[1].of(y) if y >= 0 else None


_SIDES: Final = {"a": "first", "b": "second"}
#: Layout ops that change nothing that an order or a shape could show.
_SILENT: Final = frozenset("contiguous clone detach alias to lift_fresh".split())
#: Layout ops whose constants say which elements are shown.
_CUTS: Final = frozenset("slice select narrow split unbind permute transpose expand".split())


def _last(side: Side, ops: list[int]) -> int:
    """The last op that computes, or the last of all; -1 where there is none."""
    computing = [op for op in ops if not side.layout[op]]
    return (computing or ops or [-1])[-1]


def is_coarser(side: Side, op: int) -> bool:
    """Whether an op casts to a precision coarser than all that its input has been through."""
    if side.op_name(op) != "to":
        return False
    given, made = side.inputs(op), side.outputs(op)
    if not given or not made or side.rounding[made[0]] <= side.usual_rounding:
        return False
    return side.rounding[made[0]] > side.history[given[0]] > 0


def _layout_text(side: Side, op: int) -> str:
    shape = ", ".join(map(str, side.data.metas[int(side.data.values.meta[side.outputs(op)[0]])].shape))
    return f"{side.op_name(op)}→[{shape}]"


def _constant_text(found: Constant, op: str = "") -> str:
    name = _OPERANDS.get(op, found.name) if found.name in ("other", "argument 1", "exponent") else found.name
    return f"{name} {_number_text(found.a)} against {_number_text(found.b)}"


#: What the second operand of an op is called.
_OPERANDS: Final = {"mul": "factor", "div": "divisor", "add": "term", "sub": "term", "pow": "exponent"}


def _number_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else constant_text(value)
