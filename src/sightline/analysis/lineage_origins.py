"""Where a value has its NaN, its dtype and its sizes from: the shortest path back to each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from sightline.analysis.producers import NO_PRODUCER, Producers
from sightline.notation import dtype_name
from sightline.trace.data import KINDS
from sightline.trace.index import Index

_FARTHEST: Final = 2_000  #: values that are looked at on the way back
_MAX_SIZES: Final = 2
_WEIGHTS: Final = ("parameter", "buffer", "state")
_FLOATING: Final = ("float", "bfloat")

Test = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class LineageOrigin:
    """One thing about a value, and the shortest path back to where it began."""

    what: str  #: ``NaN``, ``f32`` or ``size 61``
    path: tuple[int, ...]  #: the value, those in between, and the first one for which it holds
    producer: int  #: of the last one
    sources: tuple[int, ...]  #: what that one was made of


def lineage_origins(index: Index, producers: Producers, value: int) -> tuple[LineageOrigin, ...]:
    """The origins of what is odd about a value, except what its own producer made or a leaf brought along."""
    found: list[LineageOrigin | None] = []
    stats = index.numbers(value)
    if stats is not None and not stats.finite:
        what = "NaN" if stats.nans else "Inf"
        found.append(_origin(producers, value, what, lambda one: _is_bad(index, one)))
    if not producers.in_backward(producers.of(value)):  # a gradient has dtype and sizes of its tensor
        found.append(_dtype_origin(index, producers, value))
        found += _size_origins(index, producers, value)
    return tuple(one for one in found if one is not None and len(one.path) > 1)


def _dtype_origin(index: Index, producers: Producers, value: int) -> LineageOrigin | None:
    """The op that made a floating-point dtype out of another one."""
    metas, values = index.raw.metas, index.raw.values
    wanted = metas[int(values.meta[value])].dtype

    def converts(sources: list[int]) -> bool:
        dtypes = {metas[int(values.meta[one])].dtype for one in sources}
        return any(dtype != wanted and dtype.startswith(_FLOATING) for dtype in dtypes)

    def holds(one: int) -> bool:
        return metas[int(values.meta[one])].dtype == wanted and KINDS[values.kind[one]] not in _WEIGHTS

    origin = _origin(producers, value, dtype_name(wanted), holds, converts)
    converted = origin is not None and wanted.startswith(_FLOATING) and converts(list(origin.sources))
    return origin if converted else None


def _size_origins(index: Index, producers: Producers, value: int) -> list[LineageOrigin]:
    """The ops that made the sizes of a value, except those that a leaf brought along."""
    metas, meta_of = index.raw.metas, index.raw.values.meta
    shape = metas[int(meta_of[value])].shape
    origins = []
    for size in shape:
        if size > 1 and shape.count(size) == 1:
            has = partial(_has_size, index, size)
            origins.append(_origin(producers, value, f"size {size}", has))
    return [one for one in origins if one is not None and one.sources][:_MAX_SIZES]


def _has_size(index: Index, size: int, value: int) -> bool:
    return size in index.raw.metas[int(index.raw.values.meta[value])].shape


def _is_bad(index: Index, value: int) -> bool:
    """Whether a tensor, or the one it is a view of, holds a NaN or an infinity."""
    stats = index.numbers(value)
    base = int(index.raw.values.base[value])
    if stats is None and base >= 0:
        stats = index.numbers(base)
    return stats is not None and not stats.finite


def _origin(
    producers: Producers,
    value: int,
    what: str,
    holds: Test,
    begins: Callable[[list[int]], bool] = lambda _: False,
) -> LineageOrigin | None:
    """The nearest value for which ``holds`` is true and was not before; None if it is too far back.

    ``begins`` is true of the sources of an op that makes it anew.
    """
    came_from: dict[int, int] = {value: -1}
    queue = deque([value])
    while queue and len(came_from) < _FARTHEST:
        one = queue.popleft()
        producer = producers.of(one)
        sources = producers.sources(producer) if producer != NO_PRODUCER else []
        before = [source for source in sources if holds(source) and source != one]
        if not before or begins(sources):
            path = [one]
            while came_from[path[-1]] >= 0:
                path.append(came_from[path[-1]])
            return LineageOrigin(what, tuple(reversed(path)), producer, tuple(sources))
        for source in before:
            if source not in came_from:
                came_from[source] = one
                queue.append(source)
    return None
