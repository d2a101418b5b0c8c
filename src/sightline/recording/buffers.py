"""Where the recorder writes: flat streams of integers, packed every few thousand numbers.

``stream.tail += row`` is the cheapest write Python has, and atomic under the GIL, so that a row is whole
even when autograd's worker threads write too. Packing leaves 8 bytes a number and no object per row for
the garbage collector.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: A tail longer than this is packed.
PACK_AT: Final = 1 << 12


class Stream:
    """A growing run of integers: rows that begin with their own length."""

    __slots__ = ("packed", "tail")

    def __init__(self) -> None:
        self.tail: list[int] = []
        self.packed = array("q")

    def pack(self) -> None:
        """Move the tail into the packed part; what is appended meanwhile stays in the tail."""
        chunk = self.tail[:]
        self.packed.fromlist(chunk)
        del self.tail[: len(chunk)]

    def rows(self) -> Rows:
        """Everything so far, in order of the rows' ids."""
        self.pack()
        return Rows(np.array(self.packed, dtype=np.int64))


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

    def lists(self, after: NDArray[np.int64] | int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lists that begin ``after`` each row's start, one after the other."""
        total = int(counts.sum())
        ends = np.cumsum(counts)
        within = np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
        return self.flat[np.repeat(self.starts + after, counts) + within]
