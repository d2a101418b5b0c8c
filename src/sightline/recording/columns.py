"""Small things the build shares: dense ids, offsets, narrow columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sightline.trace import data as d

Numbers = NDArray[np.int64]


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


def dense(ids: Numbers, wanted: Numbers) -> Numbers:
    """Positions of ids in a sorted list of ids; -1 for what is not there."""
    if not len(ids):
        return np.full(len(wanted), -1, dtype=np.int64)
    at = np.searchsorted(ids, wanted)
    at[at == len(ids)] = 0
    return np.where(ids[at] == wanted, at, -1)


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
