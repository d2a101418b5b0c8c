"""Random numbers as the reason of a divergence: only where the two sides have drawn different ones."""

from __future__ import annotations

from collections.abc import Callable

from sightline.compare.op_names import FACTORIES, RANDOM, UNINITIALIZED_RESULTS
from sightline.compare.op_pairs import Alignment, PairedSide
from sightline.compare.regions import Reason, Region, RegionOps
from sightline.compare.sequences import surplus


class RandomReasons:
    """Finds draws of random numbers that differ."""

    def __init__(
        self, alignment: Alignment, ops: RegionOps, other_op: Callable[[Region], Reason | None]
    ) -> None:
        self._alignment, self._ops, self._other_op = alignment, ops, other_op

    def find(self, region: Region) -> Reason | None:
        """Draws of random numbers that the other side lacks, by their fingerprints.

        Where these are not known, ``other_op`` may have a better reason.
        """
        draws_a, draws_b = (
            self._draws(paired, part.ops)
            for paired, part in zip(self._alignment.sides, region.sides, strict=True)
        )
        if not draws_a and not draws_b:
            return None
        measured = all([*draws_a.values(), *draws_b.values()])
        if not measured and draws_a and draws_b:
            if self._other_op(region) is not None:  # which may be all there is
                return None
            labels = self._ops.region_labels(region, next(iter(draws_a)), next(iter(draws_b)))
            return Reason("random", "both sides draw random numbers, which could not be compared", *labels)
        lone = [[*draws_a], [*draws_b]]
        if measured:
            lone = [surplus(draws_a.items(), draws_b.values()), surplus(draws_b.items(), draws_a.values())]
        labels = self._ops.region_labels(region, *(ops[0] if ops else -1 for ops in lone))
        if all(lone):
            return Reason("random", "the two sides draw other random numbers", *labels)
        for paired, ops in zip(self._alignment.sides, lone, strict=True):
            if ops:
                text = f"draws random numbers, only on the {paired.ordinal} side"
                return Reason("random", text, *labels, paired.letter)
        return None

    def _draws(self, paired: PairedSide, ops: list[int]) -> dict[int, int]:
        """The ops that draw random numbers, each with the fingerprint of its result.

        It is 0 where none was taken, as of integers, and where the draw depends on an input that differs.
        """
        side, draws = paired.side, {}
        for op in ops:
            if side.op_name(op) not in RANDOM:
                continue
            comparable = True
            for value in [] if side.op_name(op).endswith("_like") else side.inputs(op):
                producer, partner = side.producer[value], paired.values[value]
                if producer < 0 or side.op_name(producer) not in FACTORIES | UNINITIALIZED_RESULTS:
                    pair = paired.pair(value, partner)
                    comparable = comparable and partner >= 0 and self._alignment.compare(*pair).agrees
            draws[op] = side.fingerprints[side.outputs(op)[0]] if comparable else 0
        return draws
