"""Random numbers as the reason of a divergence: only where the two sides have drawn other ones."""

from __future__ import annotations

from collections.abc import Callable

from sightline.compare.op_names import FACTORIES, RANDOM, UNINITIALIZED_RESULTS
from sightline.compare.op_pairs import Alignment
from sightline.compare.regions import SIDES, Reason, Region, RegionOps
from sightline.compare.sequences import surplus
from sightline.compare.side import Side


class RandomReasons:
    """Finds draws of random numbers that differ."""

    def __init__(self, alignment: Alignment, ops: RegionOps) -> None:
        self._alignment, self._ops = alignment, ops

    def find(self, region: Region, other_op: Callable[[Region], Reason | None]) -> Reason | None:
        """Draws of random numbers that the other side lacks, by their fingerprints.

        Where these are not known, ``other_op`` may have a better reason.
        """
        a, b = self._alignment.a, self._alignment.b
        draws_a = _draws(a, region.ops_a, self._alignment.values_a, self._agrees)
        draws_b = _draws(b, region.ops_b, self._alignment.values_b, lambda x, y: self._agrees(y, x))
        if not draws_a and not draws_b:
            return None
        measured = all([*draws_a.values(), *draws_b.values()])
        if not measured and draws_a and draws_b:
            if other_op(region) is not None:  # which may be all there is
                return None
            labels = self._ops.region_labels(region, next(iter(draws_a)), next(iter(draws_b)))
            return Reason("random", "both sides draw random numbers, which could not be compared", *labels)
        lone = [[*draws_a], [*draws_b]]
        if measured:
            lone = [surplus(draws_a.items(), draws_b.values()), surplus(draws_b.items(), draws_a.values())]
        if not lone[0] and not lone[1]:
            return None
        first, second = self._ops.region_labels(region, *(ops[0] if ops else -1 for ops in lone))
        if lone[0] and lone[1]:
            return Reason("random", "the two sides draw other random numbers", first, second)
        which = "a" if lone[0] else "b"
        text = f"draws random numbers, only on the {SIDES[which]} side"
        return Reason("random", text, first, second, which)

    def _agrees(self, one: int, other: int) -> bool:
        return self._alignment.compare(one, other).agrees


def _draws(
    side: Side, ops: list[int], partners: list[int], agree: Callable[[int, int], bool]
) -> dict[int, int]:
    """The ops that draw random numbers, each with the fingerprint of its result.

    It is 0 where none was taken, as of integers, and where the draw depends on an input that differs.
    """
    draws = {}
    for op in ops:
        if side.op_name(op) not in RANDOM:
            continue
        inputs = [] if side.op_name(op).endswith("_like") else side.inputs(op)
        comparable = all(
            (partners[value] >= 0 and agree(value, partners[value]))
            or (
                (producer := side.producer[value]) >= 0
                and side.op_name(producer) in FACTORIES | UNINITIALIZED_RESULTS
            )
            for value in inputs
        )
        draws[op] = side.fingerprints[side.outputs(op)[0]] if comparable else 0
    return draws
