"""Reasons in the constants of ops: another number, or the same factor at another place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sightline.diff.constants import (
    Constant,
    constants,
    differing_constants,
    same_constant,
    significant_floats,
)
from sightline.diff.op_names import FACTORIES
from sightline.diff.op_pairs import Alignment
from sightline.diff.region_ops import Reason, RegionOps
from sightline.diff.regions import Region
from sightline.diff.side import Side
from sightline.notation import constant_text

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
