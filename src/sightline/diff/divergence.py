"""The first true divergence: the first value that differs although all that it was made of agrees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sightline.diff.alignment import Alignment
from sightline.diff.op_names import DECIDING
from sightline.diff.reasons import Reason, Reasons, Region, Regions, is_coarser
from sightline.diff.values import State, Verdict

#: An error this many times that of the inputs has not only grown: something was done differently.
_GROWTH: Final = 3.0
#: The same where nothing explains it: some ops let the error of their inputs grow.
_GROWTH_ALONE: Final = 12.0
_WEAK: Final = ("unexplained", "layout", "wiring")  #: reasons that an error has to be large for
_COARSE: Final = (
    2.0**-12
)  #: with roundings coarser than this, near values do not tell a constant from another
_BEYOND: Final = 3  #: values that agree only by statistics, on the way to a reason
_MOST: Final = 64  #: candidates that are looked into
_ISOLATED: Final = 4  #: casts to a coarser precision; where there are more it is how the run is meant


@dataclass(frozen=True)
class Divergence:
    """Where two runs part: a pair of values that differs although its inputs agree, and why."""

    value_a: int
    value_b: int
    verdict: Verdict
    reason: Reason
    region: Region
    inputs_error: float  #: how far apart the inputs are, at most

    @property
    def text(self) -> str:
        """One sentence: what, where on both sides, and how well the inputs agree."""
        reason = self.reason
        one, other = (None, reason.b) if reason.side == "b" else (reason.a, reason.b)
        if reason.side == "a":
            other = None
        place = one or other
        if place is None:
            return f"{reason.text}; {self.inputs_text}"
        name = (
            place.name
            if one is None or other is None or one.name == other.name
            else f"{one.name} | {other.name}"
        )
        against = ""
        if one is not None and other is not None and one.where != other.where:
            against = other.where if " against " in reason.text else f"; second side{other.where}"
        return f"{name}{place.where}: {reason.text}{against}; {self.inputs_text}"

    @property
    def inputs_text(self) -> str:
        """How well the inputs agree."""
        if self.reason.kind == "input":
            return "it came from outside"
        if self.verdict.state is State.UNKNOWN:
            return "values were not compared"
        if not self.region.edge_a and not self.region.edge_b:
            return "nothing before it differs"
        return "inputs are the same" if not self.inputs_error else f"inputs agree to {self.inputs_error:.0e}"

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "reason": self.reason.to_dict(), "error": number(self.verdict.error),
                "inputs_error": number(self.inputs_error), "value_a": self.value_a, "value_b": self.value_b,
                "ops_a": self.region.ops_a, "ops_b": self.region.ops_b}  # fmt: skip


def number(value: float) -> float | str:
    """A number for JSON, which has neither NaN nor infinity."""
    return value if math.isfinite(value) else str(value)


def _size(norm: float, count: int) -> float:
    """The root of the mean square."""
    return norm / math.sqrt(max(1, count)) if math.isfinite(norm) else 0.0


class Divergences:
    """Looks for divergences in the order of the run."""

    def __init__(self, alignment: Alignment) -> None:
        self._made = alignment
        self._regions, self.reasons = Regions(alignment), Reasons(alignment)

    def find(self) -> tuple[list[Divergence], int]:
        """The divergences, the first one first, and how many more places may be some."""
        found: list[Divergence] = []
        looked = 0
        candidates = self._candidates()
        for at, (_, one, other, strong) in enumerate(candidates):
            if looked >= _MOST:
                return found, len(candidates) - at
            if self._inputs_differ(one):
                continue
            region = self._regions.behind(one, other)
            if region.begins_earlier:
                continue
            looked += 1
            divergence = self._judged(one, other, region, strong)
            if divergence is not None:
                found.append(divergence)
        return found, 0

    def _inputs_differ(self, one: int) -> bool:
        """Whether what goes right into a value differs already: the usual case after a divergence."""
        made = self._made
        maker = made.a.producer[one]
        for value in made.a.inputs(maker) if maker >= 0 else ():
            source = made.a.origin[value]
            partner = made.values_a[source]
            if partner >= 0 and made.a.producer[source] >= 0:
                if made.compare(source, partner).state is State.DIFFERENT:
                    return True
        return False

    def _judged(self, one: int, other: int, region: Region, strong: bool) -> Divergence | None:
        verdict = self._made.compare(one, other)
        if verdict.state is State.DIFFERENT:
            reason = self.reasons.of(region)
            far = not math.isfinite(verdict.error)
            if reason.kind in _WEAK and not far and verdict.error <= _GROWTH * region.error:
                return None
            if reason.kind == "unexplained":
                region, reason = self._further(one, other, region, reason)
            if reason.kind == "unexplained" and (
                (not far and verdict.error <= _GROWTH_ALONE * region.error)
                or self._is_rounding(one, other, verdict, region)
            ):
                return None
        else:
            known = (
                self.reasons.strong(region) if strong and self._tells(one, other, verdict, region) else None
            )
            if known is None:
                return None
            reason = known
        return Divergence(one, other, verdict, reason, region, region.error)

    def _is_rounding(self, one: int, other: int, verdict: Verdict, region: Region) -> bool:
        """Whether the rounding of inputs explains what the same ops make of them.

        What is left of a sum that nearly cancels is as far off as its terms are, and a decision between two
        numbers that are nearly the same may go either way.
        """
        made = self._made
        if any(made.a.op_name(op) in DECIDING for op in region.ops_a):
            pairs = [(value, made.values_a[value]) for value in region.edge_a]
            return any(made.compare.rounding(*pair) >= _COARSE for pair in [*pairs, (one, other)])
        numbers = made.a.numbers(one)
        if numbers is None or not math.isfinite(verdict.error):
            return False
        size = _size(numbers.l2, made.a.numel[one])
        given = [(made.a.numbers(value), made.a.numel[value]) for value in region.edge_a]
        largest = max((_size(found.l2, count) for found, count in given if found is not None), default=0.0)
        return verdict.error * size <= made.compare.tolerances(one, other)[0] * largest

    def _further(self, one: int, other: int, region: Region, reason: Reason) -> tuple[Region, Reason]:
        """The nearest reason beyond inputs that agree by their statistics alone."""
        for beyond in range(1, _BEYOND + 1):
            wider = self._regions.behind(one, other, beyond)
            if wider.begins_earlier:
                break
            found = self.reasons.of(wider)
            if found.kind not in _WEAK:
                wider.error = region.error
                return wider, found
        return region, reason

    def _tells(self, one: int, other: int, verdict: Verdict, region: Region) -> bool:
        """Whether ops that differ have made values that are near, but not for rounding alone."""
        if verdict.state is State.SAME or verdict.error == 0.0:
            return False
        if verdict.state is State.UNKNOWN:  # where nothing was measured, what ops were given is all there is
            return not self._made.compare.measured
        if self._made.compare.rounding(one, other) >= _COARSE:
            return True
        return verdict.error > 8 * 2.0**-24 and verdict.error > 2 * region.error

    # -- candidates ----------------------------------------------------------------------------

    def _candidates(self) -> list[tuple[int, int, int, bool]]:
        """Pairs that differ, and pairs whose ops differ, in the order of the first run."""
        found: dict[tuple[int, int], tuple[int, int, int, bool]] = {}
        for place, one, other, strong in [*self._strong(), *self._values()]:
            known = found.get((one, other))
            if known is None or place < known[0] or strong:
                found[one, other] = (min(place, known[0]) if known else place, one, other, strong)
        return sorted(found.values())

    def _values(self) -> Iterator[tuple[int, int, int, bool]]:
        made = self._made
        for one, other in made.checked():
            if made.compare(one, other).state is State.DIFFERENT:
                if one in made.a.parameter_names:
                    yield from self._users(one)
                else:
                    yield made.place(one), one, other, False

    def _users(self, parameter: int) -> Iterator[tuple[int, int, int, bool]]:
        """What the first op makes that a parameter goes into."""
        made = self._made
        for op in made.users.get(parameter, ()):
            for value in made.a.outputs(op)[:1]:
                if made.values_a[value] >= 0 and not made.a.layout[op]:
                    yield op, value, made.values_a[value], True
                    return

    def _strong(self) -> Iterator[tuple[int, int, int, bool]]:
        """What ops make that differ in a constant, or that rounds more than on the other side."""
        made = self._made
        a, b = made.a, made.b
        for x in np.flatnonzero(a.compared & ~a.layout).tolist():
            y = made.ops_a[x]
            if y >= 0 and self.reasons._semantic(x, y):
                for one, other in zip(a.outputs(x)[:1], b.outputs(y)[:1], strict=True):
                    yield made.place(one), one, other, True
        yield from self._fused()
        for first, side, partners in ((True, a, made.ops_a), (False, b, made.ops_b)):
            casts = [op for op in np.flatnonzero(side.compared & side.layout).tolist()
                     if partners[op] < 0 and is_coarser(side, op)]  # fmt: skip
            if not 0 < len(casts) <= _ISOLATED:
                continue
            for op in casts:
                yield from self._after_cast(first, op)

    def _fused(self) -> Iterator[tuple[int, int, int, bool]]:
        """What calls return whose ops were fused or split and have other constants, or other parameters."""
        made = self._made
        lone = made.lone_constants()
        for x, y in enumerate(made.calls.of_a.tolist()):
            if y < 0:
                continue
            names = [{info.name for info in side.module(call).parameters if not info.buffer}
                     for side, call in ((made.a, x), (made.b, y))]  # fmt: skip
            one_sided = bool(names[0]) and bool(names[1]) and names[0] != names[1]
            if x in lone or one_sided:
                returned = list(zip(*made.exchanged(x, y, "outputs"), strict=False))[:1]
                for one, other in [*made.by_numbers.get(x, []), *returned]:
                    yield made.place(one), one, other, True

    def _after_cast(self, first: bool, op: int) -> Iterator[tuple[int, int, int, bool]]:
        """The first values that are computed of what was cast."""
        made = self._made
        side, partners = (made.a, made.values_a) if first else (made.b, made.values_b)
        shown = set(side.outputs(op))
        for later in range(op + 1, min(len(side.data.ops), op + 64)):
            if not side.compared[later] or not shown & set(side.inputs(later)):
                continue
            if side.layout[later]:
                shown |= set(side.outputs(later))
                continue
            value = side.outputs(later)[0]
            if partners[value] >= 0:
                one, other = (value, partners[value]) if first else (partners[value], value)
                yield made.place(one), one, other, True
                return
