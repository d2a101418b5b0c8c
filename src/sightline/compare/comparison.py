"""`compare` and its result: the pairs of ops and values of two recordings, and their differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.compare.common_part import common_part
from sightline.compare.divergence import Divergence, Divergences, number
from sightline.compare.notes import (
    compared_level,
    integer_notes,
    precision_notes,
    recording_notes,
    value_notes,
)
from sightline.compare.op_pairs import Alignment
from sightline.compare.outcomes import Outcome, Outcomes, uncompared_texts
from sightline.compare.parameters import ParameterDiff, compare_parameters
from sightline.compare.side import OpLabel, Side, StepRange, span_of
from sightline.compare.values import UNKNOWN, State, ValueComparer, Verdict
from sightline.data.index import Index
from sightline.data.trace_data import REQUIRES_GRAD
from sightline.notation import number_text
from sightline.text_encoding import printable

VALUES: Final = ("auto", "tensors", "statistics", "fingerprints", "none")
_DIFFERENT_MODELS: Final = 0.2  #: with fewer ops in pairs, two recordings are of different models

Steps = StepRange | tuple[StepRange | None, StepRange | None] | None


@dataclass(frozen=True)
class OpPair:
    """A pair of ops, with the verdict on their results."""

    a: int
    b: int
    verdict: Verdict


class AlignedOps(NamedTuple):
    """An op of each run, -1 where that has none, and the verdict on their results where there is one."""

    a: int
    b: int
    verdict: Verdict | None
    first: bool  #: whether the runs diverge here


@printable
@dataclass(frozen=True)
class Parting:
    """The first difference in the ops of two runs: the op of each side, if there is one."""

    a: OpLabel | None
    b: OpLabel | None

    @property
    def text(self) -> str:
        """``mm at net.py:9 (fc) against relu at net.py:11``."""
        if self.a and self.b:
            return f"{self.a} against {self.b}"
        return f"{self.a or self.b} only on the {'first' if self.a else 'second'} side"

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "a": self.a.to_dict() if self.a else None,
                "b": self.b.to_dict() if self.b else None}  # fmt: skip


@printable
@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A pair of module calls, with the error of their results."""

    call_a: int
    call_b: int
    a: str
    b: str
    type_a: str
    type_b: str
    depth: int
    state: State
    error: float  #: NaN where nothing was measured

    @property
    def name(self) -> str:
        """The path, both where they differ."""
        return self.a if self.a == self.b else f"{self.a} | {self.b}"

    def to_dict(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b, "call_a": self.call_a, "call_b": self.call_b,
                "state": self.state.name.lower(),
                "error": self.error if math.isfinite(self.error) else None}  # fmt: skip


