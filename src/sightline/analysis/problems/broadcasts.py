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
def rows_against_columns(facts: ProblemContext) -> Iterator[Finding]:
    """``[N, M]`` meets ``[N]`` that was made of rows, and N is M by chance."""
    for op in np.flatnonzero(facts.forward & facts.named(_ARITHMETIC)).tolist():
        given = facts.inputs(op)
        if len(given) != 2:
            continue
        wide, narrow = sorted(given, key=lambda value: -len(facts.meta(value).shape))
        shape, other = facts.meta(wide).shape, facts.meta(narrow).shape
        if len(shape) != 2 or len(other) != 1 or shape[0] != shape[1] or shape[1] != other[0] or other[0] < 2:
            continue
        source = _rows_of(facts, narrow)
        if source >= 0 and (_same_origin(facts, source, wide) or _has_features(facts, wide)):
            title = (
                f"{facts.written(op)} of {facts.meta(wide)} and {facts.meta(narrow)}, which has a number "
                f"for each "
                f"row (made of {facts.meta(source)}): they meet along the columns"
            )
            yield Finding(title, facts.module(op), int(facts.frames[op]), op, narrow)


def _rows_of(facts: ProblemContext, value: int) -> int:
    """The matrix whose last dimension was taken away to make a vector; -1 if it was made otherwise."""
    for _ in range(_FARTHEST):
        maker = facts.producer(value)
        if maker < 0:
            return -1
        name = facts.name(maker)
        source = next((one for one in facts.inputs(maker)), -1)
        if source < 0:
            return -1
        before, after = facts.meta(source).shape, facts.meta(value).shape
        if len(before) == 2 and len(after) == 1 and (name in _REDUCTIONS or name in _SELECTS):
            last = _takes_last(facts, maker, before)
            return source if last else -1
        if name not in _ELEMENTWISE:
            return -1
        alike = [one for one in facts.inputs(maker) if facts.meta(one).shape == after]
        if len(alike) != 1:
            return -1
        value = alike[0]
    return -1


def _takes_last(facts: ProblemContext, op: int, before: tuple[int, ...]) -> bool:
    """Whether the dimension that an op takes away is the last."""
    dims: list[int] = []
    for arg in facts.args(op):
        if type(arg) is int:
            dims.append(arg)
        elif isinstance(arg, list | tuple):
            dims += [one for one in arg if type(one) is int]
    if facts.name(op) == "select":
        dims = dims[:1]
    if facts.name(op) == "squeeze" and not dims:
        return before[1] == 1
    return any(dim in (-1, len(before) - 1) for dim in dims) and 0 not in dims


def _same_origin(facts: ProblemContext, source: int, wide: int) -> bool:
    """Whether a matrix is the one that was reduced, or was made of it number by number."""
    for start, goal in ((wide, source), (source, wide)):
        value = start
        for _ in range(_FARTHEST):
            if value == goal:
                return True
            maker = facts.producer(value)
            if maker < 0 or facts.name(maker) not in _ELEMENTWISE:
                break
            alike = [one for one in facts.inputs(maker) if facts.meta(one).shape == facts.meta(value).shape]
            if not alike:
                break
            value = alike[0]
    return False


def _has_features(facts: ProblemContext, value: int) -> bool:
    """Whether the last dimension of a matrix is that of a layer's features: its weights made it."""
    for _ in range(_FARTHEST):
        maker = facts.producer(value)
        if maker < 0:
            return False
        given = facts.inputs(maker)
        if facts.name(maker) in MATMULS:
            return any(_is_weight(facts, one) for one in given[1:])
        if facts.name(maker) not in _ELEMENTWISE or not given:
            return False
        value = given[0]
    return False


def _is_weight(facts: ProblemContext, value: int) -> bool:
    base = int(facts.data.values.base[value])
    return KINDS.index("parameter") in (facts.data.values.kind[value], facts.data.values.kind[max(base, 0)])
