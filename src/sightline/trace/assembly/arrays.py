"""Small things the assembly shares: rows of a stream, dense ids, offsets, narrow columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sightline.trace import data as d

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
NONE: Numbers = np.zeros(0, dtype=np.int64)


class Names:
    """Strings, each stored once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._ids: dict[str, int] = {}

    def id(self, name: str) -> int:
        """The number of a string; a new one if it has none."""
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = len(self.all)
            self.all.append(name)
        return found


class Rows:
    """The rows of a stream in order of their ids: fixed columns, then lists whose lengths stand in them.

    >>> rows = Rows(np.array([3, 8, 50, 3, 5, 70]), 3)
    >>> rows.ids.tolist(), rows.column(2).tolist()
    ([5, 8], [70, 50])
    """

    def __init__(self, flat: Numbers, width: int) -> None:
        self.flat = flat
        self.width = width
        if not len(flat) % width and (flat[::width] == width).all():  # no row has a list behind its columns
            found = np.arange(0, len(flat), width)
            self.starts = found[np.argsort(flat[found + 1], kind="stable")] if len(found) else found
            return
        starts: list[int] = []
        at, end, lengths = 0, len(flat), flat.data
        while at < end:
            starts.append(at)
            length = lengths[at]
            if length < width:
                raise ValueError("a row is shorter than its columns")
            at += length
        if at != end:
            raise ValueError("a row goes on after the end")
        found = np.array(starts, dtype=np.int64)
        # Rows are written when what they tell of ends; ids are given when it begins.
        ids = flat[found + 1] if len(found) else found
        self.starts = found[np.argsort(ids, kind="stable")]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def ids(self) -> Numbers:
        return self.column(1)

    def column(self, position: int) -> Numbers:
        """A fixed column; 0 is the length of the row, 1 its id."""
        return self.flat[self.starts + position]

    def lists(self, after: Numbers | int, counts: Numbers) -> Numbers:
        """The lists that begin ``after`` each row's start, one after the other."""
        return self.flat[spread(self.starts + after, counts)]

    def picked(self, mask: Mask) -> Rows:
        """Some of the rows, where they are."""
        found = Rows(NONE, self.width)
        found.flat, found.starts = self.flat, self.starts[mask]
        return found

    def taken(self, mask: Mask) -> Numbers:
        """Some of the rows, as a stream again, in order of their ids."""
        starts = self.starts[mask]
        return self.flat[spread(starts, self.flat[starts])]


def spread(starts: Numbers, counts: Numbers) -> Numbers:
    """Every position of ranges that begin at ``starts``, one range after the other.

    >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    found: Numbers = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return found


def joined(parts: list[Numbers]) -> Numbers:
    """Streams one after the other."""
    held = [part for part in parts if len(part)]
    if not held:
        return NONE
    return held[0] if len(held) == 1 else np.concatenate(held)


def dense(ids: Numbers, wanted: Numbers) -> Numbers:
    """Positions of ids in a sorted list of ids; -1 for what is not there."""
    if not len(ids):
        return np.full(len(wanted), -1, dtype=np.int64)
    at = np.searchsorted(ids, wanted)
    at[at == len(ids)] = 0
    return np.where(ids[at] == wanted, at, -1)


def chain_ends(before: Numbers) -> Numbers:
    """Where the chain that begins at each row ends, following positions of earlier rows; -1 refers to none.

    >>> chain_ends(np.array([-1, 0, 1, -1, 3])).tolist()
    [0, 0, 0, 3, 3]
    """
    found = np.where(before >= 0, before, np.arange(len(before)))
    while True:
        further = found[found]  # twice as far each time: a weight has a version for every step
        if (further == found).all():
            return found
        found = further


def offsets_of(counts: Numbers) -> Numbers:
    """Where each of so many items begins, and the end of the last."""
    made = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=made[1:])
    return made


def i32(column: Numbers) -> d.I32:
    """A column of ids."""
    return column.astype(np.int32)


def i8(column: Numbers) -> d.I8:
    """A column of small numbers."""
    return column.astype(np.int8)
