"""Rows that are the same in some columns. In a long run few distinct ops run very often: a view that works
out what an op looks like does so once for each group of equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.trace.data import I64

_MOST: Final = 1 << 62  #: numbers of rows stay below this


class RowGroups(NamedTuple):
    """Which group each row is in, and the first row of each; groups are in the order of their first rows."""

    of: I64
    first: I64


def group_rows(*columns: Any) -> RowGroups:
    """The groups of rows that are equal in all columns.

    >>> groups = group_rows(np.array([7, 7, 3, 7]), np.array([0, 1, 0, 0]))
    >>> groups.of.tolist(), groups.first.tolist()
    ([0, 1, 2, 0], [0, 1, 2])
    """
    _, first, of = np.unique(_numbers(columns, len(columns[0])), return_index=True, return_inverse=True)
    order = np.argsort(first)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return RowGroups(ranks[of], first[order])


def list_places(offsets: I64, rows: I64) -> tuple[I64, I64]:
    """Where the lists of some rows stand in the flat column they share, and how long each of them is.

    >>> places, lengths = list_places(np.array([0, 2, 2, 5]), np.array([2, 0]))
    >>> places.tolist(), lengths.tolist()
    ([2, 3, 4, 0, 1], [3, 2])
    """
    lengths = offsets[rows + 1] - offsets[rows]
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) + np.repeat(offsets[rows] - (ends - lengths), lengths), lengths


def list_numbers(items: Any, lengths: I64) -> I64:
    """A number for each of some lists, equal for lists that are; ``items`` has those of all, one after other.

    >>> list_numbers(np.array([5, 6, 5, 6, 5]), np.array([2, 2, 0, 1])).tolist()
    [2, 2, 0, 1]
    """
    starts = np.cumsum(lengths) - lengths
    numbers = np.zeros(len(lengths), dtype=np.int64)
    used = 0
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        columns = (items[starts[rows] + at] for at in range(length))
        _, found = np.unique(_numbers(columns, len(rows)), return_inverse=True)
        numbers[rows] = used + found
        used += int(found.max()) + 1
    return numbers


def _numbers(columns: Iterable[Any], rows: int) -> I64:
    """A number for each row, equal where all columns are."""
    numbers = np.zeros(rows, dtype=np.int64)
    size = 1  # all numbers are below it
    for column in columns if rows else ():
        low = int(column.min())
        width = int(column.max()) - low + 1
        if size * width > _MOST:
            known, numbers = np.unique(numbers, return_inverse=True)
            size = len(known)
        numbers = numbers * width + (column.astype(np.int64) - low)
        size *= width
    return numbers
