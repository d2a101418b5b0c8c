"""Memory that was held, out of what was written when storages were taken, resized and freed."""

from __future__ import annotations

import numpy as np

from sightline.trace.assembly.layout import M_WIDTH
from sightline.trace.assembly.numbers import NONE, Mask, Numbers, joined


class Allocations:
    """Batch by batch: what is freed becomes a row, what is still held waits.

    >>> held = Allocations()
    >>> rows = np.array([0, 64, 10, 1, 32, 11, 0, -1, 15])
    >>> [column.tolist() for column in held.add(rows, values=2, last=False).values()]
    [[0], [64], [10], [15]]
    >>> [column.tolist() for column in held.add(NONE, values=2, last=True).values()]
    [[1], [32], [11], [-1]]
    """

    def __init__(self) -> None:
        self._held = NONE

    def add(self, rows: Numbers, values: int, last: bool) -> dict[str, Numbers]:
        """The columns of what has come to its end; with ``last`` of what has not, too.

        Values from the id ``values`` on are not there yet: the op that makes one is still running. Of a
        process that was killed they never come.
        """
        every, over, after = _paired(joined([self._held, rows]))
        is_size, is_there = every[:, 1] >= 0, every[:, 0] < values
        self._held = NONE if last else every[(is_size & ~over) | ~is_there].reshape(-1)
        wanted = is_there & is_size & (over | last)
        value, nbytes, start = every[wanted].T
        return {"value": value, "nbytes": nbytes, "start": start, "end": np.where(over, after, -1)[wanted]}


def held_after(held: Numbers, rows: Numbers) -> Numbers:
    """What is still held after more was written."""
    every, over, _ = _paired(joined([held, rows]))
    return every[(every[:, 1] >= 0) & ~over].reshape(-1)


def _paired(flat: Numbers) -> tuple[Numbers, Mask, Numbers]:
    """Rows by storage and in order; whether another row follows of the same storage, and its time."""
    rows = flat.reshape(-1, M_WIDTH)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    over = np.zeros(len(rows), dtype=bool)
    after = np.full(len(rows), -1, dtype=np.int64)
    if len(rows):
        over[:-1] = rows[1:, 0] == rows[:-1, 0]
        after[:-1] = rows[1:, 2]
    return rows, over, after
