"""The outcomes of a run, and whether they were compared: outputs, losses, results, gradients, weights.

Two runs are equal only if all their outcomes are. `Outcomes` pairs these by their role and compares each
pair; `uncompared_texts` are sentences about those that could not be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.step_summaries import backward_starts
from sightline.compare.constants import differing_constants
from sightline.compare.op_names import KEEPS_ORDER, RANDOM
from sightline.compare.op_pairs import Alignment
from sightline.compare.side import Side
from sightline.compare.values import UNKNOWN, State, Verdict
from sightline.data.trace_data import KIND, PHASES, RAISED, UNFINISHED

_FORWARD: Final = PHASES.index("forward")
_MAX_BEHIND: Final = 64  #: ops behind a value that was not measured, within which all inputs have to be
_MOST_NAMES: Final = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """A value that leaves the runs: its name, the value of each side, and the verdict on the two."""

    name: str  #: ``the loss at train.py:9``
    a: int  #: -1 where a side has no counterpart
    b: int
    verdict: Verdict = UNKNOWN
    why: str = ""  #: why it was not compared

    def to_dict(self) -> dict[str, Any]:
        error = self.verdict.error
        return {"name": self.name, "value_a": self.a, "value_b": self.b,
                "state": self.verdict.state.name.lower(),
                "error": error if math.isfinite(error) else None if math.isnan(error) else str(error),
                "why": self.why}  # fmt: skip


class Leaving(NamedTuple):
    """The values that leave one run, and which are used inside it."""

    calls: list[int]  #: the outermost module calls
    used: NDArray[np.bool_]  #: which values an op of a forward pass takes, or a backward pass starts from
    losses: list[int]  #: which backward passes started from
    results: list[int]  #: of ops outside of modules, and nothing uses them
    gradients: dict[str, int]  #: the last gradient of each parameter
    weights: dict[str, int]  #: the parameters that were updated


class Outcomes:
    """The outcomes of two runs in pairs; the alignment compares these pairs, too."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._leaving = _leaving(alignment.a), _leaving(alignment.b)
        self._verdicts: dict[tuple[int, int, int], Verdict] = {}  #: of values and how far to look behind them
        self._pairs = list(dict.fromkeys(self._named_pairs()))
        alignment.pair_outcomes((each.a, each.b) for each in self._pairs if min(each.a, each.b) >= 0)

    def compared(self) -> list[Outcome]:
        """Every outcome with the verdict on its values, or with the reason why they cannot be compared."""
        alignment = self._alignment
        outcomes = []
        seen: set[tuple[int, int]] = set()
        for each in self._pairs:
            a = alignment.values_b[each.b] if each.a < 0 <= each.b else each.a
            b = alignment.values_a[each.a] if each.b < 0 <= each.a else each.b
            if (a, b) in seen and max(a, b) >= 0:
                continue
            seen.add((a, b))
            verdict, why = UNKNOWN, each.why
            if not why and min(a, b) < 0:
                why = f"{'a' if a < 0 else 'b'} has no counterpart of it"
            elif not why:
                verdict = self._verdict(a, b, _MAX_BEHIND)
            if not why and verdict.state is State.UNKNOWN:
                values = ("a", alignment.a, a), ("b", alignment.b, b)
                lacking = [letter for letter, side, value in values if side.numbers(value) is None]
                why = f"{lacking[0]} did not measure it" if lacking else "a mask hides its numbers"
                why = "neither a nor b measured it" if len(lacking) == 2 else why
            outcomes.append(replace(each, a=a, b=b, verdict=verdict, why=why))
        return outcomes

    def _verdict(self, one: int, other: int, left: int) -> Verdict:
        """`_verdict_of`, once for each two values: many ops may read them."""
        key = one, other, left
        if key not in self._verdicts:
            self._verdicts[key] = self._verdict_of(*key)
        return self._verdicts[key]

    def _verdict_of(self, one: int, other: int, left: int) -> Verdict:
        """The verdict on two values; where they were not measured, that on the inputs of their ops.

        The same op with the same constants has equal results for equal inputs: integers, such as the indices
        of the largest elements, have no statistics.
        """
        alignment = self._alignment
        verdict = alignment.compare(one, other)
        x, y = alignment.a.producer[one], alignment.b.producer[other]
        if verdict.state is not State.UNKNOWN or x < 0 or alignment.ops_a[x] != y or not left:
            return verdict
        a, b = alignment.a, alignment.b
        inputs_a, inputs_b = a.inputs(x), b.inputs(y)
        if (
            not inputs_a
            or len(inputs_a) != len(inputs_b)
            or a.op_name(x) in RANDOM
            or a.opaque[x]
            or b.opaque[y]
            or differing_constants(a.index.ops[x], b.index.ops[y])
        ):
            return verdict
        behind = []
        for pair in zip(inputs_a, inputs_b, strict=True):
            behind.append(self._verdict(*pair, left - 1))
            if not behind[-1].agrees:
                return verdict
        return max(behind, key=lambda each: each.state)

    # -- pairs -----------------------------------------------------------------------------------

    def _named_pairs(self) -> Iterator[Outcome]:
        first, second = self._leaving
        alignment = self._alignment
        yield from self._outputs()
        losses = list(zip(first.losses, second.losses, strict=False))  # in pairs if both have as many
        if len(first.losses) != len(second.losses):
            losses = [*((value, -1) for value in first.losses), *((-1, value) for value in second.losses)]
        for x, y in losses:
            side, value = (alignment.a, x) if x >= 0 else (alignment.b, y)
            producer = side.producer[value]
            yield Outcome(f"the loss{side.op_label(producer).where if producer >= 0 else ''}", x, y)
        yield from self._results()
        for name_of, ours, theirs in (
            ("the gradient of {}".format, first.gradients, second.gradients),
            ("{} after its update".format, first.weights, second.weights),
        ):
            named = {alignment.calls.name(name): value for name, value in theirs.items()}
            for name, value in ours.items():
                other = named.pop(alignment.calls.name(name), -1)
                yield Outcome(name_of(name), value, other)
            yield from (Outcome(name_of(name), -1, value) for name, value in named.items())

    def _outputs(self) -> Iterator[Outcome]:
        """The outputs of the outermost module calls; of one without a partner those that nothing uses."""
        sides = self._alignment.sides
        pairs = [paired.pair(call, int(paired.calls[call]))
                 for paired, leaving in zip(sides, self._leaving, strict=True)
                 for call in leaving.calls]  # fmt: skip
        for x, y in dict.fromkeys(pairs):
            at, call = (0, x) if x >= 0 else (1, y)
            calls, label = sides[at].side.data.calls, sides[at].side.label(call)
            broken = [
                paired.letter
                for paired, each in zip(sides, (x, y), strict=True)
                if each >= 0 and paired.side.data.calls.flags[each] & (RAISED | UNFINISHED)
            ]
            if broken:
                why = f"{label} did not return in {' and '.join(broken)}"
                yield Outcome(f"the output of {label}", -1, -1, why=why)
            elif x < 0 or y < 0:
                values = [value for value in calls.outputs_of(call) if not self._leaving[at].used[value]]
                yield from (Outcome(f"the output of {label}", *sides[at].pair(value)) for value in values)
            else:
                ours, theirs = (paired.side.data.calls.outputs_of(each)
                                for paired, each in zip(sides, (x, y), strict=True))  # fmt: skip
                outputs = list(zip_longest(ours, theirs, fillvalue=-1))
                for number, (one, other) in enumerate(outputs, 1):
                    name = f"output {number}" if len(outputs) > 1 else "the output"
                    yield Outcome(f"{name} of {label}", one, other)

    def _results(self) -> Iterator[Outcome]:
        """The last results of code outside of modules, paired as the ops are, else in order."""
        alignment = self._alignment
        a, b = alignment.a, alignment.b
        first, second = self._leaving[0].results, self._leaving[1].results
        pairs = [(value, alignment.values_a[value]) for value in first if alignment.values_a[value] >= 0]
        pairs += [(alignment.values_b[value], value) for value in second if alignment.values_b[value] >= 0]
        lone_a = [value for value in first if alignment.values_a[value] < 0]
        lone_b = [value for value in second if alignment.values_b[value] < 0]
        if [a.shape(value) for value in lone_a] == [b.shape(value) for value in lone_b]:
            pairs += zip(lone_a, lone_b, strict=True)
        else:
            pairs += [*((value, -1) for value in lone_a), *((-1, value) for value in lone_b)]
        for x, y in pairs:
            side, value = (a, x) if x >= 0 else (b, y)
            yield Outcome(f"the result of {side.op_label(side.producer[value])}", x, y)


