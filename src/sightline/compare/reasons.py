"""Why the same inputs gave different values: the likeliest reason, with the op of each side.

`ConstantReasons` looks at the constants of ops: another number, or the same factor at another place;
`InputReasons` at the inputs of a region: inputs of the run, parameters and buffers; `Reasons` at the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from sightline.compare.constants import (
    Constant,
    constants,
    differing_constants,
    lone_floats,
    same_constant,
    significant_floats,
)
from sightline.compare.op_names import FACTORIES, ORDERED
from sightline.compare.op_pairs import Alignment, PairedSide
from sightline.compare.random_reasons import RandomReasons
from sightline.compare.regions import Reason, Region, RegionOps
from sightline.compare.side import Side
from sightline.compare.values import State
from sightline.hints import Hint
from sightline.notation import constant_text, dtype_name

#: Layout ops that change neither the order nor the shape.
_SILENT: Final = frozenset("contiguous clone detach alias to lift_fresh".split())
#: Layout ops whose constants select elements.
_CUTS: Final = frozenset("slice select narrow split unbind permute transpose expand".split())


class Reasons:
    """Finds reasons in the regions of an alignment; ``constants`` and ``inputs`` find those of their kind."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._ops = RegionOps(alignment)
        self.constants = ConstantReasons(alignment, self._ops)
        self.inputs = InputReasons(alignment, self._ops)
        self._random = RandomReasons(alignment, self._ops, self._op)

    def find(self, region: Region) -> Reason:
        """The first reason that applies, from the most to the least specific."""
        checks = (
            self.inputs.differing_input, self._compiled, self._module, self.inputs.differing_parameter,
            self.constants.differing, self._random.find, self._op, self._precision, self.order, self._layout,
            self._wiring,
        )  # fmt: skip
        return next(filter(None, (check(region) for check in checks)), None) or self._unexplained(region)

    def strong(self, region: Region) -> Reason | None:
        """A reason that counts even where values are close."""
        checks: tuple[Callable[[Region], Reason | None], ...] = (
            self._one_sided_use, self.inputs.differing_parameter, self.constants.differing, self._activation,
            self._precision, self.order,
        )  # fmt: skip
        if max(self._compiled_regions(region)) >= 0:  # an op without a partner may be inside compiled code
            checks = self.inputs.differing_parameter, self.constants.differing, self.order
        return next(filter(None, (check(region) for check in checks)), None)

    def unseen(self, region: Region) -> Reason | None:
        """A difference that statistics do not show, where nothing else explains the values."""
        return self.inputs.unmeasured(region) or self.inputs.element_order(region)

    # -- the kinds of reasons --------------------------------------------------------------------

    def _compiled(self, region: Region) -> Reason | None:
        """A compiled region against the ops it was compiled from, or against another."""
        sides, regions = self._alignment.sides, self._compiled_regions(region)
        if max(regions) < 0:
            return None
        labels = self._ops.region_labels(region, *regions)
        hint = f"{Hint.recording('compiled', 'eager')} shows the ops inside"
        if min(regions) >= 0:
            return Reason("compiled", f"another result; {hint}", *labels)
        at = 0 if regions[0] >= 0 else 1
        ops, eager = region.sides[1 - at].ops, sides[1 - at]
        count = f"{len(ops)} ops" if len(ops) > 1 else "op"
        text = f"another result than the {count} of the {eager.ordinal} side; {hint}"
        return Reason("compiled", text, *labels, sides[at].letter)

    def _compiled_regions(self, region: Region) -> list[int]:
        """The first compiled region of each side; -1 where there is none."""
        return [next((op for op in part.ops if paired.side.opaque[op]), -1)
                for paired, part in zip(self._alignment.sides, region.sides, strict=True)]  # fmt: skip

    def _module(self, region: Region) -> Reason | None:
        """A module that only one side called."""
        lone = [(paired, *call) for paired, part in zip(self._alignment.sides, region.sides, strict=True)
                if (call := self._lone_call(paired, part.ops)) is not None]  # fmt: skip
        if len(lone) != 1:
            return None
        paired, outermost, op = lone[0]
        side = paired.side
        name, kind = side.label(outermost), side.module(outermost).type
        own = replace(side.op_label(op), name=name, module=name)
        one, other = self._ops.region_labels(region, *paired.pair(op))
        one, other = (own, other) if paired.letter == "a" else (one, own)
        return Reason(
            "module", f"{name} ({kind}) ran only on the {paired.ordinal} side", one, other, paired.letter
        )

    def _lone_call(self, paired: PairedSide, ops: list[int]) -> tuple[int, int] | None:
        """The outermost call without a partner around one of the ops, and the op."""
        side, partners = paired.side, paired.calls
        parents = side.data.calls.parent
        for op in ops:
            call = int(side.data.ops.call[op])
            if side.layout[op] or paired.ops[op] >= 0 or call < 0 or partners[call] >= 0:
                continue
            while parents[call] >= 0 and partners[parents[call]] < 0:
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
        first, second = self._alignment.a.activations(left), self._alignment.b.activations(right)
        return self._op(region) if first and second and first != second else None

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
                return Reason("wiring", text, *self._ops.region_labels(region, x, y))
        return None

    def reordered_inputs(self, x: int, y: int) -> bool:
        """Whether two ops have the same inputs in an order that matters and differs."""
        alignment = self._alignment
        if alignment.a.op_name(x) not in ORDERED:
            return False
        partners = [alignment.values_a[value] for value in alignment.a.inputs(x)]
        inputs = alignment.b.inputs(y)
        return partners != inputs and -1 not in partners and set(partners) == set(inputs)

    def _op(self, region: Region) -> Reason | None:
        """Ops that only one side has, or different ops on the two sides."""
        lone, texts = self._ops.one_sided(region), []
        for paired, ops in zip(self._alignment.sides, lone, strict=True):
            names: dict[str, None] = {}
            for op in ops:
                name = paired.side.op_label(op).name
                numbers = significant_floats(paired.side.index.ops[op])
                names.setdefault(f"{name} {number_text(numbers[0])}" if numbers else name)
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            texts.append(", ".join(list(names)[:4]) + more)
        labels = self._ops.region_labels(region, *(ops[0] if ops else -1 for ops in lone))
        if all(lone):
            return Reason("op", f"{texts[0]} against {texts[1]}", *labels)
        for paired, text in zip(self._alignment.sides, texts, strict=True):
            if text:
                return Reason("op", f"{text} only on the {paired.ordinal} side", *labels, paired.letter)
        return None

    def _precision(self, region: Region) -> Reason | None:
        """A cast to a coarser precision that only one side has."""
        for paired, part in zip(self._alignment.sides, region.sides, strict=True):
            for op in part.ops:
                if paired.ops[op] < 0 and is_coarser(paired.side, op):
                    dtype = paired.side.index.ops[op].outputs[0].dtype
                    text = f"rounds to {dtype_name(dtype)}, only on the {paired.ordinal} side"
                    return Reason("precision", text, *self._ops.region_labels(region, *paired.pair(op)))
        return None

    def _layout(self, region: Region) -> Reason | None:
        """The same ops on elements in another order or shape."""
        a, b = self._alignment.a, self._alignment.b
        texts, firsts = [], []
        for paired, part in zip(self._alignment.sides, region.sides, strict=True):
            side = paired.side
            lone = [op for op in part.ops if side.layout[op] and paired.ops[op] < 0]
            lone = [op for op in lone if side.op_name(op) not in _SILENT]
            shapes = [", ".join(map(str, side.shape(side.outputs(op)[0]))) for op in lone[:4]]
            texts.append(
                " ".join(f"{side.op_name(op)}→[{shape}]" for op, shape in zip(lone, shapes, strict=False))
            )
            firsts.append(lone[0] if lone else -1)
        for x in region.a.ops:
            y = self._alignment.ops_a[x]
            if not a.layout[x] or y < 0 or a.op_name(x) not in _CUTS:
                continue
            differing = differing_constants(a.index.ops[x], b.index.ops[y])
            if differing:
                text = f"{a.op_label(x).name}: " + ", ".join(map(constant_difference_text, differing[:3]))
                return Reason("layout", text, *self._ops.region_labels(region, x, y))
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
                    return Reason("wiring", text, *self._ops.region_labels(region, x, y))
        edges = {alignment.values_a[value] for value in region.a.edge}, set(region.b.edge)
        if edges[0] == edges[1] or not edges[0] or not edges[1]:
            return None
        lone = min(edges[0] - edges[1], default=-1), min(edges[1] - edges[0], default=-1)
        one = alignment.values_b[lone[0]] if lone[0] >= 0 else -1
        text = _sources_text(alignment.a, one, alignment.b, lone[1])
        ops = [part.ops[-1] if part.ops else -1 for part in region.sides]
        return Reason("wiring", text, *self._ops.region_labels(region, *ops))

    def _unexplained(self, region: Region) -> Reason:
        a, b = self._alignment.a, self._alignment.b
        last = [part.ops[-1] if part.ops else -1 for part in region.sides]
        text = (
            "the same ops on the same inputs"
            if max(last) >= 0
            else "another result; its ops are not compared"
        )
        if min(last) >= 0:
            one, other = (side.index.ops[op].outputs[0] for side, op in zip((a, b), last, strict=True))
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


