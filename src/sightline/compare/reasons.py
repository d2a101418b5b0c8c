"""Why the same inputs gave different values: the likeliest reason, with the op of each side.

`ConstantReasons` looks at the constants of ops: another number, or the same factor at another place;
`InputReasons` at what goes into a region: inputs of the run, parameters and buffers; `Reasons` at the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from sightline.analysis.cost import is_opaque
from sightline.compare.constants import (
    Constant,
    constants,
    differing_constants,
    same_constant,
    significant_floats,
)
from sightline.compare.op_names import FACTORIES, ORDERED
from sightline.compare.op_pairs import Alignment
from sightline.compare.random_reasons import RandomReasons
from sightline.compare.regions import SIDES, Reason, Region, RegionOps
from sightline.compare.side import Side
from sightline.compare.values import State
from sightline.notation import constant_text, dtype_name

#: Layout ops that change neither the order nor the shape.
_SILENT: Final = frozenset("contiguous clone detach alias to lift_fresh".split())
#: Layout ops whose constants select elements.
_CUTS: Final = frozenset("slice select narrow split unbind permute transpose expand".split())


class Reasons:
    """Finds reasons in the regions of one alignment: ``constants`` and ``inputs`` those of their kind."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._ops = RegionOps(alignment)
        self.constants = ConstantReasons(alignment, self._ops)
        self.inputs = InputReasons(alignment, self._ops)
        self._random_reasons = RandomReasons(alignment, self._ops)

    def find(self, region: Region) -> Reason:
        """The first reason that applies, from the most to the least specific."""
        return next(self._all(region))

    def strong(self, region: Region) -> Reason | None:
        """A reason that counts even where values are close."""
        for check in (self._one_sided_use, self.inputs.differing_parameter, self.constants.differing,
                      self._activation, self._precision, self.order):  # fmt: skip
            reason = check(region)
            if reason is not None:
                return reason
        return None

    def unseen(self, region: Region) -> Reason | None:
        """What statistics do not show, where nothing else explains a difference."""
        return self.inputs.unmeasured(region) or self.inputs.element_order(region)

    def _all(self, region: Region) -> Iterator[Reason]:
        for check in (self.inputs.differing_input, self._compiled, self._module,
                      self.inputs.differing_parameter, self.constants.differing, self._random, self._op,
                      self._precision, self.order, self._layout, self._wiring):  # fmt: skip
            reason = check(region)
            if reason is not None:
                yield reason
        yield self._unexplained(region)

    # -- the kinds of reasons --------------------------------------------------------------------

    def _compiled(self, region: Region) -> Reason | None:
        """A compiled region against the ops it was compiled from, or against another."""
        a, b = self._alignment.a, self._alignment.b
        regions = [next((op for op in ops if side.opaque[op]), -1)
                   for side, ops in ((a, region.ops_a), (b, region.ops_b))]  # fmt: skip
        if max(regions) < 0:
            return None
        labels = self._ops.region_labels(region, *regions)
        hint = 'compiled="eager" shows the ops inside'
        if min(regions) >= 0:
            return Reason("compiled", f"another result; {hint}", *labels)
        which, ops = ("a", region.ops_b) if regions[0] >= 0 else ("b", region.ops_a)
        count = f"{len(ops)} ops" if len(ops) > 1 else "op"
        text = f"another result than the {count} of the {SIDES['b' if which == 'a' else 'a']} side; {hint}"
        return Reason("compiled", text, *labels, which)

    def _module(self, region: Region) -> Reason | None:
        """A module that only one side called."""
        a, b, calls = self._alignment.a, self._alignment.b, self._alignment.calls
        lone_a = self._lone_call(region.ops_a, a, calls.of_a, self._alignment.ops_a)
        lone_b = self._lone_call(region.ops_b, b, calls.of_b, self._alignment.ops_b)
        if (lone_a is None) == (lone_b is None):
            return None
        first = lone_a is not None
        side, lone_call = (a, lone_a) if first else (b, lone_b)
        assert lone_call is not None
        call, op = lone_call
        kind = side.module(call).type
        text = f"{side.label(call)} ({kind}) ran only on the {'first' if first else 'second'} side"
        one, other = self._ops.region_labels(region, op if first else -1, -1 if first else op)
        if first and one is not None:
            one = replace(one, name=side.label(call), module=side.label(call))
        elif other is not None:
            other = replace(other, name=side.label(call), module=side.label(call))
        return Reason("module", text, one, other, "a" if first else "b")

    def _lone_call(
        self, ops: list[int], side: Side, paired: Any, partners: list[int]
    ) -> tuple[int, int] | None:
        """The outermost call without a partner around one of the ops, and the op."""
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

    def _one_sided_use(self, region: Region) -> Reason | None:
        """A parameter that both sides have and only one uses, or the module around that."""
        reason = self.inputs.one_sided_use(region)
        return reason and (self._module(region) or reason)

    def _activation(self, region: Region) -> Reason | None:
        """Ops without a counterpart that compute another function."""
        left, right = self._ops.one_sided(region)
        hearts = self._alignment.a.activations(left), self._alignment.b.activations(right)
        return self._op(region) if all(hearts) and hearts[0] != hearts[1] else None

    def order(self, region: Region) -> Reason | None:
        """The same inputs in another order."""
        for x, y in self._ops.pairs(region):
            if self.reordered_inputs(x, y):
                a, b = self._alignment.a, self._alignment.b
                texts = [", ".join(_source_text(side, value) for value in side.inputs(op)[:3])
                         for side, op in ((a, x), (b, y))]  # fmt: skip
                text = f"takes {texts[0]} against {texts[1]}"
                inputs = zip(a.inputs(x), b.inputs(y), strict=False)
                for one, other in inputs if texts[0] == texts[1] else ():
                    if self._alignment.values_a[one] != other:
                        text = _sources_text(a, one, b, other)
                        break
                return Reason("wiring", text, *self._ops.labels(x, y))
        return None

    def reordered_inputs(self, x: int, y: int) -> bool:
        """Whether two ops have the same inputs in an order that matters and differs."""
        alignment = self._alignment
        if alignment.a.op_name(x) not in ORDERED:
            return False
        partners = [alignment.values_a[value] for value in alignment.a.inputs(x)]
        inputs = alignment.b.inputs(y)
        return partners != inputs and -1 not in partners and set(partners) == set(inputs)

    def _random(self, region: Region) -> Reason | None:
        return self._random_reasons.find(region, self._op)

    def _op(self, region: Region) -> Reason | None:
        """Ops that only one side has, or different ops on the two sides."""
        left, right = self._ops.one_sided(region)
        if not left and not right:
            return None
        texts = [_ops_text(self._alignment.a, left), _ops_text(self._alignment.b, right)]
        labels = self._ops.region_labels(region, left[0] if left else -1, right[0] if right else -1)
        if left and right:
            return Reason("op", f"{texts[0]} against {texts[1]}", *labels)
        which = "a" if left else "b"
        text = f"{texts[0 if left else 1]} only on the {SIDES[which]} side"
        return Reason("op", text, *labels, which)

    def _precision(self, region: Region) -> Reason | None:
        """A cast to a coarser precision that only one side has."""
        for first, side, ops, partners in (
            (True, self._alignment.a, region.ops_a, self._alignment.ops_a),
            (False, self._alignment.b, region.ops_b, self._alignment.ops_b),
        ):
            for op in ops:
                if partners[op] < 0 and is_coarser(side, op):
                    dtype = side.index.ops[op].outputs[0].dtype
                    text = f"rounds to {dtype_name(dtype)}, only on the {SIDES['a' if first else 'b']} side"
                    labels = self._ops.region_labels(region, op if first else -1, -1 if first else op)
                    return Reason("precision", text, *labels)
        return None

    def _layout(self, region: Region) -> Reason | None:
        """The same ops on elements in another order or shape."""
        a, b = self._alignment.a, self._alignment.b
        texts, firsts = [], []
        for side, ops, partners in (
            (a, region.ops_a, self._alignment.ops_a),
            (b, region.ops_b, self._alignment.ops_b),
        ):
            lone = [
                op for op in ops if side.layout[op] and partners[op] < 0 and side.op_name(op) not in _SILENT
            ]
            texts.append(" ".join(_layout_text(side, op) for op in lone[:4]))
            firsts.append(lone[0] if lone else -1)
        paired = [
            (x, self._alignment.ops_a[x])
            for x in region.ops_a
            if a.layout[x] and self._alignment.ops_a[x] >= 0
        ]
        for x, y in paired:
            differing = differing_constants(a.index.ops[x], b.index.ops[y]) if a.op_name(x) in _CUTS else []
            if differing:
                text = f"{a.op_label(x).name}: " + ", ".join(map(constant_difference_text, differing[:3]))
                return Reason("layout", text, *self._ops.labels(x, y))
        if texts[0] == texts[1]:
            return None
        text = f"{texts[0] or 'nothing'} against {texts[1] or 'nothing'}"
        return Reason("layout", text, *self._ops.region_labels(region, *firsts))

    def _wiring(self, region: Region) -> Reason | None:
        """Other inputs: other parts of the same value, or other values."""
        alignment = self._alignment
        for x, y in self._ops.pairs(region):
            for one, other in zip(alignment.a.inputs(x), alignment.b.inputs(y), strict=False):
                partner_b, partner_a = alignment.values_a[one], alignment.values_b[other]
                crossed = (
                    partner_b >= 0 and partner_a >= 0 and partner_b not in (other, *alignment.b.inputs(y))
                )
                if crossed and alignment.a.origin[one] == alignment.a.origin[partner_a]:
                    text = _sources_text(alignment.a, one, alignment.b, other)
                    return Reason("wiring", text, *self._ops.labels(x, y))
        edge_a = {alignment.values_a[value] for value in region.edge_a}
        edge_b = set(region.edge_b)
        if edge_a == edge_b or not edge_a or not edge_b:
            return None
        lone = sorted(edge_a - edge_b), sorted(edge_b - edge_a)
        one = alignment.values_b[lone[0][0]] if lone[0] else -1
        text = _sources_text(alignment.a, one, alignment.b, lone[1][0] if lone[1] else -1)
        ops = region.ops_a[-1] if region.ops_a else -1, region.ops_b[-1] if region.ops_b else -1
        return Reason("wiring", text, *self._ops.region_labels(region, *ops))

    def _unexplained(self, region: Region) -> Reason:
        a, b = self._alignment.a, self._alignment.b
        last = region.ops_a[-1] if region.ops_a else -1, region.ops_b[-1] if region.ops_b else -1
        text = "the same ops on the same inputs"
        if max(last) < 0 and any(is_opaque(side.data).any() for side in (a, b)):
            text = "the same inputs; what ran inside compiled code was not compared"
        if min(last) >= 0:
            one, other = (side.index.ops[op].outputs[0] for side, op in ((a, last[0]), (b, last[1])))
            if one.device != other.device:
                text += f", on {one.device} and on {other.device}"
        return Reason("unexplained", text, *self._ops.region_labels(region, *last))