class Comparison:
    """The pairs of ops and values of two recordings, and where they differ, as plain data."""

    def __init__(self, alignment: Alignment, level: str, notes: list[str]) -> None:
        self.alignment = alignment
        self.level = level
        self.a, self.b = alignment.a, alignment.b
        self._outcomes = Outcomes(alignment)
        self._divergences = Divergences(alignment)
        self.divergences, self.more = self._divergences.find()
        different = [self.different_models] if self.different_models else []
        self._notes = [*notes, *different, *precision_notes(self.a, self.b), *integer_notes(alignment)]

    @property
    def notes(self) -> list[str]:
        """Sentences about values that could not be compared; faults of kept tensors show as they are read."""
        return [*self._notes, *self.alignment.compare.faults]

    @property
    def divergence(self) -> Divergence | None:
        """The first true divergence."""
        return self.divergences[0] if self.divergences else None

    @cached_property
    def verdict(self) -> str:
        """Whether they are "same", "close" (up to rounding), "different", or "unknown".

        They are the same or close only if every outcome of the runs was compared: `uncompared` is empty.
        """
        if self.divergences or self.different_models or self.different_outcomes:
            return "different"
        if self.uncompared or not (self._states[State.SAME] or self._states[State.CLOSE]):
            return "unknown"
        return "close" if self._states[State.CLOSE] or self._states[State.DIFFERENT] else "same"

    @cached_property
    def _states(self) -> Counter[State]:
        """How many pairs of values are the same, close, different or unknown."""
        compare = self.alignment.compare
        return Counter(compare(*pair).state for pair in self.alignment.compared_values())

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of the runs with verdicts: outputs, losses, results, gradients and weights."""
        return self._outcomes.compared()

    @cached_property
    def uncompared(self) -> list[str]:
        """Sentences about outcomes that could not be compared."""
        return uncompared_texts(self.outcomes) if self.outcomes else ["neither run has a result to compare"]

    @cached_property
    def different_outcomes(self) -> list[Outcome]:
        """The outcomes that differ by more than rounding explains, wherever the difference begins."""
        return [each for each in self.outcomes if each.verdict.state is State.DIFFERENT
                and not self._divergences.is_rounding(each.a, each.b)]  # fmt: skip

    @cached_property
    def outcome_text(self) -> str:
        """The outcomes that differ or were not compared, in a sentence; "" where a divergence says enough."""
        if self.divergences or self.different_models:
            return ""
        if self.different_outcomes:
            first, count = self.different_outcomes[0], len(self.different_outcomes)
            more = f", as do {count - 1} more that leave the runs" if count > 1 else ""
            error = number_text(first.verdict.error)
            return f"{first.name} differs by {error}{more}; no op was found where that begins"
        if not self._states[State.SAME] and not self._states[State.CLOSE]:
            return "no values could be compared"
        return "; ".join(self.uncompared)

    @cached_property
    def pairs(self) -> list[OpPair]:
        """Every op with a partner, in the order of the first run."""
        alignment, ignored = self.alignment, self.alignment.ignored_values
        pairs = []
        for x in np.flatnonzero(self.a.compared).tolist():
            y = alignment.ops_a[x]
            if y >= 0:
                outputs = zip(self.a.outputs(x), self.b.outputs(y), strict=False)
                verdicts = [alignment.compare(*each) for each in outputs if each[0] not in ignored]
                pairs.append(OpPair(x, y, max(verdicts, key=lambda each: each.state, default=UNKNOWN)))
        return pairs

    def aligned_ops(self) -> Iterator[AlignedOps]:
        """The computing ops of both runs: pairs in the order of the first run, lone ops where they ran."""
        alignment, divergence = self.alignment, self.divergence
        first_a, first_b = (
            label.op if label is not None else -1
            for label in ((divergence.reason.a, divergence.reason.b) if divergence else (None, None))
        )
        verdicts = {pair.a: pair.verdict for pair in self.pairs}
        lone_b = [op for op in self.b.computing if alignment.ops_b[op] < 0]
        at = 0
        for op in self.a.computing:
            other = alignment.ops_a[op]
            while other >= 0 and at < len(lone_b) and lone_b[at] < other:
                yield AlignedOps(-1, lone_b[at], None, lone_b[at] == first_b)
                at += 1
            first = op == first_a or other == first_b >= 0
            yield AlignedOps(op, other, verdicts.get(op), first)
        yield from (AlignedOps(-1, op, None, op == first_b) for op in lone_b[at:])

    @cached_property
    def largest_error(self) -> float:
        """The largest error of results that agree; 0 where there is none."""
        errors = (pair.verdict.error for pair in self.pairs if pair.verdict.agrees)
        return max((error for error in errors if not math.isnan(error)), default=0.0)

    @cached_property
    def op_counts(self) -> tuple[int, int] | None:
        """The ops of each recording that are compared, and its compiled regions; None where no ops are."""
        if self.level == "none":
            return None
        first, second = (int((side.compared | side.opaque).sum()) for side in (self.a, self.b))
        return first, second

    @property
    def compared_by(self) -> list[str]:
        """The sources of the values that were compared, the most exact first."""
        compare, sides = self.alignment.compare, (self.a, self.b)
        if not compare.measured:
            return []
        kept = all(side.data.captures for side in sides) and not compare.faults
        return [
            *(["kept tensors"] if kept else []),
            *(["statistics and fingerprints"] if all(len(side.stats) for side in sides) else []),
        ]

    @cached_property
    def differing(self) -> list[OpPair]:
        """The pairs with different results."""
        return [pair for pair in self.pairs if pair.verdict.state is State.DIFFERENT]

    @cached_property
    def removed(self) -> list[int]:
        """Ops of the first recording without a partner."""
        return [op for op in np.flatnonzero(self.a.compared).tolist() if self.alignment.ops_a[op] < 0]

    @cached_property
    def added(self) -> list[int]:
        """Ops of the second recording without a partner."""
        return [op for op in np.flatnonzero(self.b.compared).tolist() if self.alignment.ops_b[op] < 0]

    @cached_property
    def modules(self) -> list[ModuleRow]:
        """The pairs of module calls, with the errors of their results, in the order in which they ended."""
        a, b, alignment = self.a, self.b, self.alignment
        rows = []
        for x, y in enumerate(alignment.calls.of_a.tolist()):
            if y < 0:
                continue
            state, error = State.UNKNOWN, math.nan
            for one, other in alignment.call_outputs(x, y):
                verdict = alignment.compare(one, other)
                if verdict.state >= state and not (verdict.error <= error):
                    error = verdict.error
                state = max(state, verdict.state)
            types, depth = (a.module(x).type, b.module(y).type), a.index.call_depths[x]
            rows.append(ModuleRow(x, y, a.label(x), b.label(y), *types, depth, state, error))
        return sorted(rows, key=lambda row: int(a.data.calls.order[row.call_a]))

    @cached_property
    def parameters(self) -> ParameterDiff:
        """The weights and buffers of both."""
        return compare_parameters(self.alignment)

    @cached_property
    def parting(self) -> Parting | None:
        """The first difference in the computing ops of the two runs."""
        a, b = self.a, self.b
        ops_a, ops_b = self.alignment.ops_a, self.alignment.ops_b
        # Ops inside compiled code of the other side run on both.
        ours, theirs = (
            [op for op in side.computing if op not in compiled]
            for side, compiled in zip((a, b), map(set, self.compiled), strict=True)
        )
        lone_a = next((op for op in ours if ops_a[op] < 0), -1)
        lone_b = next((op for op in theirs if ops_b[op] < 0), -1)
        if lone_a < 0 and lone_b < 0:
            return None
        # The position of the second side's lone op on the first side: after the partner of the op before it.
        position = len(ops_a)
        if lone_b >= 0:
            position = max((ops_b[op] for op in theirs if op < lone_b and ops_b[op] >= 0), default=-1)
        opposite = -1
        if lone_a >= 0 and lone_a <= position:
            after = max((ops_a[op] for op in ours if op < lone_a and ops_a[op] >= 0), default=-1)
            if lone_b >= 0 and all(ops_b[op] < 0 for op in theirs if after < op <= lone_b):
                opposite = lone_b
            return Parting(a.op_label(lone_a), b.op_label(opposite) if opposite >= 0 else None)
        between = next((op for op in ours if op > position), -1)
        if between >= 0 and ops_a[between] < 0:
            opposite = between
        return Parting(a.op_label(opposite) if opposite >= 0 else None, b.op_label(lone_b))

    @cached_property
    def harmless(self) -> list[str]:
        """Differences that do not matter or follow from the divergence, counted."""
        lone_a = sorted(set(self.removed).difference(self.compiled[0]))
        lone_b = sorted(set(self.added).difference(self.compiled[1]))
        computing = [_names_text(side, [op for op in ops if not side.layout[op]], f" only in {name}")
                     for side, ops, name in ((self.a, lone_a, "a"), (self.b, lone_b, "b"))]  # fmt: skip
        layout_a = [op for op in lone_a if self.a.layout[op]]
        layout_b = [op for op in lone_b if self.b.layout[op]]
        only_a = self.a.unlike(layout_a, self.b, layout_b)
        only_b = self.b.unlike(layout_b, self.a, layout_a)
        moving = [_names_text(side, ops, f" only in {name}, no arithmetic")
                  for side, ops, name in ((self.a, only_a, "a"), (self.b, only_b, "b"))]  # fmt: skip
        return [text for text in (*_compiled_texts(self), *computing, *_metadata(self), *moving) if text]

    @cached_property
    def compiled(self) -> tuple[list[int], list[int]]:
        """The ops of each side inside compiled regions of the other, and such regions themselves."""
        return self.alignment.compiled_ops()

    @cached_property
    def different_models(self) -> str:
        """A sentence where two recordings have too little in common; else ""."""
        computed = [len(side.computing) for side in (self.a, self.b)]
        paired = sum(self.alignment.ops_a[op] >= 0 for op in self.a.computing)
        paired += len(self.compiled[0])
        few = paired < _DIFFERENT_MODELS * min(computed)
        roots = [{info.type for id, info in enumerate(side.data.modules) if info.root == id}
                 for side in (self.a, self.b)]  # fmt: skip
        other_root = roots[0].isdisjoint(roots[1])
        if min(computed) and (few or (other_root and paired < _DIFFERENT_MODELS * max(computed))):
            left = "only those are compared" if paired else "only their weights are compared"
            return f"these look like different models: {paired} of {computed[0]} ops have a partner; {left}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON."""
        return {
            "verdict": self.verdict,
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
            "uncompared": self.uncompared,
            "divergence": self.divergence.to_dict() if self.divergence else None,
            "divergences": [each.to_dict() for each in self.divergences],
            "parting": self.parting.to_dict() if self.parting else None,
            "parameters": self.parameters.to_dict(),
            "modules": [row.to_dict() for row in self.modules],
            "pairs": [[pair.a, pair.b, pair.verdict.state.name.lower(),
                       None if math.isnan(pair.verdict.error) else number(pair.verdict.error)]
                      for pair in self.pairs],
            "added": self.added,
            "removed": self.removed,
            "harmless": self.harmless,
            "notes": self.notes,
            "level": self.level,
        }  # fmt: skip


