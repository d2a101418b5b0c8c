"""Groups of rows that are equal in some columns.

In a long run few distinct ops run very often: a view describes an op once for each group of equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.data.trace_data import I64

_MAX_KEY: Final = 1 << 62


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
    _, first, of = np.unique(_row_keys(columns, len(columns[0])), return_index=True, return_inverse=True)
    order = np.argsort(first)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return RowGroups(ranks[of], first[order])


def flat_positions(offsets: I64, rows: I64) -> tuple[I64, I64]:
    """The positions of the lists of some rows in the flat column they share, and the length of each list.

    >>> positions, lengths = flat_positions(np.array([0, 2, 2, 5]), np.array([2, 0]))
    >>> positions.tolist(), lengths.tolist()
    ([2, 3, 4, 0, 1], [3, 2])
    """
    lengths = offsets[rows + 1] - offsets[rows]
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) + np.repeat(offsets[rows] - (ends - lengths), lengths), lengths


def list_keys(items: Any, lengths: I64) -> I64:
    """A key for each list, the same for equal lists; ``items`` are those of all lists, one after another.

    >>> list_keys(np.array([5, 6, 5, 6, 5]), np.array([2, 2, 0, 1])).tolist()
    [2, 2, 0, 1]
    """
    starts = np.cumsum(lengths) - lengths
    keys = np.zeros(len(lengths), dtype=np.int64)
    used = 0
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        columns = (items[starts[rows] + at] for at in range(length))
        _, ranks = np.unique(_row_keys(columns, len(rows)), return_inverse=True)
        keys[rows] = used + ranks
        used += int(ranks.max()) + 1
    return keys


def _row_keys(columns: Iterable[Any], rows: int) -> I64:
    """A key for each row, the same for rows that are equal in all columns."""
    keys = np.zeros(rows, dtype=np.int64)
    size = 1  # all keys are below it
    for column in columns if rows else ():
        low = int(column.min())
        width = int(column.max()) - low + 1
        if size * width > _MAX_KEY:  # close the gaps between the keys
            distinct, keys = np.unique(keys, return_inverse=True)
            size = len(distinct)
        keys = keys * width + (column.astype(np.int64) - low)
        size *= width
    return keys