def is_coarser(side: Side, op: int) -> bool:
    """Whether an op casts to a precision coarser than any behind its input."""
    if side.op_name(op) != "to":
        return False
    inputs, outputs = side.inputs(op), side.outputs(op)
    if not inputs or not outputs or side.rounding[outputs[0]] <= side.usual_rounding:
        return False
    return side.rounding[outputs[0]] > side.history[inputs[0]] > 0


def _ops_text(side: Side, ops: list[int]) -> str:
    names: dict[str, None] = {}
    for op in ops:
        name, numbers = side.op_label(op).name, significant_floats(side.index.ops[op])
        names.setdefault(f"{name} {number_text(numbers[0])}" if numbers else name)
    return ", ".join(list(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _source_text(side: Side, value: int) -> str:
    producer = side.producer[value]
    return str(side.op_label(producer)) if producer >= 0 else side.index.values[value].name or "an input"


def _sources_text(a: Side, one: int, b: Side, other: int) -> str:
    """``takes mul at net.py:3 against add at net.py:4``; of one line, which of its ops it is."""
    texts = [
        _source_text(side, value) if value >= 0 else "nothing else" for side, value in ((a, one), (b, other))
    ]
    if texts[0] == texts[1] and one >= 0 and a.producer[one] >= 0:
        ranks = _rank_on_line(a, a.producer[one]), _rank_on_line(b, b.producer[other])
        return f"takes {texts[0]}, result {ranks[0]} of that line, against result {ranks[1]} of it"
    return f"takes {texts[0]} against {texts[1]}"


def _rank_on_line(side: Side, op: int) -> int:
    """Which of the ops of the same name on a line an op is, from 1."""
    frames = side.index.op_user_frames
    alike = np.flatnonzero(side.compared[:op] & (side.data.ops.name[:op] == side.data.ops.name[op]))
    positions = [(frame.file, frame.line) for frame in side.index.frames]
    here = positions[frames[op]] if frames[op] >= 0 else None
    return 1 + sum(bool(frames[each] >= 0 and positions[frames[each]] == here) for each in alike.tolist())


def _layout_text(side: Side, op: int) -> str:
    shape = ", ".join(map(str, side.data.metas[int(side.data.values.meta[side.outputs(op)[0]])].shape))
    return f"{side.op_name(op)}→[{shape}]"


_SCALING: Final = frozenset(("mul", "div"))
#: The name of the second operand of an op.
_OPERANDS: Final = {"mul": "factor", "div": "divisor", "add": "term", "sub": "term", "pow": "exponent"}


class ConstantReasons:
    """Finds constants that differ and decide a result."""

    def __init__(self, alignment: Alignment, ops: RegionOps) -> None:
        self._alignment, self._ops = alignment, ops

    def differing(self, region: Region) -> Reason | None:
        """The constants in which corresponding ops of a region differ."""
        moved = self._factors_moved(region)
        for x, y in self._ops.pairs(region):
            differing = self.of_pair(x, y)
            if differing and not (moved and self._alignment.a.op_name(x) in _SCALING):
                text = ", ".join(
                    constant_difference_text(each, self._alignment.a.op_name(x)) for each in differing[:3]
                )
                return Reason("constant", text, *self._ops.labels(x, y))
        return None if moved else self._lone_constants(region)

    def _factors_moved(self, region: Region) -> bool:
        """Whether both sides of a region scale by the same factor in all, at different places."""
        first, second = _factor(self._alignment.a, region.ops_a), _factor(self._alignment.b, region.ops_b)
        return first != 1.0 and same_constant(first, second)

    def same_factor(self, ops: Iterable[int]) -> bool:
        """Whether ops of the first side and their partners scale by the same factor in all."""
        pairs = [(op, self._alignment.ops_a[op]) for op in ops]
        if any(other < 0 for op, other in pairs if not self._alignment.a.layout[op]):
            return False
        first = _factor(self._alignment.a, [op for op, _ in pairs])
        second = _factor(self._alignment.b, [other for _, other in pairs if other >= 0])
        return same_constant(first, second)

    def of_pair(self, x: int, y: int) -> list[Constant]:
        """The constants of two ops that differ and decide their result."""
        a, b = self._alignment.a, self._alignment.b
        name = a.op_name(x)
        if a.layout[x] or (name in FACTORIES and not a.inputs(x) and name not in ("full", "arange")):
            return []
        return differing_constants(a.index.ops[x], b.index.ops[y])

    def _lone_constants(self, region: Region) -> Reason | None:
        """The one number on each side that the other lacks, where ops were fused or split."""
        a, b = self._alignment.a, self._alignment.b
        ops_a, ops_b = self._ops.one_sided(region)
        if not (ops_a and ops_b):
            return None
        first = [(number, op) for op in ops_a for number in significant_floats(a.index.ops[op])]
        second = [(number, op) for op in ops_b for number in significant_floats(b.index.ops[op])]
        left = [each for each in first if not any(same_constant(each[0], other[0]) for other in second)]
        right = [each for each in second if not any(same_constant(each[0], other[0]) for other in first)]
        if len(left) != 1 or len(right) != 1:
            return None
        text = f"{number_text(left[0][0])} against {number_text(right[0][0])}"
        return Reason("constant", text, *self._ops.labels(left[0][1], right[0][1]))


def _factor(side: Side, ops: Iterable[int]) -> float:
    """The number that ops multiply by in all."""
    product = 1.0
    for op in ops:
        if side.op_name(op) in _SCALING:
            numbers = [
                item for _, item in constants(side.index.ops[op]) if type(item) in (int, float) and item
            ]
            factor = float(numbers[0]) if len(numbers) == 1 else 1.0
            product *= factor if side.op_name(op) == "mul" else 1.0 / factor
    return product


def constant_difference_text(constant: Constant, op: str = "") -> str:
    """A constant of two ops: ``eps 1e-05 against 1e-06``."""
    operand = constant.name in ("other", "argument 1", "exponent")
    name = _OPERANDS.get(op, constant.name) if operand else constant.name
    return f"{name} {number_text(constant.a)} against {number_text(constant.b)}"


def number_text(value: Any) -> str:
    """A constant with at most four digits."""
    return f"{value:.4g}" if isinstance(value, float) else constant_text(value)


class InputReasons:
    """Finds inputs and parameters that differ, or that only one side uses."""

    def __init__(self, alignment: Alignment, ops: RegionOps) -> None:
        self._alignment, self._ops = alignment, ops

    def differing_input(self, region: Region) -> Reason | None:
        """An input of the run that differs."""
        alignment = self._alignment
        for value in region.leaves_a:
            other = alignment.values_a[value]
            if other < 0 or alignment.a.kind(value) in ("parameter", "buffer"):
                continue
            if alignment.compare(value, other).state is State.DIFFERENT:
                name = alignment.a.index.values[value].name or "an input"
                return self._ops.value_reason(region, "input", f"{name} itself differs", value, other)
        return None

    def differing_parameter(self, region: Region) -> Reason | None:
        """A parameter that differs, or that only one side of the region has."""
        alignment = self._alignment
        for value in region.leaves_a:
            other, name = alignment.values_a[value], alignment.a.parameter_names.get(value)
            if other >= 0 and name and alignment.compare(value, other).state is State.DIFFERENT:
                other_name = alignment.b.parameter_names.get(other, name)
                both = name if name == other_name else f"{name} | {other_name}"
                return self._ops.value_reason(region, "parameter", f"{both} differs", value, other)
        lone = [self._lone_parameter(region.leaves_a, alignment.a, alignment.values_a),
                self._lone_parameter(region.leaves_b, alignment.b, alignment.values_b)]  # fmt: skip
        if (lone[0] < 0) != (lone[1] < 0):
            first = lone[0] >= 0
            side, value = (alignment.a, lone[0]) if first else (alignment.b, lone[1])
            text = f"{side.parameter_names[value]} is used only on the {'first' if first else 'second'} side"
            return self._ops.value_reason(region, "parameter", text, lone[0], lone[1], "a" if first else "b")
        return None

    def _lone_parameter(self, leaves: list[int], side: Side, partners: list[int]) -> int:
        """A parameter of a region that the other side does not use there."""
        lone = (value for value in leaves if value in side.parameter_names and partners[value] < 0)
        return next(lone, -1)

    def one_sided_uses(self) -> list[tuple[bool, int]]:
        """First uses of parameters that the other side has and does not use: whether of a, and the op."""
        return list(self._one_sided_parameters.values())

    @cached_property
    def _one_sided_parameters(self) -> dict[str, tuple[bool, int]]:
        """Each parameter that both sides have and only one uses: whether it is the first, and the op."""
        a, b, calls = self._alignment.a, self._alignment.b, self._alignment.calls
        named = {calls.name(path): path for path in b.parameters}
        found: dict[str, tuple[bool, int]] = {}
        for path, (info, value) in a.parameters.items():
            its = named.get(calls.name(path))
            if info.buffer or its is None:
                continue
            uses = a.leaf_consumers.get(value, []), b.leaf_consumers.get(b.parameters[its][1], [])
            if bool(uses[0]) != bool(uses[1]):
                found[path if uses[0] else its] = (True, uses[0][0]) if uses[0] else (False, uses[1][0])
        return found

    def one_sided_use(self, region: Region) -> Reason | None:
        """A parameter that both sides have and only one uses."""
        alignment = self._alignment
        for first, side, leaves in (
            (True, alignment.a, region.leaves_a),
            (False, alignment.b, region.leaves_b),
        ):
            for value in leaves:
                name = side.parameter_names.get(value, "")
                if self._one_sided_parameters.get(name, (None,))[0] is not first:
                    continue
                text = f"{name} is used only on the {SIDES['a' if first else 'b']} side"
                pair = (value, -1) if first else (-1, value)
                return self._ops.value_reason(region, "parameter", text, *pair, "a" if first else "b")
        return None

    def element_order(self, region: Region) -> Reason | None:
        """A parameter that has the same statistics and other bits: its elements are in another order."""
        alignment = self._alignment
        for value in region.leaves_a:
            other, name = alignment.values_a[value], alignment.a.parameter_names.get(value)
            if other < 0 or not name or alignment.compare(value, other).state is not State.CLOSE:
                continue
            shapes = [side.parameters[side.parameter_names[each]][0].shape
                      for side, each in ((alignment.a, value), (alignment.b, other))]  # fmt: skip
            if len(shapes[0]) > 1 and shapes[0] == shapes[1]:
                text = f"{name} has the statistics of the other, and its elements may be in another order"
                return self._ops.value_reason(region, "parameter", text, value, other)
        return None

    def unmeasured(self, region: Region) -> Reason | None:
        """An input of integers: they are not measured, and all else agrees."""
        a, b = self._alignment.a, self._alignment.b
        for value in region.leaves_a:
            other = self._alignment.values_a[value]
            if (
                other < 0
                or a.rounding[value]
                or self._alignment.compare(value, other).state is not State.UNKNOWN
            ):
                continue
            dtype = dtype_name(a.index.values[value].dtype)
            name = a.index.values[value].name or b.index.values[other].name or f"its input {dtype}"
            text = f"{name} probably differs: integers are not measured, and all else agrees"
            return self._ops.value_reason(region, "input", text, value, other)
        return None
