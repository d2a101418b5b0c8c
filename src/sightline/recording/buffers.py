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

    __slots__ = ("_taken", "_written", "write")

    def __init__(self) -> None:
        self._written = array("q")
        self._taken = 0
        self.write = self._written.fromlist

    def __len__(self) -> int:
        """How many numbers were ever written."""
        return self._taken + len(self._written)

    @property
    def held(self) -> int:
        """How many numbers are here."""
        return len(self._written)

    def numbers(self) -> NDArray[np.int64]:
        """Everything so far. A copy: an array that is being looked at cannot grow."""
        return np.frombuffer(self._written[:], dtype=np.int64)

    def take(self) -> NDArray[np.int64]:
        """Everything here, which is then no longer here. Rows that are written meanwhile stay.

        The array stays the same one: whoever writes holds on to its method.
        """
        taken = self._written[:]
        del self._written[: len(taken)]  # one step, and rows are whole: nobody can write in between
        self._taken += len(taken)
        return np.frombuffer(taken, dtype=np.int64)

    def put_back(self, numbers: NDArray[np.int64]) -> None:
        """Rows that were taken and are to stay, before those that came since."""
        self._written[0:0] = array("q", numbers.tobytes())
        self._taken -= len(numbers)
