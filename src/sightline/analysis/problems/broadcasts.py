"""Tensors that are broadcast along the wrong dimension: one number per row, applied to the columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check, op_at_line, op_finding, op_line
from sightline.trace.data import KINDS

_ARITHMETIC: Final = frozenset("add sub mul div rsub".split())
_REDUCTIONS: Final = frozenset(
    "sum mean norm linalg_vector_norm amax amin max min std var logsumexp prod argmax median".split()
)
_SELECTS: Final = frozenset({"squeeze", "select"})
#: Ops on each element by itself.
_ELEMENTWISE: Final = frozenset(
    "add sub mul div rsub sqrt rsqrt clamp clamp_min reciprocal exp log sigmoid tanh relu abs neg pow "
    "detach clone _to_copy softplus silu gelu alias".split()
)
_MAX_OPS: Final = 12  #: how many ops a value is followed back for


@check(
    "broadcast",
    Severity.ERROR,
    "It runs only because both sizes are equal. Keep the last dimension of what is one number for each row: "
    "keepdim=True, or .unsqueeze(-1).",
)
def rows_against_columns(context: ProblemContext) -> Iterator[Finding]:
    """``[N, M]`` meets an ``[N]`` that was reduced from rows, and N is M by chance."""
    for op in np.flatnonzero(context.forward & context.named(_ARITHMETIC)).tolist():
        inputs = context.inputs(op)
        if len(inputs) != 2:
            continue
        wide, narrow = sorted(inputs, key=lambda value: -len(context.meta(value).shape))
        shape, other = context.meta(wide).shape, context.meta(narrow).shape
        if len(shape) != 2 or len(other) != 1 or shape[0] != shape[1] or shape[1] != other[0] or other[0] < 2:
            continue
        reduction = _row_reduction(context, narrow)
        if reduction < 0:
            continue
        if _same_origin(context, context.inputs(reduction)[0], wide) or _has_features(context, wide):
            yield _finding(context, op, reduction, wide, narrow)


def _finding(context: ProblemContext, op: int, reduction: int, wide: int, narrow: int) -> Finding:
    """At the line that lost the dimension, or at the op's if that is a line of a library."""
    at = op if context.own_place(int(context.frames[reduction])) else reduction
    dropped, applied = (_text(context, each, elsewhere=at) for each in (reduction, op))
    title = (
        f"{dropped} drops the last dimension of {context.meta(context.inputs(reduction)[0])}: {applied} of "
        f"{context.meta(wide)} and {context.meta(narrow)} then applies the number of each row to a column"
    )
    return op_finding(context, title, at, narrow, _repair(context, reduction))


def _text(context: ProblemContext, op: int, elsewhere: int) -> str:
    """The name of an op, with its line where that is not the line of another."""
    same = op_line(context, op) == op_line(context, elsewhere)
    return context.written(op).rpartition(".")[2] if same else op_at_line(context, op)


def _repair(context: ProblemContext, reduction: int) -> str:
    """How a vector keeps the dimension that an op dropped."""
    rows, name = (
        context.meta(context.outputs(reduction)[0]).shape[0],
        context.written(reduction).rpartition(".")[2],
    )
    if context.name(reduction) == "squeeze":
        how = "Drop the squeeze"
    elif context.name(reduction) == "select":
        how = "Index with a range (x[:, 2:3] for x[:, 2])"
    else:
        how = f"Give {name} keepdim=True"
    return f"It runs only because there are as many rows as columns. {how}, so that it stays [{rows}, 1]."


def _row_reduction(context: ProblemContext, value: int) -> int:
    """The op that reduced the last dimension of a matrix to make a vector; -1 if it was made otherwise."""
    for _ in range(_MAX_OPS):
        producer = context.producer(value)
        if producer < 0:
            return -1
        name = context.name(producer)
        source = next(iter(context.inputs(producer)), -1)
        if source < 0:
            return -1
        before, after = context.meta(source).shape, context.meta(value).shape
        if len(before) == 2 and len(after) == 1 and (name in _REDUCTIONS or name in _SELECTS):
            return producer if _reduces_last(context, producer, before) else -1
        if name not in _ELEMENTWISE:
            return -1
        same_shape = [value for value in context.inputs(producer) if context.meta(value).shape == after]
        if len(same_shape) != 1:
            return -1
        value = same_shape[0]
    return -1


def _reduces_last(context: ProblemContext, op: int, before: tuple[int, ...]) -> bool:
    """Whether an op reduces the last dimension."""
    dims: list[int] = []
    for arg in context.args(op):
        if type(arg) is int:
            dims.append(arg)
        elif isinstance(arg, list | tuple):
            dims += [value for value in arg if type(value) is int]
    if context.name(op) == "select":
        dims = dims[:1]
    if context.name(op) == "squeeze" and not dims:
        return before[1] == 1
    return any(dim in (-1, len(before) - 1) for dim in dims) and 0 not in dims


def _same_origin(context: ProblemContext, source: int, wide: int) -> bool:
    """Whether one of two matrices was computed from the other elementwise, or both are the same."""
    for start, goal in ((wide, source), (source, wide)):
        value = start
        for _ in range(_MAX_OPS):
            if value == goal:
                return True
            producer = context.producer(value)
            if producer < 0 or context.name(producer) not in _ELEMENTWISE:
                break
            same_shape = [
                value
                for value in context.inputs(producer)
                if context.meta(value).shape == context.meta(value).shape
            ]
            if not same_shape:
                break
            value = same_shape[0]
    return False


def _has_features(context: ProblemContext, value: int) -> bool:
    """Whether the last dimension of a matrix is that of a layer's features: a matmul with weights made it."""
    for _ in range(_MAX_OPS):
        producer = context.producer(value)
        if producer < 0:
            return False
        inputs = context.inputs(producer)
        if context.name(producer) in MATMULS:
            return any(_is_weight(context, value) for value in inputs[1:])
        if context.name(producer) not in _ELEMENTWISE or not inputs:
            return False
        value = inputs[0]
    return False


def _is_weight(context: ProblemContext, value: int) -> bool:
    base = int(context.data.values.base[value])
    return KINDS.index("parameter") in (
        context.data.values.kind[value],
        context.data.values.kind[max(base, 0)],
    )
