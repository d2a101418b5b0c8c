"""Tensors that meet along the wrong dimension: a number for each row, spread over the columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.trace.data import KINDS

_ARITHMETIC: Final = frozenset("add sub mul div rsub".split())
_REDUCTIONS: Final = frozenset(
    "sum mean norm linalg_vector_norm amax amin max min std var logsumexp prod argmax median".split()
)
_SELECTS: Final = frozenset({"squeeze", "select"})
#: What is done to each number by itself.
_ELEMENTWISE: Final = frozenset(
    "add sub mul div rsub sqrt rsqrt clamp clamp_min reciprocal exp log sigmoid tanh relu abs neg pow "
    "detach clone _to_copy softplus silu gelu alias".split()
)
_FARTHEST: Final = 12


@check(
    "broadcast",
    Severity.ERROR,
    "There is one number for each row, and it is applied along the columns; it runs only because both "
    "sizes are equal. Keep the dimension: keepdim=True, or .unsqueeze(-1).",
)
def rows_against_columns(context: ProblemContext) -> Iterator[Finding]:
    """``[N, M]`` meets ``[N]`` that was made of rows, and N is M by chance."""
    for op in np.flatnonzero(context.forward & context.named(_ARITHMETIC)).tolist():
        given = context.inputs(op)
        if len(given) != 2:
            continue
        wide, narrow = sorted(given, key=lambda value: -len(context.meta(value).shape))
        shape, other = context.meta(wide).shape, context.meta(narrow).shape
        if len(shape) != 2 or len(other) != 1 or shape[0] != shape[1] or shape[1] != other[0] or other[0] < 2:
            continue
        source = _rows_of(context, narrow)
        if source >= 0 and (_same_origin(context, source, wide) or _has_features(context, wide)):
            title = (
                f"{context.written(op)} of {context.meta(wide)} and {context.meta(narrow)}, which has a number "
                f"for each "
                f"row (made of {context.meta(source)}): they meet along the columns"
            )
            yield Finding(title, context.module(op), int(context.frames[op]), op, narrow)


def _rows_of(context: ProblemContext, value: int) -> int:
    """The matrix whose last dimension was taken away to make a vector; -1 if it was made otherwise."""
    for _ in range(_FARTHEST):
        maker = context.producer(value)
        if maker < 0:
            return -1
        name = context.name(maker)
        source = next((one for one in context.inputs(maker)), -1)
        if source < 0:
            return -1
        before, after = context.meta(source).shape, context.meta(value).shape
        if len(before) == 2 and len(after) == 1 and (name in _REDUCTIONS or name in _SELECTS):
            last = _takes_last(context, maker, before)
            return source if last else -1
        if name not in _ELEMENTWISE:
            return -1
        alike = [one for one in context.inputs(maker) if context.meta(one).shape == after]
        if len(alike) != 1:
            return -1
        value = alike[0]
    return -1


def _takes_last(context: ProblemContext, op: int, before: tuple[int, ...]) -> bool:
    """Whether the dimension that an op takes away is the last."""
    dims: list[int] = []
    for arg in context.args(op):
        if type(arg) is int:
            dims.append(arg)
        elif isinstance(arg, list | tuple):
            dims += [one for one in arg if type(one) is int]
    if context.name(op) == "select":
        dims = dims[:1]
    if context.name(op) == "squeeze" and not dims:
        return before[1] == 1
    return any(dim in (-1, len(before) - 1) for dim in dims) and 0 not in dims


def _same_origin(context: ProblemContext, source: int, wide: int) -> bool:
    """Whether a matrix is the one that was reduced, or was made of it number by number."""
    for start, goal in ((wide, source), (source, wide)):
        value = start
        for _ in range(_FARTHEST):
            if value == goal:
                return True
            maker = context.producer(value)
            if maker < 0 or context.name(maker) not in _ELEMENTWISE:
                break
            alike = [
                one for one in context.inputs(maker) if context.meta(one).shape == context.meta(value).shape
            ]
            if not alike:
                break
            value = alike[0]
    return False


def _has_features(context: ProblemContext, value: int) -> bool:
    """Whether the last dimension of a matrix is that of a layer's features: its weights made it."""
    for _ in range(_FARTHEST):
        maker = context.producer(value)
        if maker < 0:
            return False
        given = context.inputs(maker)
        if context.name(maker) in MATMULS:
            return any(_is_weight(context, one) for one in given[1:])
        if context.name(maker) not in _ELEMENTWISE or not given:
            return False
        value = given[0]
    return False


def _is_weight(context: ProblemContext, value: int) -> bool:
    base = int(context.data.values.base[value])
    return KINDS.index("parameter") in (
        context.data.values.kind[value],
        context.data.values.kind[max(base, 0)],
    )
