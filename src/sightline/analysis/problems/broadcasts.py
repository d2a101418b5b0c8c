"""Tensors that are broadcast along the wrong dimension: one number per row, applied to the columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check, op_finding
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
    "There is one number for each row, and it is applied along the columns; it runs only because both "
    "sizes are equal. Keep the dimension: keepdim=True, or .unsqueeze(-1).",
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
        source = _reduced_matrix(context, narrow)
        if source >= 0 and (_same_origin(context, source, wide) or _has_features(context, wide)):
            title = (
                f"{context.written(op)} of {context.meta(wide)} and {context.meta(narrow)}, which has a "
                f"number for each row (made of {context.meta(source)}): they meet along the columns"
            )
            yield op_finding(context, title, op, narrow)


def _reduced_matrix(context: ProblemContext, value: int) -> int:
    """The matrix whose last dimension was reduced to make a vector; -1 if it was made otherwise."""
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
            return source if _reduces_last(context, producer, before) else -1
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
