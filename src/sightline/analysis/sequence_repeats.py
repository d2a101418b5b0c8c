"""Repeats in a sequence: a loop that ran 24 times becomes its body once, and the number 24.

`fold` finds consecutive repeats of any period, the ones that save most first, and then folds each body
again, so that nested loops come out nested. `unfold` is its inverse. The search is exact (ranks of all
windows of length 2^k, no hashing) and takes about n·log²n steps, done by numpy.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A body that ran ``count`` times in a row; its leaves are positions in its first run."""

    body: tuple[Node, ...]
    count: int


#: A position in the sequence, or a repeat of what starts there.
Node = int | Repeat


#: Takes a position and a period, and returns the offset at which a body should begin: 0 up to the period.
Start = Callable[[int, int], int]


def fold(keys: Sequence[Hashable], start: Start | None = None) -> list[Node]:
    """The sequence with its consecutive repeats folded.

    >>> fold("xababab")
    [0, Repeat(body=(1, 2), count=3)]

    A repeat has several bodies to choose from, ``ba`` as well as ``ab``. The first one is taken, or the one
    that ``start(position, period)`` prefers where there are two runs of it.

    >>> fold("xabababa", start=lambda position, period: 1)
    [0, 1, Repeat(body=(2, 3), count=3)]
    """
    numbers: dict[Hashable, int] = {}
    coded = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    return _fold_part(coded, 0, start or (lambda _position, _period: 0))


def first_of(node: Node) -> int:
    """The position at which a node begins.

    >>> [first_of(node) for node in fold("xababab")]
    [0, 1]
    """
    while isinstance(node, Repeat):
        node = node.body[0]
    return node


def length_of(node: Node) -> int:
    """How many positions of the sequence a node stands for.

    >>> [length_of(node) for node in fold("xababab")]
    [1, 6]
    """
    return node.count * sum(map(length_of, node.body)) if isinstance(node, Repeat) else 1


def _fold_part(keys: Ints, base: int, prefer: Start) -> list[Node]:
    """Fold ``keys``, whose first element has the position ``base`` in the whole sequence."""
    if len(set(keys.tolist())) == len(keys):
        return list(range(base, base + len(keys)))
    nodes: list[Node] = []
    at = 0
    for start, period, count in _best_runs(_runs(keys), lambda first, period: prefer(base + first, period)):
        nodes += range(base + at, base + start)
        body = _fold_part(keys[start : start + period], base + start, prefer)
        nodes.append(Repeat(tuple(body), count))
        at = start + period * count
    nodes += range(base + at, base + len(keys))
    return nodes


def _best_runs(runs: list[tuple[int, int, int]], prefer: Start) -> list[tuple[int, int, int]]:
    """Of overlapping runs (start, end, period) those that save most, as (start, period, count) in order.

    If a better run has taken a part of one, the rest of it is tried again.
    """
    heap = [(-_saving(*run), *run) for run in runs]
    heapq.heapify(heap)
    taken: list[tuple[int, int, int]] = []  # (start, end, period), apart from each other, sorted
    while heap:
        _, start, end, period = heapq.heappop(heap)
        pieces = _free(taken, start, end)
        if pieces == [(start, end)]:
            later = prefer(start, period)
            start += later if end - start - later >= 2 * period else 0
            insort(taken, (start, start + (end - start) // period * period, period))
            continue
        for left, right in pieces:
            if right - left >= 2 * period:
                heapq.heappush(heap, (-_saving(left, right, period), left, right, period))
    return [(start, period, (end - start) // period) for start, end, period in taken]


def _free(taken: list[tuple[int, int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of [start, end) that no taken run covers."""
    index = bisect_left(taken, (start, 0, 0))
    if index and taken[index - 1][1] > start:
        index -= 1
    pieces: list[tuple[int, int]] = []
    at = start
    while index < len(taken) and taken[index][0] < end:
        if taken[index][0] > at:
            pieces.append((at, taken[index][0]))
        at = max(at, taken[index][1])
        index += 1
    if at < end:
        pieces.append((at, end))
    return pieces


def _saving(start: int, end: int, period: int) -> int:
    return ((end - start) // period - 1) * period


def _runs(keys: Ints) -> list[tuple[int, int, int]]:
    """Every maximal run (start, end, period) in which each key equals the one a period before.

    A run of at least two periods contains a multiple j of its period with keys[j] == keys[j + period], so
    only these pairs, about n·ln n, are examined and then extended to both sides. Periods are taken in blocks
    from short to long: inside a long run of period 3, period 6 is skipped.
    """
    n = len(keys)
    ranks = _ranks(keys)
    runs: list[tuple[int, int, int]] = []
    known_end, known_period = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    low = 1
    while low <= n // 2:
        first, period = _pairs(keys, low, min(2 * low, n // 2 + 1))
        new = (known_end[first] <= first + period) | (period % known_period[first] != 0)
        for start, end, size in _extend(ranks, first[new], period[new], n):
            runs.append((start, end, size))
            if end - start >= 4 * size:  # long enough to be a run of twice the period, too
                known_end[start:end], known_period[start:end] = end, size
        low *= 2
    return runs


def _extend(ranks: list[Ints], first: Ints, period: Ints, n: int) -> list[tuple[int, int, int]]:
    """The runs that pass through the given pairs and are at least two periods long."""
    ahead = _common(ranks, first, first + period, n)
    behind = _common(ranks, first, first + period, n, before=True)
    long = ahead + behind >= period
    start, end, period = (first - behind)[long], (first + period + ahead)[long], period[long]
    _, unique = np.unique(period * n + start, return_index=True)
    return list(zip(start[unique].tolist(), end[unique].tolist(), period[unique].tolist(), strict=True))


def _pairs(keys: Ints, low: int, high: int) -> tuple[Ints, Ints]:
    """The pairs (j, p) with low <= p < high, j a multiple of p, and keys[j] == keys[j + p]."""
    n = len(keys)
    periods = np.arange(low, high, dtype=np.int64)
    counts = (n - 1) // periods  # j = 0, p, … with j + p < n
    period = np.repeat(periods, counts)
    starts = np.cumsum(counts) - counts
    first = (np.arange(len(period), dtype=np.int64) - np.repeat(starts, counts)) * period
    same = keys[first] == keys[first + period]
    return first[same], period[same]


def _ranks(keys: Ints) -> list[Ints]:
    """For each k a number per position, equal where the 2^k keys from there on are equal."""
    ranks = [keys]
    length = 1
    while 4 * length <= len(keys):
        last = ranks[-1]
        pairs = last[:-length] * (int(last.max()) + 1) + last[length:]
        names, rank = np.unique(pairs, return_inverse=True)
        if len(names) == len(pairs):
            break
        ranks.append(rank.astype(np.int64))
        length *= 2
    return ranks


def _common(ranks: list[Ints], a: Ints, b: Ints, n: int, *, before: bool = False) -> Ints:
    """How many keys from ``a`` and from ``b`` (> a) on are equal; or how many just before them."""
    total = np.zeros(len(a), dtype=np.int64)
    for k in range(len(ranks) - 1, -1, -1):
        rank, length = ranks[k], 1 << k
        again = k == len(ranks) - 1  # beyond the longest rank kept, step by it as often as it matches
        active = np.arange(len(a))
        while len(active):
            shift = -total[active] - length if before else total[active]
            at, to = a[active] + shift, b[active] + shift
            fits = (at >= 0) & (to + length <= n)
            fits[fits] = rank[at[fits]] == rank[to[fits]]
            active = active[fits]
            total[active] += length
            if not again:
                break
    return total
