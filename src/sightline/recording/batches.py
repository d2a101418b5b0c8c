"""Taking what a session has written so far away from it, batch by batch, while it goes on.

`BatchCutter` runs beside the recording, in a thread of its own. Whatever it takes it takes in steps that are
atomic under the GIL, and in an order in which nothing that is taken refers to what was left. Rows that come
too late for their batch are put apart. What the session no longer needs is forgotten: it does not grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.recording.operations import OPAQUE
from sightline.trace.assembly import layout as row
from sightline.trace.assembly.arrays import EMPTY, IntArray, Rows, concatenate
from sightline.trace.assembly.batch import Batch, ValueUpdate, no_counts, no_floats
from sightline.trace.assembly.layout import NO_END
from sightline.trace.data import F64, CaptureInfo

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

_END = 1 << 62
_REGIONS = 64  # compiled regions that may still turn out to have made a value


class BatchCutter:
    """Cuts a running session into batches."""

    def __init__(self, session: SessionBase) -> None:
        self._session = session
        self._end = 0  # ids of ops and calls before this one are late from now on
        self._values = 0  # and values before this one
        self._made = 0  # the first value whose op has not been taken yet
        self._missing: set[int] = set()  # values that have an id and no row yet
        self._opaque: list[int] = []
        self._told: dict[int, ValueUpdate] = {}
        self._sized: set[int] = set()
        self._captured = 0

    def cut(self, last: bool = False) -> Batch:
        """Everything since the last cut. ``last``: nothing follows."""
        session = self._session
        values = session.values
        opened = (EMPTY, EMPTY) if last else session.open_rows()
        # Rows refer to what was written before them: those that refer to most come first.
        calls, ops = Rows(session.calls.take(), row.C_WIDTH), Rows(session.ops.take(), row.O_WIDTH)
        self.ops, self.calls = ops, calls  #: the rows of the last batch, late ones too
        steps = session.steps[:]
        del session.steps[: len(steps)]
        memory = session.memory.take()
        captures = self._captures()
        floats, counts = self._readings(last)
        living = values.alive()  # what is changed in place after this: the new version's row comes later
        held = Rows(values.stream.take(), row.V_WIDTH)
        fresh = values.fresh.take().reshape(-1, row.FRESH_WIDTH)
        batch = Batch(steps=steps, captures=captures, memory=memory)
        if last:
            batch.device = session.device_work.rows
        before = self._values
        self._split(batch, ops, calls, held, fresh, floats, counts)
        if last:
            batch.end = _END
            batch.absent = np.union1d(batch.absent, sorted(self._missing)).astype(np.int64)
        else:  # what was opened since is also open, as far as it refers to what was taken
            opened = self._both(opened, session.open_rows())
        batch.open_ops, batch.open_calls = opened
        alive = self._alive(living, *opened)
        batch.alive = alive
        sizes = self._sizes(alive).reshape(-1, 2)
        batch.nbytes = sizes[sizes[:, 0] >= before].reshape(-1)
        batch.late_nbytes = sizes[sizes[:, 0] < before].reshape(-1)
        batch.updates = self._learned(alive)
        del session.regions[:-1]
        return batch

    def _both(
        self, before: tuple[IntArray, IntArray], after: tuple[IntArray, IntArray]
    ) -> tuple[IntArray, IntArray]:
        found = []
        layouts = ((row.O_WIDTH, row.O_INPUTS), (row.C_WIDTH, row.C_INPUTS))
        for (width, inputs), old, new in zip(layouts, before, after, strict=True):
            known, rows = Rows(old, width), Rows(new, width)
            counts = rows.column(inputs)
            owners = np.repeat(np.arange(len(rows)), counts)
            unknown = np.zeros(len(rows), dtype=bool)
            unknown[owners[rows.lists(width, counts) >= self._made]] = True
            found.append(concatenate([old, rows.select_stream(~np.isin(rows.ids, known.ids) & ~unknown)]))
        return found[0], found[1]

    # -- what was written --------------------------------------------------------------------------------

    def _split(
        self, batch: Batch, ops: Rows, calls: Rows, held: Rows, fresh: IntArray, floats: F64, counts: IntArray
    ) -> None:
        """Rows that belong to this batch, and those that are late."""
        now, late = batch.rows, batch.late
        for rows, name in ((ops, "ops"), (calls, "calls")):
            is_late = rows.ids < self._end
            setattr(now, name, rows.select_stream(~is_late) if is_late.any() else rows.flat)
            setattr(late, name, rows.select_stream(is_late))
        ends = calls.column(row.C_END)
        seen = [ops.ids, calls.ids, ends[ends < NO_END]]
        batch.outputs = self._late_outputs(held, fresh)
        self._note_opaque(ops)
        self._end = max([self._end, *(int(ids.max()) + 1 for ids in seen if len(ids))])
        batch.end = self._end
        ids = np.concatenate([held.ids, fresh[:, 0]])
        is_late = held.ids < self._values
        now.values = held.select_stream(~is_late) if is_late.any() else held.flat
        late.values = held.select_stream(is_late)
        is_late = fresh[:, 0] < self._values
        now.fresh, late.fresh = fresh[~is_late].reshape(-1), fresh[is_late].reshape(-1)
        is_late = counts[:, 0] < self._values
        now.floats, now.counts = floats[~is_late], counts[~is_late]
        late.floats, late.counts = floats[is_late], counts[is_late]
        batch.absent = self._absent(ids)
        makers = np.concatenate([held.column(row.V_PRODUCER), fresh[:, 2]])
        self._made = min([self._values, *ids[makers >= self._end].tolist()])

    def _absent(self, ids: IntArray) -> IntArray:
        """Values that were missing in the last batch and are so in this one: they never will come."""
        lost = self._missing.difference(ids.tolist())
        end = max(self._values, int(ids.max()) + 1 if len(ids) else 0)
        there = np.zeros(end - self._values, dtype=bool)
        there[ids[ids >= self._values] - self._values] = True
        self._missing = set((np.flatnonzero(~there) + self._values).tolist())
        self._values = end
        return np.array(sorted(lost), dtype=np.int64)

    def _note_opaque(self, ops: Rows) -> None:
        infos = self._session.infos
        opaque = np.array([info.flavour == OPAQUE for info in infos] or [False])
        if opaque.any():
            found = ops.ids[opaque[ops.column(row.O_INFO)]].tolist()
            self._opaque = [*self._opaque, *found][-_REGIONS:]

    def _late_outputs(self, held: Rows, fresh: IntArray) -> IntArray:
        """Values that turn out to come from an opaque op of an earlier batch."""
        if not self._opaque:
            return EMPTY
        values = np.concatenate([held.ids, fresh[:, 0]])
        makers = np.concatenate([held.column(row.V_PRODUCER), fresh[:, 2]])
        mine = np.isin(makers, self._opaque)
        return np.stack([makers[mine], values[mine]], axis=1).reshape(-1)

    def _captures(self) -> list[CaptureInfo]:
        captures = self._session.captures
        if captures is None:
            return []
        new: list[CaptureInfo] = captures.infos[self._captured :]
        self._captured += len(new)
        return new

    def _readings(self, last: bool) -> tuple[F64, IntArray]:
        """Statistics that were taken; those of a device come at the end."""
        taker: Any = self._session.readings
        if taker is None:
            return no_floats(), no_counts()
        taken: tuple[F64, IntArray] = taker.take(last)
        return taken

    # -- what became known -------------------------------------------------------------------------------

    def _alive(self, living: IntArray, ops: IntArray, calls: IntArray) -> IntArray:
        """Values that may still be referred to: of living tensors, and of what is open.

        ``living`` were so before rows were taken. A tensor that was changed since has a new version, whose
        row will refer to the old one.
        """
        opened, called = Rows(ops, row.O_WIDTH), Rows(calls, row.C_WIDTH)
        return np.unique(np.concatenate([
            living, self._session.values.alive(), opened.lists(row.O_WIDTH, opened.column(row.O_INPUTS)),
            called.lists(row.C_WIDTH, called.column(row.C_INPUTS)),
        ]))  # fmt: skip

    def _sizes(self, alive: IntArray) -> IntArray:
        """Sizes of storages that were not made in the block; each is told once."""
        held = self._session.values.storage_bytes
        new = {value: size for value, size in dict(held).items() if value not in self._sized}
        self._sized.update(new)
        living = set(alive.tolist())
        for value in [value for value in self._sized if value not in living and value < self._values]:
            held.pop(value, None)
            self._sized.discard(value)
        return np.array([part for pair in new.items() for part in pair], dtype=np.int64)

    def _learned(self, alive: IntArray) -> list[ValueUpdate]:
        """Kinds and names that became known since."""
        values = self._session.values
        kinds, names = dict(values.kinds), dict(values.names)
        if len(kinds) + len(names) == 0:
            return []
        new = []
        for value in {**kinds, **names}:
            known = ValueUpdate(value, kinds.get(value, -1), names.get(value, ""))
            if self._told.get(value) != known:
                self._told[value] = known
                new.append(known)
        living = set(alive.tolist())
        for value in [value for value in self._told if value not in living and value < self._values]:
            values.kinds.pop(value, None)
            values.names.pop(value, None)
            del self._told[value]
        return new