def _source_text(side: Side, value: int) -> str:
    producer = side.producer[value]
    return str(side.op_label(producer)) if producer >= 0 else side.index.values[value].name or "an input"


def _sources_text(a: Side, one: int, b: Side, other: int) -> str:
    """``takes mul at net.py:3 against add at net.py:4``; for ops of one line, their places among these."""
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


_SCALING: Final = frozenset(("mul", "div"))
#: The name of the second operand of an op.
_OPERANDS: Final = {"mul": "factor", "div": "divisor", "add": "term", "sub": "term", "pow": "exponent"}


class ConstantReasons:
    """Finds constants that differ and decide a result."""

    def __init__(self, alignment: Alignment, ops: RegionOps) -> None:
        self._alignment, self._ops = alignment, ops

    def differing(self, region: Region) -> Reason | None:
        """The constants in which corresponding ops of a region differ.

        Where ops were fused or split: the one number on each side that the other lacks.
        """
        a, b = self._alignment.a, self._alignment.b
        factors = _factor(a, region.a.ops), _factor(b, region.b.ops)
        # Both sides scale by the same factor in all, at different places.
        moved = factors[0] != 1.0 and same_constant(*factors)
        for x, y in self._ops.pairs(region):
            differing = self.of_pair(x, y)
            if differing and not (moved and a.op_name(x) in _SCALING):
                text = ", ".join(constant_difference_text(each, a.op_name(x)) for each in differing[:3])
                return Reason("constant", text, *self._ops.region_labels(region, x, y))
        if moved:
            return None
        ops_a, ops_b = self._ops.one_sided(region)
        left, right = lone_floats([a.index.ops[op] for op in ops_a], [b.index.ops[op] for op in ops_b])
        if not ops_a or not ops_b or len(left) != 1 or len(right) != 1:
            return None
        (one, x), (other, y) = left[0], right[0]
        text = f"{number_text(one)} against {number_text(other)}"
        return Reason("constant", text, *self._ops.region_labels(region, x, y))

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


