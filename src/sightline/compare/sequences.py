"""Aligns two long sequences: which position of one corresponds to which of the other, in order.

Common prefixes and suffixes are matched first, then keys that occur once in both, from the strictest keys to
the weakest; only the rest between these is compared each with each. For similar sequences that takes about
n·log n steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Pairs = list[tuple[int, int]]
T = TypeVar("T")

_CELLS: Final = 1 << 18  #: the largest product of two lengths that is compared each with each
_WINDOW: Final = 256  #: positions at a time in larger parts where nothing is unique


def align(first: Sequence[Ints], second: Sequence[Ints]) -> Pairs:
    """Pairs of positions, ascending on both sides.

    ``first`` and ``second`` are keys at several levels, the strictest first; positions whose keys differ at
    the last level are never paired. The key -1 matches nothing.

    >>> a, b = np.array([1, 2, 3, 4]), np.array([1, 9, 2, 4])
    >>> align([a], [b])
    [(0, 0), (1, 2), (3, 3)]
    """
    pairs: Pairs = []
    waiting = [(0, len(first[0]), 0, len(second[0]), 0)]
    while waiting:
        low, high, start, end, level = waiting.pop()
        if low >= high or start >= end:
            continue
        a, b = first[level], second[level]
        prefix = _common_prefix(a[low:high], b[start:end])
        pairs += ((low + at, start + at) for at in range(prefix))
        low, start = low + prefix, start + prefix
        suffix = _common_prefix(a[low:high][::-1], b[start:end][::-1])
        pairs += ((high - 1 - at, end - 1 - at) for at in range(suffix))
        high, end = high - suffix, end - suffix
        if low >= high or start >= end:
            continue
        anchors = _unique_anchors(a[low:high], b[start:end])
        if anchors:
            pairs += ((low + x, start + y) for x, y in anchors)
            edges = [(-1, -1), *anchors, (high - low, end - start)]
            for (left, down), (right, up) in pairwise(edges):
                waiting.append((low + left + 1, low + right, start + down + 1, start + up, level))
        elif level + 1 < len(first):
            waiting.append((low, high, start, end, level + 1))
        elif (high - low) * (end - start) <= _CELLS:
            pairs += _pair_exhaustively(first, second, low, high, start, end)
        else:
            pairs += _pair_in_windows(first, second, low, high, start, end)
    return sorted(pairs)


def _common_prefix(a: Ints, b: Ints) -> int:
    """The number of equal keys at the beginning."""
    size = min(len(a), len(b))
    step, at = 64, 0
    while at < size:
        end = min(size, at + step)
        differs = (a[at:end] != b[at:end]) | (a[at:end] < 0)
        if differs.any():
            return at + int(differs.argmax())
        at, step = end, step * 4
    return size


def _unique_anchors(a: Ints, b: Ints) -> Pairs:
    """The positions of keys that occur once in both, as many as are in the same order."""
    keys_a, at_a, count_a = np.unique(a, return_index=True, return_counts=True)
    keys_b, at_b, count_b = np.unique(b, return_index=True, return_counts=True)
    once_a, once_b = (count_a == 1) & (keys_a >= 0), (count_b == 1) & (keys_b >= 0)
    _, of_a, of_b = np.intersect1d(keys_a[once_a], keys_b[once_b], assume_unique=True, return_indices=True)
    x, y = at_a[once_a][of_a], at_b[once_b][of_b]
    order = np.argsort(x)
    x, y = x[order], y[order]
    # The longest increasing subsequence: of each length, the smallest last value and its position.
    tails: list[int] = []
    tail_at: list[int] = []
    previous: list[int] = []
    for at, value in enumerate(y.tolist()):
        length = bisect_left(tails, value)
        previous.append(tail_at[length - 1] if length else -1)
        tails[length : length + 1] = [value]
        tail_at[length : length + 1] = [at]
    pairs: Pairs = []
    at = tail_at[-1] if tail_at else -1
    while at >= 0:
        pairs.append((int(x[at]), int(y[at])))
        at = previous[at]
    return pairs[::-1]


def _pair_exhaustively(
    first: Sequence[Ints], second: Sequence[Ints], low: int, high: int, start: int, end: int
) -> Pairs:
    """The best pairs of two ranges: the stricter the equal key, the better."""
    same = first[-1][low:high, None] == second[-1][None, start:end]
    score = same.astype(np.int32)
    for level, (a, b) in enumerate(zip(first[:-1], second[:-1], strict=True)):
        strict = (a[low:high, None] == b[None, start:end]) & (a[low:high, None] >= 0)
        score += (strict & same) * np.int32(2 << (len(first) - 2 - level))
    return [(low + x, start + y) for x, y in best_pairs(score)]


def best_pairs(score: NDArray[np.int32]) -> Pairs:
    """The pairs, increasing on both sides, with the largest sum of scores; a score of 0 is no pair.

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
        total = best[x, y]
        if total == best[x - 1, y]:
            x -= 1
        elif total == best[x, y - 1]:
            y -= 1
        else:
            x, y = x - 1, y - 1
            pairs.append((x, y))
    return pairs[::-1]


def _pair_in_windows(
    first: Sequence[Ints], second: Sequence[Ints], low: int, high: int, start: int, end: int
) -> Pairs:
    """Pairs of two long ranges in which everything repeats, a window at a time from the last pair on."""
    pairs: Pairs = []
    while low < high and start < end:
        right, up = min(high, low + _WINDOW), min(end, start + _WINDOW)
        window = _pair_exhaustively(first, second, low, right, start, up)
        last = right == high and up == end
        if not last:  # a position near the edge may have its partner beyond it
            window = window[: max(1, len(window) * 3 // 4)]
        pairs += window
        if last or not window:
            low, start = right, up
        else:
            low, start = window[-1][0] + 1, window[-1][1] + 1
    return pairs


def surplus(items: Iterable[tuple[T, Hashable]], others: Iterable[Hashable]) -> list[T]:
    """The items, each with its key, beyond as many as there are equal keys among ``others``.

    >>> surplus([("a", 1), ("b", 2), ("c", 1)], [1, 3])
    ['b', 'c']
    """
    left = Counter(others)
    rest = []
    for item, key in items:
        left[key] -= 1
        if left[key] < 0:
            rest.append(item)
    return rest