def uncompared_texts(outcomes: Iterable[Outcome]) -> list[str]:
    """A sentence for each reason why outcomes were not compared."""
    by_reason: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.verdict.state is State.UNKNOWN:
            by_reason.setdefault(outcome.why, []).append(outcome.name)
    texts = []
    for why, names in by_reason.items():
        names = list(dict.fromkeys(names))
        listed = ", ".join(names[:_MOST_NAMES])
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        texts.append(f"{listed}{more} {'were' if len(names) > 1 else 'was'} not compared: {why}")
    return texts


def _leaving(side: Side) -> Leaving:
    ops, calls, span = side.data.ops, side.data.calls, side.span
    outermost = [call for call in side.children.get(-1, []) if calls.phase[call] == _FORWARD]
    losses = [value for op, value, _ in backward_starts(side.data) if span.first_op <= op < span.end_op]
    used = np.zeros(len(side.data.values), dtype=np.bool_)
    used[ops.inputs[np.repeat(side.compared & (ops.phase == _FORWARD), np.diff(ops.input_offsets))]] = True
    used[losses] = True
    gradients, weights = _last_by_name(side, "gradient"), _last_by_name(side, "parameter")
    return Leaving(
        outermost,
        used,
        list(dict.fromkeys(losses)),
        _unused_results(side, used),
        {name.removesuffix(".grad"): value for name, value in gradients.items()},
        weights,
    )


