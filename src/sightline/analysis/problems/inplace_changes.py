"""A tensor that is changed in place while a skip connection still needs it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, ProblemContext
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check, op_finding, op_line
from sightline.trace.data import MUTATES

_ACTIVATIONS: Final = frozenset(
    "relu_ leaky_relu_ elu_ hardtanh_ silu_ sigmoid_ tanh_ threshold_ hardswish_ celu_ selu_ clamp_ "
    "clamp_min_ mish_ gelu_ hardsigmoid_".split()
)
_JOINS: Final = frozenset("add add_ sub cat".split())
_MAX_OPS: Final = 200  #: how many ops a branch is followed for


@check(
    "changed-before-skip",
    Severity.WARNING,
    "The skip connection adds what the activation has left, not what came in. Take inplace=True out, or "
    "keep a clone for the skip.",
    Confidence.LIKELY,
)
def changed_before_skip(context: ProblemContext) -> Iterator[Finding]:
    """A module changes its input by an activation in place, and later adds it to its own result."""
    ops, calls = context.data.ops, context.data.calls
    in_place = context.forward & context.named(_ACTIVATIONS) & ((ops.flags & MUTATES) != 0)
    for op in np.flatnonzero(in_place & (ops.call >= 0)).tolist():
        before, after = next(iter(context.inputs(op)), -1), next(iter(context.outputs(op)), -1)
        call = _owner(context, op, before)
        if before < 0 or after < 0 or call < 0:
            continue
        end = int(calls.end_op[call])
        joins = [user for user in context.users(after) if user < end and context.name(user) in _JOINS]
        for join in joins:
            others = [value for value in context.inputs(join) if value != after]
            if others and all(_comes_from(context, value, after, op) for value in others[:1]):
                title = (
                    f"{context.written(op)} changes {context.meta(before)} in place, which "
                    f"{op_line(context, join)} adds as the skip connection"
                )
                yield op_finding(context, title, op, before)
                break


def _owner(context: ProblemContext, op: int, value: int) -> int:
    """The outermost call around an op that has a tensor among its inputs; -1 without one.

    A call of at most two ops is the activation module itself, whose job is to change its input.
    """
    calls = context.data.calls
    owner, call = -1, int(context.data.ops.call[op])
    while call >= 0:
        if value not in calls.inputs[calls.input_offsets[call] : calls.input_offsets[call + 1]].tolist():
            break
        owner, call = call, int(calls.parent[call])
    large = owner >= 0 and int(calls.end_op[owner]) - int(calls.first_op[owner]) > 2
    return owner if large else -1


def _comes_from(context: ProblemContext, value: int, source: int, after: int) -> bool:
    """Whether a value was computed from another after an op, through a layer with weights."""
    stack = [(value, False)]
    for _ in range(_MAX_OPS):
        if not stack:
            return False
        each, weighted = stack.pop()
        if each == source:
            return weighted
        producer = context.producer(each)
        if producer > after:
            layer = weighted or context.name(producer) in MATMULS or "conv" in context.name(producer)
            stack += [(one, layer) for one in context.inputs(producer)]
    return False