def _factor(side: Side, ops: Iterable[int]) -> float:
    """The product of the numbers that ops multiply by."""
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
        for value in region.a.leaves:
            other = alignment.values_a[value]
            if other < 0 or alignment.a.kind(value) in ("parameter", "buffer"):
                continue
            if alignment.compare(value, other).state is State.DIFFERENT:
                name = alignment.a.index.values[value].name or "an input"
                return self._ops.value_reason(region, "input", f"{name} itself differs", (value, other))
        return None

    def differing_parameter(self, region: Region) -> Reason | None:
        """A parameter that differs, or that only one side of the region has."""
        alignment = self._alignment
        for value in region.a.leaves:
            other, name = alignment.values_a[value], alignment.a.parameter_names.get(value)
            if other >= 0 and name and alignment.compare(value, other).state is State.DIFFERENT:
                other_name = alignment.b.parameter_names.get(other, name)
                both = name if name == other_name else f"{name} | {other_name}"
                return self._ops.value_reason(region, "parameter", f"{both} differs", (value, other))
        lone = [
            next((v for v in part.leaves if v in paired.side.parameter_names and paired.values[v] < 0), -1)
            for paired, part in zip(alignment.sides, region.sides, strict=True)
        ]
        if (lone[0] < 0) == (lone[1] < 0):
            return None
        return self._one_sided_reason(region, alignment.sides[0 if lone[0] >= 0 else 1], max(lone))

    def _one_sided_reason(self, region: Region, paired: PairedSide, value: int) -> Reason:
        text = f"{paired.side.parameter_names[value]} is used only on the {paired.ordinal} side"
        return self._ops.value_reason(region, "parameter", text, paired.pair(value), paired.letter)

    @cached_property
    def one_sided_uses(self) -> dict[str, tuple[PairedSide, int]]:
        """Each parameter that both sides have and only one uses: that side, and the first op that uses it."""
        (first, second), calls = self._alignment.sides, self._alignment.calls
        a, b = first.side, second.side
        named = {calls.name(path): path for path in b.parameters}
        result: dict[str, tuple[PairedSide, int]] = {}
        for path, (info, value) in a.parameters.items():
            partner = named.get(calls.name(path))
            if info.buffer or partner is None:
                continue
            uses = a.leaf_consumers.get(value, []), b.leaf_consumers.get(b.parameters[partner][1], [])
            if uses[0] and not uses[1]:
                result[path] = first, uses[0][0]
            elif uses[1] and not uses[0]:
                result[partner] = second, uses[1][0]
        return result

    def one_sided_use(self, region: Region) -> Reason | None:
        """A parameter that both sides have and only one uses."""
        for paired, part in zip(self._alignment.sides, region.sides, strict=True):
            for value in part.leaves:
                use = self.one_sided_uses.get(paired.side.parameter_names.get(value, ""))
                if use is not None and use[0] is paired:
                    return self._one_sided_reason(region, paired, value)
        return None

    def element_order(self, region: Region) -> Reason | None:
        """A parameter that has the same statistics and other bits: its elements are in another order."""
        alignment = self._alignment
        for value in region.a.leaves:
            other, name = alignment.values_a[value], alignment.a.parameter_names.get(value)
            if other < 0 or not name or alignment.compare(value, other).state is not State.CLOSE:
                continue
            first, second = (side.parameters[side.parameter_names[each]][0].shape
                             for side, each in ((alignment.a, value), (alignment.b, other)))  # fmt: skip
            if len(first) > 1 and first == second:
                text = f"{name} has the statistics of the other, and its elements may be in another order"
                return self._ops.value_reason(region, "parameter", text, (value, other))
        return None

    def unmeasured(self, region: Region) -> Reason | None:
        """An input of integers: they are not measured, and all else agrees."""
        a, b = self._alignment.a, self._alignment.b
        for value in region.a.leaves:
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
            return self._ops.value_reason(region, "input", text, (value, other))
        return None
