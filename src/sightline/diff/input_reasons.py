"""Reasons in what goes into a region: inputs of the run, parameters and buffers."""

from __future__ import annotations

from functools import cached_property

from sightline.diff.op_pairs import Alignment
from sightline.diff.region_ops import SIDES, Reason, RegionOps
from sightline.diff.regions import Region
from sightline.diff.side import Side
from sightline.diff.values import State
from sightline.notation import dtype_name


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
        for value in leaves:
            if value in side.parameter_names and partners[value] < 0:
                return value
        return -1

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
