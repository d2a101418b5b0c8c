"""Results that differ between two calls of a model on the same inputs and weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from sightline.analysis.problems.context import RANDOM, ProblemContext
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check
from sightline.analysis.problems.run_modes import RunModes, call_outputs
from sightline.analysis.running_statistics import RunningStatistics
from sightline.data.op_groups import ALLOCATIONS
from sightline.data.trace_data import EVALUATION

_MAX_PAIRS: Final = 8  #: how many pairs of calls are compared
_LEAST: Final = 1e-5  #: relative difference of statistics; rounding alone is smaller
#: Noise. Ops that draw by probabilities the model computed, such as multinomial, sample on purpose.
_NOISE: Final = frozenset("rand randn rand_like randn_like normal normal_ uniform uniform_".split())
_PRODUCTS: Final = frozenset("mul mul_ addcmul addcmul_ div".split())
_WEIGHTS: Final = ("parameter", "buffer", "state")


_EQUAL: Final = "Equal inputs and weights should give equal results."
_DETERMINISTIC: Final = (
    "torch.use_deterministic_algorithms(True) takes ops that give them, or names one that cannot."
)


class Difference(NamedTuple):
    """Where a call first differs from an earlier one on the same inputs."""

    call: int
    op: int
    value: int
    outside: bool  #: the difference came from outside the recorded ops, such as numpy


@check(
    "not-deterministic",
    Severity.WARNING,
    _EQUAL,
    Confidence.LIKELY,
)
def not_deterministic(context: ProblemContext) -> Iterator[Finding]:
    """A model is called twice on the same inputs with the same weights, and gives different numbers."""
    calls, modes = context.data.calls, context.derived(RunModes)
    drops = set(modes.drops.tolist())
    pairs = 0
    for group in _same_inputs(context, modes.outermost).values():
        for call in group[1:]:
            pairs += 1
            if pairs > _MAX_PAIRS:
                return
            results = zip(call_outputs(context, group[0]), call_outputs(context, call), strict=False)
            if not any(_differs(context, left, right) for left, right in results):
                continue  # noise that is multiplied by zero is harmless
            difference = _first_difference(context, group[0], call)
            if difference is None or difference.op in drops:
                continue
            op, outside = difference.op, difference.outside
            name, evaluated = context.written(op), bool(int(calls.flags[call]) & EVALUATION)
            if outside or context.named(RANDOM)[op]:
                if not evaluated or not (outside or _is_noise(context, difference)):
                    continue
                cause = "reads numbers that are made anew" if outside else "draws new random numbers"
                title = f"{name} {cause}: two calls on the same inputs differ, in evaluation mode"
                why = f"{_EQUAL} Draw noise only if self.training."
            else:
                title = f"{name} gives other numbers in a second call, on the same inputs"
                why = f"{_EQUAL} {_DETERMINISTIC}"
            yield context.finding(title, op, difference.value, why)


def _same_inputs(context: ProblemContext, outermost: list[int]) -> dict[tuple[int, ...], list[int]]:
    """The calls from outside by module and inputs: the same tensors, or tensors with equal fingerprints."""
    calls, prints = context.data.calls, context.data.stats.fingerprint
    groups: dict[tuple[int, ...], list[int]] = {}
    for call in outermost if len(context.data.stats) else ():
        inputs = calls.inputs_of(call)
        rows = [context.stat(value) for value in inputs]
        keys = [
            -int(prints[row]) if row >= 0 and prints[row] else value
            for value, row in zip(inputs, rows, strict=True)
        ]
        if inputs:
            groups.setdefault((int(calls.module[call]), int(calls.flags[call]), *keys), []).append(call)
    return {key: group for key, group in groups.items() if len(group) > 1}


def _first_difference(context: ProblemContext, first: int, second: int) -> Difference | None:
    """The first op of the second call with equal inputs and another result; None where all are equal."""
    calls, forward = context.data.calls, np.flatnonzero(context.forward)
    one, other = (
        forward[(forward >= calls.first_op[call]) & (forward < calls.end_op[call])].tolist()
        for call in (first, second)
    )
    ops, skipped = context.data.ops, context.named(ALLOCATIONS)
    updates = RunningStatistics(context.index).updates
    same: dict[int, int] = {}  # values of the second call, by their counterparts in the first
    for a, b in zip(one, other, strict=False):
        if ops.name[a] != ops.name[b] or ops.form[a] != ops.form[b]:
            return None
        pairs = list(zip(context.inputs(a), context.inputs(b), strict=False))
        if any(a <= update < b for _, right in pairs for update in updates.get(right, ())):
            return None  # running statistics, which the model keeps
        for left, right in pairs:
            if same.get(right, right) == left:
                continue
            differs = None if context.kind(right) in _WEIGHTS else _differs(context, left, right)
            if differs is None or (differs and context.producer(right) >= 0):
                return None  # other weights, a state that the model keeps, or numbers that are not known
            if differs:
                return Difference(second, b, right, True)
        for left, right in zip(context.results(a), context.results(b), strict=False):
            if not skipped[b] and _differs(context, left, right):
                return Difference(second, b, right, False)
            same[right] = left
    return None


def _differs(context: ProblemContext, left: int, right: int) -> bool | None:
    """Whether two measured tensors hold different numbers; None if one was not measured."""
    stats, one, other = context.data.stats, context.stat(left), context.stat(right)
    if one < 0 or other < 0:
        return None
    if stats.fingerprint[one] and stats.fingerprint[other]:
        return bool(stats.fingerprint[one] != stats.fingerprint[other])
    pairs = [(float(column[one]), float(column[other])) for column in (stats.min, stats.max, stats.l2)]
    return any(abs(a - b) > _LEAST * max(abs(a), abs(b)) for a, b in pairs)


def _is_noise(context: ProblemContext, draw: Difference) -> bool:
    """Whether a draw is noise of a fixed size: scaled by a result of the model, it is a sample of it."""
    if context.name(draw.op) not in _NOISE:
        return False
    first, end = (
        int(column[draw.call]) for column in (context.data.calls.first_op, context.data.calls.end_op)
    )
    for user in context.users(draw.value):
        if context.name(user) in _PRODUCTS:
            others = [value for value in context.inputs(user) if value != draw.value]
            if any(first <= context.producer(value) < end for value in others):
                return False
    return True