def compare(
    a: Index,
    b: Index,
    *,
    rename: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    values: str = "auto",
    step: Steps = None,
) -> Comparison:
    """Compare two recordings."""
    level, notes = compared_level(a.raw, b.raw)
    first, second = step if isinstance(step, tuple) else (step, step)
    span_a, span_b = common_part(a, b) if step is None else (span_of(a, first), span_of(b, second))
    key_ids: dict[Any, int] = {}
    one, other = Side(a, level, key_ids, span_a), Side(b, level, key_ids, span_b)
    notes += [*recording_notes(one, "a"), *recording_notes(other, "b"), *value_notes(one, other, values)]
    alignment = Alignment(one, other, ValueComparer(one, other, rtol, atol, values), rename)
    return Comparison(alignment, level, notes)


def _compiled_texts(comparison: Comparison) -> Iterator[str]:
    """How many ops of one side are inside compiled regions of the other."""
    alignment = comparison.alignment
    if not any(comparison.compiled):
        return
    known = [pair for pair in alignment.compared_values()
             if alignment.compare(*pair).state is not State.UNKNOWN]  # fmt: skip
    sides = ("a", comparison.a), ("b", comparison.b)
    for at, (name, side) in enumerate(sides):
        letter, other = sides[1 - at]
        regions = [op for op in comparison.compiled[1 - at] if other.opaque[op]]
        alone = side.unlike(comparison.compiled[at], other, comparison.compiled[1 - at])
        count = sum(not side.opaque[op] for op in alone)
        if count and regions:
            results = {value for op in regions for value in other.outputs(op)}
            compared = bool(results) and results.issubset(pair[1 - at] for pair in known)
            end = "their results are compared" if compared else "not all their results are measured"
            ops = f"{count} ops of {name} are" if count > 1 else f"1 op of {name} is"
            yield f"{ops} inside compiled regions of {letter}; {end}"


