"""The first true divergence: the first value that differs although everything it was computed from agrees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.compare.op_names import DISCRETE, LINEAR, SCALING
from sightline.compare.op_pairs import Alignment, PairedSide
from sightline.compare.reasons import Reasons, is_coarser
from sightline.compare.regions import Reason, Region, Regions
from sightline.compare.values import State, Verdict
from sightline.text_encoding import printable

#: An error this many times that of the inputs is not only their error grown: something was done differently.
_GROWTH: Final = 3.0
#: The same where no reason was found, as some ops let the error of their inputs grow.
_GROWTH_ALONE: Final = 12.0
_WEAK: Final = ("unexplained", "layout", "wiring")  #: reasons that count only with a large error
_COARSE: Final = 2.0**-12  #: with coarser rounding, close values may come from different constants
_BEYOND: Final = 3  #: values that agree only by statistics, past which a reason is sought
_MAX_CANDIDATES: Final = 64
_MAX_UNTIL_TOGETHER: Final = 48  #: values within which a difference has to end to be harmless
_MAX_CASTS: Final = 4  #: to a coarser precision; more of them are intended


@printable
@dataclass(frozen=True)
class Divergence:
    """A place where two runs diverge: a pair of values that differs although its inputs agree, and why."""

    value_a: int
    value_b: int
    verdict: Verdict
    reason: Reason
    region: Region
    inputs_error: float  #: the largest error of the inputs

    @property
    def text(self) -> str:
        """One sentence: the reason, the place on both sides, and how well the inputs agree."""
        reason = self.reason
        first = None if reason.side == "b" else reason.a
        second = None if reason.side == "a" else reason.b
        label = first or second
        if label is None:
            return f"{reason.text}; {self.inputs_text}"
        name, against = label.name, ""
        both = reason.a is not None and reason.b is not None and reason.a.where != reason.b.where
        if reason.side and both and reason.kind == "op":
            opposite = reason.b if reason.side == "a" else reason.a
            against = f"; the other goes on with {opposite}"
        if first is not None and second is not None:
            if first.name != second.name:
                name = f"{first.name} | {second.name}"
            if first.where != second.where:
                against = second.where if " against " in reason.text else f"; second side{second.where}"
        return f"{name}{label.where}: {reason.text}{against}; {self.inputs_text}"

    @property
    def inputs_text(self) -> str:
        """How well the inputs agree."""
        if self.reason.kind == "input":
            return "it came from outside"
        if self.verdict.state is State.UNKNOWN:
            return "values were not compared"
        if not self.region.a.edge and not self.region.b.edge:
            return "nothing before it differs"
        return "inputs are the same" if not self.inputs_error else f"inputs agree to {self.inputs_error:.0e}"

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "reason": self.reason.to_dict(), "error": number(self.verdict.error),
                "inputs_error": number(self.inputs_error), "value_a": self.value_a, "value_b": self.value_b,
                "ops_a": self.region.a.ops, "ops_b": self.region.b.ops}  # fmt: skip


def number(value: float) -> float | str:
    """A number for JSON, which has neither NaN nor infinity."""
    return value if math.isfinite(value) else str(value)


class Candidate(NamedTuple):
    """A pair of values that may be a divergence."""

    position: int  #: of its op in the first run
    a: int
    b: int
    strong: bool  #: its ops differ, so that it counts even where the values are close


class Divergences:
    """Finds divergences in the order of the run."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._regions, self.reasons = Regions(alignment), Reasons(alignment)

    def find(self) -> tuple[list[Divergence], int]:
        """The divergences, the first one first, and the number of candidates that were not examined."""
        divergences: list[Divergence] = []
        texts: set[str] = set()  # the ops of one reason may have several results
        examined = 0
        candidates = self._candidates()
        alignment = self._alignment
        a, values = alignment.a, alignment.values_a
        for at, (_, one, other, strong) in enumerate(candidates):
            if examined >= _MAX_CANDIDATES:
                return divergences, len(candidates) - at
            producer = a.producer[one]
            sources = [a.origin[value] for value in a.inputs(producer)] if producer >= 0 else []
            if any(
                values[source] >= 0 <= a.producer[source]
                and alignment.compare(source, values[source]).state is State.DIFFERENT
                for source in sources
            ):
                continue  # an input differs already: the usual case after a divergence
            region = self._regions.behind(one, other)
            if region.begins_earlier:
                continue
            examined += 1
            divergence = self._judge(one, other, region, strong)
            if divergence is not None and divergence.text not in texts:
                texts.add(divergence.text)
                divergences.append(divergence)
        return divergences, 0

    def _judge(self, one: int, other: int, region: Region, strong: bool) -> Divergence | None:
        """The divergence of a pair with its likeliest reason; None where rounding or later ops explain it."""
        verdict = self._alignment.compare(one, other)
        if verdict.state is State.DIFFERENT:
            reason = self.reasons.find(region)
            infinite = not math.isfinite(verdict.error)
            if reason.kind in _WEAK and not infinite and verdict.error <= _GROWTH * region.error:
                return None
            if reason.kind == "unexplained":
                region, reason = self._wider_reason(one, other, region, reason)
            if reason.kind in ("unexplained", "layout") and (
                (not infinite and verdict.error <= _GROWTH_ALONE * region.error)
                or self.is_rounding(one, other, region)
            ):
                return None
            if self._comes_together(one, region, reason):
                return None
            for beyond in range(_BEYOND + 1) if reason.kind == "unexplained" else ():
                wider = self._regions.behind(one, other, beyond) if beyond else region
                unseen = None if wider.begins_earlier else self.reasons.unseen(wider)
                if unseen is not None:
                    wider.error = region.error
                    region, reason = wider, unseen
                    break
        else:
            significant = strong and self._is_significant(one, other, region)
            strong_reason = self.reasons.strong(region) if significant else None
            if strong and strong_reason is None and verdict.state is State.CLOSE:
                strong_reason = self.reasons.order(region)  # statistics do not show it
            if strong_reason is None:
                return None
            reason = strong_reason
        if reason.a is None and reason.b is None:
            alignment = self._alignment
            reason = replace(reason, a=alignment.a.call_label(one), b=alignment.b.call_label(other))
        return Divergence(one, other, verdict, reason, region, region.error)

    def _comes_together(self, one: int, region: Region, reason: Reason) -> bool:
        """Whether all results of a value that differs agree again, as well as its inputs do.

        An outcome of the run differs for good: the gradient of a loss is 1, whatever the loss. A factor that
        is applied later, or a sign that is squared away, is no divergence. Another constant is one, unless
        only factors are between. In a coarse precision a difference drowns in a larger sum, so there the
        factors of both sides have to be the same, or only products are between, and sums of values that
        differ: none of these can drown.
        """
        alignment = self._alignment
        a = alignment.a
        bound = max(4 * region.error, 8 * 2.0**-24)
        waiting, seen, passed, coarse = [one], {one}, set(region.a.ops), False
        while waiting:
            value = waiting.pop()
            ops = a.consumers(value)
            passed.update(ops)
            if not ops or value in alignment.outcomes or len(seen) > _MAX_UNTIL_TOGETHER:
                return False
            if any("::" in a.op_name(op) for op in ops):  # all ranks have the result of a collective
                return False
            if reason.kind == "constant" and not all(a.layout[op] or a.op_name(op) in LINEAR for op in ops):
                return False
            for value in (value for op in ops for value in a.outputs(op)):
                other = alignment.values_a[value]
                verdict = alignment.compare(value, other) if other >= 0 else None
                if verdict is not None and verdict.agrees:
                    coarse |= alignment.compare.rounding(value, other) >= _COARSE
                    if verdict.error > bound and not coarse:
                        return False
                elif value not in seen:
                    seen.add(value)
                    waiting.append(value)
        if not coarse or (reason.kind == "constant" and self.reasons.constants.same_factor(passed)):
            return True
        return reason.kind == "parameter" and all(
            a.layout[op]
            or a.op_name(op) in SCALING
            or (a.op_name(op) in ("add", "sub", "cat") and seen.issuperset(a.inputs(op)))
            for op in passed.difference(region.a.ops)
        )

    def is_rounding(self, one: int, other: int, region: Region | None = None) -> bool:
        """Whether the rounding of the inputs explains different results of the same ops.

        A sum that nearly cancels has the error of its terms, and a discrete result of two nearly equal
        numbers may go either way.
        """
        alignment, a = self._alignment, self._alignment.a
        region = region or self._regions.behind(one, other)
        if region.begins_earlier:
            return False
        if any(a.op_name(op) in DISCRETE for op in region.a.ops):
            pairs = [(value, alignment.values_a[value]) for value in region.a.edge]
            return any(alignment.compare.rounding(*pair) >= _COARSE for pair in [*pairs, (one, other)])
        error, numbers = alignment.compare(one, other).error, a.numbers(one)
        if numbers is None or not math.isfinite(error):
            return False

        def mean_size(value: int, norm: float) -> float:
            return norm / math.sqrt(max(1, a.numel[value])) if math.isfinite(norm) else 0.0

        inputs = [(value, a.numbers(value)) for value in region.a.edge if a.numel[value] >= a.numel[one]]
        largest = max((mean_size(value, each.l2) for value, each in inputs if each), default=0.0)
        return error * mean_size(one, numbers.l2) <= alignment.compare.tolerances(one, other)[0] * largest

    def _wider_reason(self, one: int, other: int, region: Region, reason: Reason) -> tuple[Region, Reason]:
        """The nearest reason past inputs that agree by their statistics alone."""
        widest = region
        for beyond in range(1, _BEYOND + 1):
            wider = self._regions.behind(one, other, beyond)
            if wider.begins_earlier:
                break
            wider_reason = self.reasons.find(wider)
            wider.error = region.error
            if wider_reason.kind not in _WEAK:
                return wider, wider_reason
            if wider_reason.kind != "unexplained" and reason.kind == "unexplained":
                widest, reason = wider, wider_reason
        return widest, reason

    def _is_significant(self, one: int, other: int, region: Region) -> bool:
        """Whether close values of different ops differ by more than rounding."""
        verdict = self._alignment.compare(one, other)
        if verdict.state is State.SAME or verdict.error == 0.0:
            return False
        if verdict.state is State.UNKNOWN:  # without values the constants decide
            return not self._alignment.compare.measured
        if self._alignment.compare.rounding(one, other) >= _COARSE:
            return True
        return verdict.error > 8 * 2.0**-24 and verdict.error > 2 * region.error

    # -- candidates ----------------------------------------------------------------------------

    def _candidates(self) -> list[Candidate]:
        """Pairs that differ, and pairs whose ops differ, in the order of the first run."""
        alignment, a = self._alignment, self._alignment.a
        all_candidates = list(self._strong_candidates())
        for one, other in alignment.compared_values():
            if alignment.compare(one, other).state is not State.DIFFERENT:
                continue
            # Of a parameter or an input, the result of the first op that uses it.
            uses = (
                Candidate(op, value, alignment.values_a[value], True)
                for op in a.leaf_consumers.get(one, ())
                for value in a.outputs(op)[:1]
                if alignment.values_a[value] >= 0 and not a.layout[op]
            )
            first_use = next(uses, None) if a.producer[one] < 0 else None
            if first_use is not None:
                all_candidates.append(first_use)
            elif one not in a.parameter_names:
                all_candidates.append(Candidate(alignment.position(one), one, other, False))
        candidates: dict[tuple[int, int], Candidate] = {}
        for each in all_candidates:
            known = candidates.get((each.a, each.b))
            if known is None or each.position < known.position or each.strong:
                first = each.position if known is None else min(each.position, known.position)
                candidates[each.a, each.b] = each._replace(position=first)
        return sorted(candidates.values())

    def _strong_candidates(self) -> Iterator[Candidate]:
        """Results of ops with another constant, or with a coarser rounding than on the other side.

        Also results of calls whose ops were fused or split and compute otherwise, or have other parameters.
        """
        alignment = self._alignment
        a, b = alignment.a, alignment.b
        for x in a.computing:
            y = alignment.ops_a[x]
            if y >= 0 and (self.reasons.constants.of_pair(x, y) or self.reasons.reordered_inputs(x, y)):
                for one, other in zip(a.outputs(x)[:1], b.outputs(y)[:1], strict=True):
                    yield Candidate(alignment.position(one), one, other, True)
        otherwise = alignment.calls_computed_otherwise()
        for x, y in enumerate(alignment.calls.of_a.tolist()):
            if y < 0:
                continue
            names = [{info.name for info in side.module(call).parameters if not info.buffer}
                     for side, call in ((a, x), (b, y))]  # fmt: skip
            if x in otherwise or (all(names) and names[0] != names[1]):
                returned = alignment.call_outputs(x, y)[:1]
                for one, other in [*alignment.by_statistics.get(x, []), *returned]:
                    yield Candidate(alignment.position(one), one, other, True)
        lone_ops = list(self.reasons.inputs.one_sided_uses.values())
        for paired in alignment.sides:
            side = paired.side
            casts = [op for op in np.flatnonzero(side.compared & side.layout).tolist()
                     if paired.ops[op] < 0 and is_coarser(side, op)]  # fmt: skip
            lone_ops += [(paired, op) for op in casts] if len(casts) <= _MAX_CASTS else []
        for paired, op in lone_ops:
            yield from self._first_pair_after(paired, op)

    def _first_pair_after(self, paired: PairedSide, op: int) -> Iterator[Candidate]:
        """The first value in a pair that is computed from the result of an op."""
        side = paired.side
        results = set(side.outputs(op))
        for later in range(op, min(len(side.data.ops), op + 64)):
            if not side.compared[later] or not (later == op or results & set(side.inputs(later))):
                continue
            value = side.outputs(later)[0]
            if not side.layout[later] and paired.values[value] >= 0:
                one, other = paired.pair(value, paired.values[value])
                yield Candidate(self._alignment.position(one), one, other, True)
                return
            results |= set(side.outputs(later))
