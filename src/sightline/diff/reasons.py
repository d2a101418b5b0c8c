"""Why the same inputs gave different values: the likeliest reason, with the op of each side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from sightline.diff.constant_reasons import ConstantReasons, constant_difference_text, number_text
from sightline.diff.constants import differing_constants, significant_floats
from sightline.diff.input_reasons import InputReasons
from sightline.diff.op_names import ORDERED, RANDOM
from sightline.diff.op_pairs import Alignment
from sightline.diff.region_ops import SIDES, Reason, RegionOps
from sightline.diff.regions import Region
from sightline.diff.side import Side
from sightline.notation import dtype_name

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
        a, b = self._alignment.a, self._alignment.b
        draws = [next((op for op in ops if side.op_name(op) in RANDOM), -1)
                 for side, ops in ((a, region.ops_a), (b, region.ops_b))]  # fmt: skip
        if max(draws) < 0:
            return None
        first, second = self._ops.region_labels(region, *draws)
        if min(draws) >= 0:
            return Reason("random", "both sides draw random numbers", first, second)
        which = "a" if draws[0] >= 0 else "b"
        text = f"draws random numbers, only on the {SIDES[which]} side"
        return Reason("random", text, first, second, which)

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