def _names_text(side: Side, ops: list[int], where: str) -> str:
    if not ops:
        return ""
    counts = Counter(side.op_name(op) for op in ops)
    shown = ", ".join(f"{op} ×{count}" if count > 1 else op for op, count in counts.most_common(5))
    more = f" and {len(counts) - 5} more kinds" if len(counts) > 5 else ""
    return f"{len(ops)} op{'s' if len(ops) > 1 else ''}{where}: {shown}{more}"


def _metadata(comparison: Comparison) -> list[str]:
    """Differences of shape, dtype, device, stride, training and grad mode, counted."""
    counts: Counter[str] = Counter()
    a, b = comparison.a.data, comparison.b.data
    partners = np.array(comparison.alignment.values_a, dtype=np.int64)
    values_a = np.flatnonzero(partners >= 0)
    values_b = partners[values_a]
    keys = a.values.meta[values_a].astype(np.int64) * max(1, len(b.metas)) + b.values.meta[values_b]
    for key, count in zip(*(each.tolist() for each in np.unique(keys, return_counts=True)), strict=True):
        at, other_at = divmod(key, max(1, len(b.metas)))
        one, other = a.metas[at], b.metas[other_at]
        for name, left, right in (("dtype", one.dtype, other.dtype), ("device", one.device, other.device)):
            if left != right:
                counts[f"{name} {left} | {right}"] += count
        if one.shape != other.shape or one.stride != other.stride:
            counts["shapes" if one.shape != other.shape else "strides"] += count
    grads = int(((a.values.flags[values_a] ^ b.values.flags[values_b]) & REQUIRES_GRAD).sum())
    if grads:
        counts["requires_grad"] = grads
    texts = [f"{name} of {count} value{'s' if count > 1 else ''}" for name, count in counts.most_common()]
    calls = zip(a.calls.module.tolist(), comparison.alignment.calls.of_a.tolist(), strict=True)
    modules = {(x, int(b.calls.module[call])) for x, call in calls if call >= 0}
    modes = sum(a.modules[x].training != b.modules[y].training for x, y in modules)
    return texts + ([f"training mode of {modes} module{'s' if modes > 1 else ''}"] if modes else [])
