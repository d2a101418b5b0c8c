"""``last=N``: the frames of a journal that the last N ops need, kept in memory while older ones are dropped.

Whole frames are kept; `assemble.last_ops` makes the exact cut when the trace is built.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from sightline.assemble.batch import Batch, StepMark, Streams, Tables, ValueUpdate
from sightline.assemble.calls import matching_begin
from sightline.assemble.last_ops import Dropped, reusable_values
from sightline.assemble.values import open_allocations
from sightline.data.arrays import EMPTY, IntArray
from sightline.store.journal import Journal, constant_fields, encode, new_table_rows


class KeptFrame(NamedTuple):
    """A frame, and the rows that are needed once it is the first that is kept."""

    data: bytes
    ops: int  #: how many ops belong to it
    lost: Dropped  #: the loss with it: its ops, and late ones, which belong to earlier batches
    before: bytes  #: a frame of the rows that its own may refer to


class LastFrames:
    """The frames of the last ``count`` ops."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.dropped = Dropped()
        self._frames: deque[KeptFrame] = deque()
        # Rows of the next frame may refer to: values that may be used again, live storages, names and
        # kinds that became known, open steps.
        self._values: IntArray = EMPTY
        self._memory: IntArray = EMPTY
        self._updates: dict[int, ValueUpdate] = {}
        self._steps: list[StepMark] = []

    @property
    def size(self) -> int:
        """Bytes of the frames that are kept."""
        return sum(len(frame.data) for frame in self._frames)

    @property
    def ops(self) -> int:
        """How many ops are kept: the last ones, and those that share a frame with them."""
        return sum(frame.ops for frame in self._frames)

    def add(self, data: bytes, batch: Batch, ops: int, lost: Dropped) -> int:
        """Add the frame of a batch, and drop those that hold only older ops; returns their bytes."""
        before = Batch(
            rows=Streams(values=self._values), memory=self._memory, updates=list(self._updates.values()),
            steps=list(self._steps),
        )  # fmt: skip
        self._frames.append(KeptFrame(data, ops, lost, encode(before, {}, {})))
        self._memory = open_allocations(self._memory, batch.memory)
        self._values = reusable_values(self._values, batch, self._updates)
        for mark in batch.steps:
            if mark.begins:
                self._steps.append(mark)
            elif (at := matching_begin(self._steps, mark)) >= 0:
                self._steps.pop(at)
        kept, dropped_bytes = self.ops, 0
        while len(self._frames) > 1 and kept - self._frames[0].ops >= self.count:
            first = self._frames.popleft()
            kept -= first.ops
            self.dropped += first.lost
            dropped_bytes += len(first.data)
        return dropped_bytes

    def journal_frames(self, tables: Tables, operators: list[Any], flops: list[Any]) -> list[bytes]:
        """The frames of a journal that has only these, after one with all tables so far."""
        first = Journal(None, [self._frames[0].before]).batch(0)
        rows = new_table_rows(tables, {}, operators, flops)
        start = encode(first, rows, tables.info, {"first": constant_fields(tables)})
        return [start, *(_without_tables(frame.data, tables.info) for frame in self._frames)]

    def clear(self) -> None:
        """Free them: the recording is finished."""
        self._frames.clear()


def _without_tables(frame: bytes, info: dict[str, Any]) -> bytes:
    """A frame without its additions to the tables, which an earlier frame has, and with newer info."""
    journal = Journal(None, [frame])
    head = journal.heads()[0]
    more = {"sources": head["sources"]} if "sources" in head else {}
    return encode(journal.batch(0), {}, info, more)
