"""What leaves a run, and whether it was compared: outputs of the model, losses, results, gradients, weights.

Two runs are equal only if all of it is. `Outcomes` pairs it by its role, compares each pair, and says in
sentences what could not be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
    results: list[int]  #: made outside of modules, and nothing uses them
    gradients: dict[str, int]  #: the last gradient of each parameter
    weights: dict[str, int]  #: the parameters that were updated


class Outcomes:
    """The outcomes of two runs in pairs, which the alignment gets to know."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._sides = _leaving(alignment.a), _leaving(alignment.b)
        self._pairs = list(dict.fromkeys(self._named_pairs()))
        alignment.pair_outcomes((each.a, each.b) for each in self._pairs if min(each.a, each.b) >= 0)

    def compared(self) -> list[Outcome]:
        """Every outcome with its verdict."""
        outcomes = []
        seen: set[tuple[int, int]] = set()
        for each in self._pairs:
            if each.a >= 0 and each.b < 0:
                each = replace(each, b=self._alignment.values_a[each.a])
            elif each.b >= 0 and each.a < 0:
                each = replace(each, a=self._alignment.values_b[each.b])
            if (each.a, each.b) not in seen or max(each.a, each.b) < 0:
                seen.add((each.a, each.b))
                outcomes.append(self._judged(each))
        return outcomes

    def _judged(self, outcome: Outcome) -> Outcome:
        if outcome.why:
            return outcome
        if outcome.a < 0 or outcome.b < 0:
            return replace(outcome, why=f"{'a' if outcome.a < 0 else 'b'} has no counterpart of it")
        verdict = self._verdict(outcome.a, outcome.b, _MAX_BEHIND)
        why = "" if verdict.state is not State.UNKNOWN else self._why_unknown(outcome)
        return replace(outcome, verdict=verdict, why=why)

    def _why_unknown(self, outcome: Outcome) -> str:
        sides = (("a", self._alignment.a, outcome.a), ("b", self._alignment.b, outcome.b))
        lacking = [name for name, side, value in sides if side.numbers(value) is None]
        if len(lacking) == 2:
            return "neither a nor b measured it"
        return f"{lacking[0]} did not measure it" if lacking else "a mask hides its numbers"

    def _verdict(self, one: int, other: int, left: int) -> Verdict:
        """The verdict on two values; of values that were not measured that on all that they were made of.

        The same op with the same constants makes the same of equal inputs: integers, such as the indices of
        the largest elements, have no statistics.
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
        behind = [self._verdict(*pair, left - 1) for pair in zip(inputs_a, inputs_b, strict=True)]
        return max(behind, key=lambda each: each.state) if all(each.agrees for each in behind) else verdict

    # -- pairs -----------------------------------------------------------------------------------

    def _named_pairs(self) -> Iterator[Outcome]:
        first, second = self._sides
        a, b = self._alignment.a, self._alignment.b
        yield from self._outputs()
        losses = _in_pairs(first.losses, second.losses)
        yield from (Outcome(_loss_name(a if x >= 0 else b, x if x >= 0 else y), x, y) for x, y in losses)
        yield from self._results()
        for name_of, ours, theirs in (
            ("the gradient of {}".format, first.gradients, second.gradients),
            ("{} after its update".format, first.weights, second.weights),
        ):
            named = {self._alignment.calls.name(name): value for name, value in theirs.items()}
            for name, value in ours.items():
                other = named.pop(self._alignment.calls.name(name), -1)
                yield Outcome(name_of(name), value, other)
            yield from (Outcome(name_of(name), -1, value) for name, value in named.items())

    def _outputs(self) -> Iterator[Outcome]:
        """The outputs of the outermost module calls; of one without a partner those that nothing uses."""
        alignment = self._alignment
        a, b, calls = alignment.a, alignment.b, alignment.calls
        pairs = [(x, int(calls.of_a[x])) for x in self._sides[0].calls]
        pairs += [(int(calls.of_b[y]), y) for y in self._sides[1].calls]
        for x, y in dict.fromkeys(pairs):
            side, call = (a, x) if x >= 0 else (b, y)
            name = f"the output of {side.label(call)}"
            broken = [letter for letter, side, call in (("a", a, x), ("b", b, y))
                      if call >= 0 and side.data.calls.flags[call] & (RAISED | UNFINISHED)]  # fmt: skip
            if broken:
                yield Outcome(
                    name, -1, -1, why=f"{side.label(call)} did not return in {' and '.join(broken)}"
                )
            elif x < 0 or y < 0:
                used = self._sides[0 if x >= 0 else 1].used
                values = [value for value in side.data.calls.outputs_of(call) if not used[value]]
                yield from (Outcome(name, value, -1) if x >= 0 else Outcome(name, -1, value)
                            for value in values)  # fmt: skip
            else:
                ours, theirs = a.data.calls.outputs_of(x), b.data.calls.outputs_of(y)
                many = max(len(ours), len(theirs))
                for at in range(many):
                    part = f"output {at + 1} of {side.label(call)}" if many > 1 else name
                    yield Outcome(part, ours[at] if at < len(ours) else -1,
                                  theirs[at] if at < len(theirs) else -1)  # fmt: skip

    def _results(self) -> Iterator[Outcome]:
        """What code outside of modules computed last, paired as the ops are, else in order."""
        alignment = self._alignment
        a, b = alignment.a, alignment.b
        first, second = self._sides[0].results, self._sides[1].results
        paired = [(value, alignment.values_a[value]) for value in first]
        taken = {other for _, other in paired if other >= 0}
        lone_a = [value for value, other in paired if other < 0]
        lone_b = [value for value in second if value not in taken and alignment.values_b[value] < 0]
        shapes = [[side.data.metas[int(side.data.values.meta[value])].shape for value in values]
                  for side, values in ((a, lone_a), (b, lone_b))]  # fmt: skip
        rest = [(value, -1) for value in lone_a] + [(-1, value) for value in lone_b]
        if shapes[0] == shapes[1]:
            rest = list(zip(lone_a, lone_b, strict=True))
        also = [(alignment.values_b[value], value) for value in second if alignment.values_b[value] >= 0]
        for x, y in [*((x, y) for x, y in paired if y >= 0), *also, *rest]:
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


def _in_pairs(ours: list[int], theirs: list[int]) -> list[tuple[int, int]]:
    """Values one by one if both sides have as many, else each alone."""
    if len(ours) == len(theirs):
        return list(zip(ours, theirs, strict=True))
    return [*((value, -1) for value in ours), *((-1, value) for value in theirs)]


def _loss_name(side: Side, value: int) -> str:
    producer = side.producer[value]
    return f"the loss{side.op_label(producer).where if producer >= 0 else ''}"


def _used_values(side: Side) -> NDArray[np.bool_]:
    """Which values an op of a forward pass takes."""
    ops = side.data.ops
    readers = np.repeat(side.compared & (ops.phase == _FORWARD), np.diff(ops.input_offsets))
    used = np.zeros(len(side.data.values), dtype=np.bool_)
    used[ops.inputs[readers]] = True
    return used


def _leaving(side: Side) -> Leaving:
    calls, span, used = side.data.calls, side.span, _used_values(side)
    tops = [call for call in side.children.get(-1, []) if calls.phase[call] == _FORWARD]
    losses = [value for op, value, _ in backward_starts(side.data) if span.first_op <= op < span.end_op]
    used[losses] = True
    gradients, weights = _last_by_name(side, "gradient"), _last_by_name(side, "parameter")
    return Leaving(
        tops,
        used,
        list(dict.fromkeys(losses)),
        _unused_results(side, used),
        {name.removesuffix(".grad"): value for name, value in gradients.items()},
        weights,
    )


def _unused_results(side: Side, used: NDArray[np.bool_]) -> list[int]:
    """What ops outside of modules made and nothing uses, but for a part of something that is used."""
    ops, values = side.data.ops, side.data.values
    made_here = np.repeat(
        side.compared & (ops.call < 0) & (ops.phase == _FORWARD), np.diff(ops.output_offsets)
    )
    unused = ~used
    unused[values.previous[values.previous >= 0]] = False  # changed in place later
    makers = np.repeat(np.arange(len(ops)), np.diff(ops.output_offsets))[made_here]
    candidates = ops.outputs[made_here]
    results: dict[int, None] = {}
    for maker, value in zip(
        makers[unused[candidates]].tolist(), candidates[unused[candidates]].tolist(), strict=True
    ):
        call = int(ops.parent[maker])
        if call >= 0 and value not in side.outputs(call):  # only for the backward pass
            continue
        chain = side.layout_chain(value)
        parts = side.outputs(maker) if side.layout[maker] else []
        if used[parts].any() or any(len(side.consumers(each)) > 1 for each in chain[1:]):
            continue
        keeps = (side.op_name(side.producer[each]) in KEEPS_ORDER for each in chain[:-1])
        source = chain[next((at for at, kept in enumerate(keeps) if not kept), -1)]
        if side.producer[source] >= 0 and ops.call[side.producer[source]] < 0:
            results[source] = None
    return list(results)


def _last_by_name(side: Side, kind: str) -> dict[str, int]:
    """The last value of each name that an op of the span made, of gradients or of parameters."""
    values, names = side.data.values, side.data.names
    chosen = np.flatnonzero((values.kind == KIND[kind]) & (values.name >= 0))
    return {names[int(values.name[value])]: value for value in chosen.tolist() if side.producer[value] >= 0}
