"""Two long sequences aligned: which position of one is which of the other, in order.

What both begin and end with is matched first, then what occurs once in both, from the strictest keys to the
weakest; only what is left between is compared each with each. That takes about n·log n steps for sequences
that are alike, whatever their length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Pairs = list[tuple[int, int]]

_CELLS: Final = 1 << 18  #: the largest stretch, as a product of lengths, that is compared each with each
_WINDOW: Final = 256  #: so many at a time where a stretch is larger and nothing in it is unique


def aligned(first: Sequence[Ints], second: Sequence[Ints]) -> Pairs:
    """Pairs of positions, ascending on both sides.

    ``first`` and ``second`` are keys at several levels, the strictest first; what differs at the last level
    is never paired. A key of -1 is no key.

    >>> a, b = np.array([1, 2, 3, 4]), np.array([1, 9, 2, 4])
    >>> aligned([a], [b])
    [(0, 0), (1, 2), (3, 3)]
    """
    found: Pairs = []
    waiting = [(0, len(first[0]), 0, len(second[0]), 0)]
    while waiting:
        low, high, start, end, level = waiting.pop()
        if low >= high or start >= end:
            continue
        a, b = first[level], second[level]
        ahead = _same_ahead(a[low:high], b[start:end])
        found += ((low + at, start + at) for at in range(ahead))
        low, start = low + ahead, start + ahead
        behind = _same_ahead(a[low:high][::-1], b[start:end][::-1])
        found += ((high - 1 - at, end - 1 - at) for at in range(behind))
        high, end = high - behind, end - behind
        if low >= high or start >= end:
            continue
        anchors = _unique(a[low:high], b[start:end])
        if anchors:
            found += ((low + x, start + y) for x, y in anchors)
            edges = [(-1, -1), *anchors, (high - low, end - start)]
            for (left, down), (right, up) in pairwise(edges):
                waiting.append((low + left + 1, low + right, start + down + 1, start + up, level))
        elif level + 1 < len(first):
            waiting.append((low, high, start, end, level + 1))
        elif (high - low) * (end - start) <= _CELLS:
            found += _each_with_each(first, second, low, high, start, end)
        else:
            found += _in_windows(first, second, low, high, start, end)
    return sorted(found)


def _same_ahead(a: Ints, b: Ints) -> int:
    """How many keys from the beginning are the same."""
    size = min(len(a), len(b))
    step, at = 64, 0
    while at < size:
        end = min(size, at + step)
        differs = (a[at:end] != b[at:end]) | (a[at:end] < 0)
        if differs.any():
            return at + int(differs.argmax())
        at, step = end, step * 4
    return size


def _unique(a: Ints, b: Ints) -> Pairs:
    """Positions of what occurs once in both, as many as are in order on both sides."""
    keys_a, at_a, count_a = np.unique(a, return_index=True, return_counts=True)
    keys_b, at_b, count_b = np.unique(b, return_index=True, return_counts=True)
    once_a, once_b = (count_a == 1) & (keys_a >= 0), (count_b == 1) & (keys_b >= 0)
    _, of_a, of_b = np.intersect1d(keys_a[once_a], keys_b[once_b], assume_unique=True, return_indices=True)
    x, y = at_a[once_a][of_a], at_b[once_b][of_b]
    order = np.argsort(x)
    return _rising(x[order].tolist(), y[order].tolist())


def _rising(x: list[int], y: list[int]) -> Pairs:
    """The most pairs that rise on both sides; ``x`` does already."""
    tails: list[int] = []
    where: list[int] = []
    before: list[int] = []
    for at, value in enumerate(y):
        place = bisect_left(tails, value)
        before.append(where[place - 1] if place else -1)
        tails[place : place + 1] = [value]
        where[place : place + 1] = [at]
    kept: Pairs = []
    at = where[-1] if where else -1
    while at >= 0:
        kept.append((x[at], y[at]))
        at = before[at]
    return kept[::-1]


def _each_with_each(
    first: Sequence[Ints], second: Sequence[Ints], low: int, high: int, start: int, end: int
) -> Pairs:
    """The best pairs of a stretch: the stricter the key that is the same, the better."""
    same = first[-1][low:high, None] == second[-1][None, start:end]
    score = same.astype(np.int32)
    for level, (a, b) in enumerate(zip(first[:-1], second[:-1], strict=True)):
        strict = (a[low:high, None] == b[None, start:end]) & (a[low:high, None] >= 0)
        score += (strict & same) * np.int32(2 << (len(first) - 2 - level))
    return [(low + x, start + y) for x, y in best_pairs(score)]


def best_pairs(score: NDArray[np.int32]) -> Pairs:
    """The pairs, rising on both sides, with the largest sum; what scores nothing is not paired.

    >>> best_pairs(np.array([[0, 2], [1, 0]], dtype=np.int32))
    [(0, 1)]
    """
    rows, columns = score.shape
    best = np.zeros((rows + 1, columns + 1), dtype=np.int32)
    for at in range(rows):
        above = best[at]
        np.maximum.accumulate(np.maximum(above[1:], above[:-1] + score[at]), out=best[at + 1, 1:])
    pairs: Pairs = []
    x, y = rows, columns
    while x and y:
        here = best[x, y]
        if here == best[x - 1, y]:
            x -= 1
        elif here == best[x, y - 1]:
            y -= 1
        else:
            x, y = x - 1, y - 1
            pairs.append((x, y))
    return pairs[::-1]


def _in_windows(
    first: Sequence[Ints], second: Sequence[Ints], low: int, high: int, start: int, end: int
) -> Pairs:
    """Pairs of a long stretch in which everything repeats: a window at a time, from the last pair on."""
    found: Pairs = []
    while low < high and start < end:
        right, up = min(high, low + _WINDOW), min(end, start + _WINDOW)
        pairs = _each_with_each(first, second, low, right, start, up)
        last = right == high and up == end
        if not last:  # what is near the edge may have its partner beyond it
            pairs = pairs[: max(1, len(pairs) * 3 // 4)]
        found += pairs
        if last or not pairs:
            low, start = right, up
        else:
            low, start = pairs[-1][0] + 1, pairs[-1][1] + 1
    return found
