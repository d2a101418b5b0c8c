"""Array functions the assembly shares: rows of a stream, positions of ids, offsets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sightline.schema.columns import Columns
from sightline.schema.streams import RowLayout

IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]
EMPTY: IntArray = np.zeros(0, dtype=np.int64)


class Names:
    """Strings, each stored once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._ids: dict[str, int] = {}

    def id(self, name: str) -> int:
        """The id of a string; a new string gets the next one."""
        id = self._ids.get(name)
        if id is None:
            id = self._ids[name] = len(self.all)
            self.all.append(name)
        return id


class Rows:
    """The rows of a stream in order of their ids: fixed columns, then lists whose lengths are among them.

    >>> from sightline.schema.streams import Field, RowLayout
    >>> rows = Rows(np.array([3, 8, 50, 3, 5, 70]), RowLayout("size", (Field("size", ""),), lists=False))
    >>> rows.ids.tolist(), rows.column("size").tolist()
    ([5, 8], [70, 50])
    """

    def __init__(self, flat: IntArray, layout: RowLayout) -> None:
        self.flat = flat
        self.layout = layout
        width = layout.width
        if not len(flat) % width and (flat[::width] == width).all():  # no row has a list behind its columns
            self._sort(np.arange(0, len(flat), width))
            return
        starts: list[int] = []
        at, end, lengths, add = 0, len(flat), flat.data, starts.append
        while at < end:
            add(at)
            length = lengths[at]
            if length < width:
                raise ValueError("a row is shorter than its columns")
            at += length
        if at != end:
            raise ValueError("a row goes on after the end")
        self._sort(np.array(starts, dtype=np.int64))

    def _sort(self, starts: IntArray) -> None:
        # A row is written when its op or call ends; its id is assigned when that begins.
        self.starts = starts[np.argsort(self.flat[starts + 1], kind="stable")] if len(starts) else starts

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def ids(self) -> IntArray:
        return self.column("id")

    def column(self, name: str) -> IntArray:
        """A field of every row, or its ``length`` or ``id``."""
        return self.flat[self.starts + self.layout.position(name)]

    def recorded(self, columns: type[Columns]) -> dict[str, IntArray]:
        """The columns of a table that an engine writes as they are."""
        return {one.name: self.column(one.name) for one in columns.declared.values() if one.meaning.recorded}

    def lists(self, after: IntArray | int, counts: IntArray) -> IntArray:
        """The lists that begin ``after`` each row's start, concatenated."""
        return self.flat[expand_ranges(self.starts + after, counts)]

    def select(self, mask: Mask) -> Rows:
        """Some of the rows, over the same array."""
        selected = Rows(EMPTY, self.layout)
        selected.flat, selected.starts = self.flat, self.starts[mask]
        return selected

    def select_stream(self, mask: Mask) -> IntArray:
        """Some of the rows, copied to a stream of their own, in order of their ids."""
        starts = self.starts[mask]
        return self.flat[expand_ranges(starts, self.flat[starts])]


def expand_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Every position of the ranges that begin at ``starts``, concatenated.

    >>> expand_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    positions: IntArray = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return positions


def concatenate(parts: list[IntArray]) -> IntArray:
    """Streams as one; a single one that is not empty is not copied."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return EMPTY
    return filled[0] if len(filled) == 1 else np.concatenate(filled)


def positions_in(sorted_ids: IntArray, ids: IntArray) -> IntArray:
    """The position of each id in a sorted array; -1 where it is missing."""
    if not len(sorted_ids):
        return np.full(len(ids), -1, dtype=np.int64)
    at = np.searchsorted(sorted_ids, ids)
    at[at == len(sorted_ids)] = 0
    return np.where(sorted_ids[at] == ids, at, -1)


def chain_ends(before: IntArray) -> IntArray:
    """The row where the chain of each row ends, following ``before`` to earlier rows; -1 ends a chain.

    >>> chain_ends(np.array([-1, 0, 1, -1, 3])).tolist()
    [0, 0, 0, 3, 3]
    """
    ends = np.where(before >= 0, before, np.arange(len(before)))
    while True:
        further = ends[ends]  # twice as far each time: a weight has a version for every step
        if (further == ends).all():
            return ends
        ends = further


def offsets_of(counts: IntArray) -> IntArray:
    """The start of each list in a flat array, and the end of the last, from the lists' lengths."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
