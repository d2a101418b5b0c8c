"""Where the recorder writes: flat streams of integers, eight bytes a number and no object per row.

A row is written by one ``write([...])``, which is atomic under the GIL, so that it is whole even when
autograd's worker threads write too. The numbers of a row die at once, while they are still in the cache:
gathering many rows in a list and packing them later costs half a microsecond more per row.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray


class Stream:
    """A growing run of integers: rows that begin with their own length."""

    __slots__ = ("_written", "write")

    def __init__(self) -> None:
        self._written = array("q")
        self.write = self._written.fromlist

    def __len__(self) -> int:
        return len(self._written)

    def numbers(self) -> NDArray[np.int64]:
        """Everything so far. A copy: an array that is being looked at cannot grow."""
        return np.frombuffer(self._written[:], dtype=np.int64)

    def rows(self) -> Rows:
        """Everything so far, in order of the rows' ids."""
        return Rows(self.numbers())


class Rows:
    """The rows of a stream: fixed columns, then lists whose lengths stand in fixed columns."""

    def __init__(self, flat: NDArray[np.int64]) -> None:
        self.flat = flat
        starts: list[int] = []
        at, end, lengths = 0, len(flat), flat
        while at < end:
            starts.append(at)
            at += int(lengths[at])
        found = np.array(starts, dtype=np.int64)
        ids = flat[found + 1] if len(found) else found
        # Rows are written when an op ends; ids are given when it begins.
        self.starts = found[np.argsort(ids, kind="stable")]

    def __len__(self) -> int:
        return len(self.starts)

    def column(self, position: int) -> NDArray[np.int64]:
        """A fixed column; 0 is the length of the row, 1 its id."""
        return self.flat[self.starts + position]

    def written(self) -> NDArray[np.int64]:
        """How many rows were written before each: the order in which what they tell of ended."""
        return np.argsort(np.argsort(self.starts, kind="stable"), kind="stable")

    def lists(self, after: NDArray[np.int64] | int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lists that begin ``after`` each row's start, one after the other."""
        total = int(counts.sum())
        ends = np.cumsum(counts)
        within = np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
        return self.flat[np.repeat(self.starts + after, counts) + within]
