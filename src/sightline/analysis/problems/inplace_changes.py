"""A tensor that is changed in place while a skip connection still needs it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, ProblemContext
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check
from sightline.trace.data import MUTATES

_ACTIVATIONS: Final = frozenset(
    "relu_ leaky_relu_ elu_ hardtanh_ silu_ sigmoid_ tanh_ threshold_ hardswish_ celu_ selu_ clamp_ "
    "clamp_min_ mish_ gelu_ hardsigmoid_".split()
)
_JOINS: Final = frozenset("add add_ sub cat".split())
_FARTHEST: Final = 200  #: ops that a branch is followed for


@check(
    "changed-before-skip",
    Severity.WARNING,
    "The skip connection adds what the activation has left, not what came in. Take inplace=True out, or "
    "keep a clone for the skip.",
    Confidence.LIKELY,
)
def changed_before_skip(context: ProblemContext) -> Iterator[Finding]:
    """A module changes its input by an activation in place, and later adds it to what it made of it."""
    data = context.data
    calls = data.calls
    chosen = (
        context.forward
        & context.named(_ACTIVATIONS)
        & (data.ops.call >= 0)
        & ((data.ops.flags & MUTATES) != 0)
    )
    for op in np.flatnonzero(chosen).tolist():
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
                    f"{context.place(int(context.frames[join]))} adds as the skip connection"
                )
                yield Finding(title, context.module(op), int(context.frames[op]), op, before)
                break


def _owner(context: ProblemContext, op: int, value: int) -> int:
    """The outermost call around an op that was given a tensor, and did not make it; -1 if there is none.

    A module that is an activation itself is given its input to change it: what counts is the one around it.
    """
    calls = context.data.calls
    found, at = -1, int(context.data.ops.call[op])
    while at >= 0:
        given = calls.inputs[calls.input_offsets[at] : calls.input_offsets[at + 1]].tolist()
        if value not in given:
            break
        found, at = at, int(calls.parent[at])
    inside = found >= 0 and int(calls.end_op[found]) - int(calls.first_op[found]) > 2
    return found if inside else -1


def _comes_from(context: ProblemContext, value: int, source: int, after: int) -> bool:
    """Whether a value was made of another, through a layer with weights."""
    front = [(value, False)]
    for _ in range(_FARTHEST):
        if not front:
            return False
        each, weighted = front.pop()
        if each == source:
            return weighted
        maker = context.producer(each)
        if maker > after:
            layer = weighted or context.name(maker) in MATMULS or "conv" in context.name(maker)
            front += [(one, layer) for one in context.inputs(maker)]
    return False