def _unused_results(side: Side, used: NDArray[np.bool_]) -> list[int]:
    """Results of ops outside of modules that nothing uses, without parts of something that is used."""
    ops, values = side.data.ops, side.data.values
    outside = side.compared & (ops.call < 0) & (ops.phase == _FORWARD)
    chosen = np.repeat(outside, np.diff(ops.output_offsets))
    unused = ~used
    unused[values.previous[values.previous >= 0]] = False  # changed in place later
    chosen[chosen] = unused[ops.outputs[chosen]]
    producers = np.repeat(np.arange(len(ops)), np.diff(ops.output_offsets))[chosen]
    results: dict[int, None] = {}
    for producer, value in zip(producers.tolist(), ops.outputs[chosen].tolist(), strict=True):
        call = int(ops.parent[producer])
        if call >= 0 and value not in side.outputs(call):  # only for the backward pass
            continue
        chain = side.layout_chain(value)
        parts = side.outputs(producer) if side.layout[producer] else []
        if used[parts].any() or any(len(side.consumers(each)) > 1 for each in chain[1:]):
            continue
        keeps = (side.op_name(side.producer[each]) in KEEPS_ORDER for each in chain[:-1])
        source = chain[next((at for at, kept in enumerate(keeps) if not kept), -1)]
        if side.producer[source] >= 0 and ops.call[side.producer[source]] < 0:
            results[source] = None
    return list(results)


def _last_by_name(side: Side, kind: str) -> dict[str, int]:
    """The last result of each name among the ops of the span, of gradients or of parameters."""
    values, names = side.data.values, side.data.names
    chosen = np.flatnonzero((values.kind == KIND[kind]) & (values.name >= 0))
    return {names[int(values.name[value])]: value for value in chosen.tolist() if side.producer[value] >= 0}
