"""The rows of a session as batches: all of them at once, or cut off piece by piece while it runs.

`BatchCutter` runs in a thread beside the recording. It removes rows from the session in steps that are
atomic under the GIL, and in an order in which no row that is taken refers to one that was left. Rows that
come too late for their batch are marked as late. Names and sizes that the session no longer needs are removed
from it, so it does not grow.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.assemble.batch import Batch, Streams, Tables, ValueUpdate, no_counts, no_floats
from sightline.data.arrays import EMPTY, IntArray, Rows, concatenate, offsets_of, positions_in
from sightline.recording.flops import has_plain_formula
from sightline.recording.operations import OP, OPAQUE
from sightline.schema import streams
from sightline.schema.streams import NO_END

if TYPE_CHECKING:
    from sightline.recording.session import RowStream, Session

_END = 1 << 62
_REGIONS = 64  # compiled regions that may still turn out to have made a value


def whole_batch(session: Session) -> Batch:
    """Everything that a session has written, as one batch. The session keeps it."""
    batch = _read(session)
    batch.nbytes = _pairs(dict(session.values.storage_bytes))
    batch.updates = _learned(session)
    batch.absent = missing_values(batch.rows)
    return batch


def missing_values(rows: Streams, first: int = 0) -> IntArray:
    """Values from ``first`` on that have a number and no row: an interrupt may come in between."""
    ids = _value_ids(rows)
    present = np.zeros(max(int(ids.max(initial=-1)) + 1 - first, 0), dtype=bool)
    present[ids[ids >= first] - first] = True
    return np.flatnonzero(~present) + first


def _read(session: Session, take: bool = False, last: bool = True, first_capture: int = 0) -> Batch:
    """The rows of a session; with ``take`` they are removed from it. ``last``: nothing follows.

    Rows refer to earlier ones, so the streams that refer to most are read first.
    """

    def rows(stream: RowStream) -> IntArray:
        return stream.take() if take else stream.numbers()

    values, source = session.values, session.statistics_source
    open_ops, open_calls = (EMPTY, EMPTY) if take and last else session.open_rows()
    calls, ops = rows(session.calls), rows(session.ops)
    steps = session.steps[:]
    if take:
        del session.steps[: len(steps)]
    memory = rows(session.memory)
    captures = [] if session.captures is None else session.captures.infos[first_capture:]
    floats, counts = no_floats(), no_counts()
    if source is not None:
        floats, counts = source.take(last) if take else source.columns()
    # Before the values: the row of a version that is made in place after this comes in a later batch.
    alive = values.alive() if take else None
    return Batch(
        rows=Streams(ops, calls, rows(values.stream), rows(values.fresh), floats, counts), memory=memory,
        device=session.device_work.rows if last else EMPTY, steps=steps, captures=captures, alive=alive,
        open_ops=open_ops, open_calls=open_calls,
    )  # fmt: skip


def _learned(session: Session) -> list[ValueUpdate]:
    """Kinds and names of values that became known after their rows were written."""
    kinds, names = dict(session.values.kinds), dict(session.values.names)
    return [ValueUpdate(value, kinds.get(value, -1), names.get(value, "")) for value in {**kinds, **names}]


def _pairs(numbers: dict[int, int]) -> IntArray:
    return np.fromiter(chain.from_iterable(numbers.items()), dtype=np.int64)


def _value_ids(rows: Streams) -> IntArray:
    fresh = rows.fresh.reshape(-1, streams.FRESH_WIDTH)
    return np.concatenate([Rows(rows.values, streams.VALUE).ids, fresh[:, 0]])


class BatchCutter:
    """Cuts the rows of a running session into batches."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._end = 0  # ops and calls with ids below this are late from now on
        self._values = 0  # and values with ids below this
        self._complete = 0  # the ops of all values below this have been taken
        self._missing: set[int] = set()  # values that have an id and no row yet
        self._opaque: list[int] = []
        self._sent: dict[int, ValueUpdate] = {}
        self._sized: set[int] = set()
        self._captured = 0

    def cut(self, last: bool = False) -> Batch:
        """Everything since the last cut. ``last``: nothing follows."""
        session = self._session
        batch = _read(session, take=True, last=last, first_capture=self._captured)
        self._captured += len(batch.captures)
        #: the rows of the last batch, late ones too
        self.ops, self.calls = Rows(batch.rows.ops, streams.OP), Rows(batch.rows.calls, streams.CALL)
        opened = batch.open_ops, batch.open_calls
        first_value = self._values
        self._split(batch)
        if last:
            batch.end = _END
            batch.absent = np.union1d(batch.absent, sorted(self._missing)).astype(np.int64)
        else:  # rows that were opened since are open too, if they refer only to rows that were taken
            opened = self._merge_open(opened, session.open_rows())
        batch.open_ops, batch.open_calls = opened
        batch.alive = self._alive(batch)
        sizes = self._new_sizes(batch.alive).reshape(-1, 2)
        batch.nbytes = sizes[sizes[:, 0] >= first_value].reshape(-1)
        batch.late_nbytes = sizes[sizes[:, 0] < first_value].reshape(-1)
        batch.updates = self._new_learned(batch.alive)
        del session.regions[:-1]
        return batch

    def _merge_open(
        self, before: tuple[IntArray, IntArray], after: tuple[IntArray, IntArray]
    ) -> tuple[IntArray, IntArray]:
        merged = []
        for layout, old, new in zip((streams.OP, streams.CALL), before, after, strict=True):
            old_rows, rows = Rows(old, layout), Rows(new, layout)
            counts = rows.column("input_count")
            owners = np.repeat(np.arange(len(rows)), counts)
            incomplete = np.zeros(len(rows), dtype=bool)
            incomplete[owners[rows.lists(layout.width, counts) >= self._complete]] = True
            new_rows = rows.select_stream(~np.isin(rows.ids, old_rows.ids) & ~incomplete)
            merged.append(concatenate([old, new_rows]))
        return merged[0], merged[1]

    # -- rows ------------------------------------------------------------------------------------------------

    def _split(self, batch: Batch) -> None:
        """Move the rows that are late from ``batch.rows`` to ``batch.late``."""
        rows, late = batch.rows, batch.late
        fresh = rows.fresh.reshape(-1, streams.FRESH_WIDTH)
        ids = _value_ids(rows)
        producers = np.concatenate([Rows(rows.values, streams.VALUE).column("producer"), fresh[:, 2]])
        if self._opaque:  # (op, value) of values that turn out to come from an opaque op of an earlier batch
            mine = np.isin(producers, self._opaque)
            batch.outputs = np.stack([producers[mine], ids[mine]], axis=1).reshape(-1)
        opaque = np.array([info.flavour == OPAQUE for info in self._session.infos] or [False])
        if opaque.any():
            new_opaque = self.ops.ids[opaque[self.ops.column("info")]].tolist()
            self._opaque = [*self._opaque, *new_opaque][-_REGIONS:]
        lost = self._missing.difference(ids.tolist())  # missing in the last batch and in this one
        missing = missing_values(rows, self._values)
        for name, layout, end in (("ops", streams.OP, self._end), ("calls", streams.CALL, self._end),
                                  ("values", streams.VALUE, self._values)):  # fmt: skip
            every = Rows(getattr(rows, name), layout)
            is_late = every.ids < end
            if is_late.any():
                setattr(late, name, every.select_stream(is_late))
                setattr(rows, name, every.select_stream(~is_late))
        is_late = fresh[:, 0] < self._values
        rows.fresh, late.fresh = fresh[~is_late].reshape(-1), fresh[is_late].reshape(-1)
        is_late = rows.counts[:, 0] < self._values
        late.floats, late.counts = rows.floats[is_late], rows.counts[is_late]
        rows.floats, rows.counts = rows.floats[~is_late], rows.counts[~is_late]
        ends = self.calls.column("end")
        seen = [self.ops.ids, self.calls.ids, ends[ends < NO_END]]
        batch.end = self._end = max([self._end, *(int(each.max()) + 1 for each in seen if len(each))])
        batch.absent = np.array(sorted(lost), dtype=np.int64)
        self._missing = set(missing.tolist())
        self._values = max(self._values, int(ids.max(initial=-1)) + 1)
        self._complete = min([self._values, *ids[producers >= self._end].tolist()])

    # -- values that became known ----------------------------------------------------------------------------

    def _alive(self, batch: Batch) -> IntArray:
        """Values that may still be referred to: of live tensors, and inputs of open ops and calls.

        ``batch.alive`` were alive before rows were taken. A tensor that was changed since has a new version,
        whose row will refer to the old one.
        """
        assert batch.alive is not None
        ops, calls = Rows(batch.open_ops, streams.OP), Rows(batch.open_calls, streams.CALL)
        return np.unique(np.concatenate([
            batch.alive, self._session.values.alive(), ops.lists(streams.OP.width, ops.column("input_count")),
            calls.lists(streams.CALL.width, calls.column("input_count")),
        ]))  # fmt: skip

    def _new_sizes(self, alive: IntArray) -> IntArray:
        """Sizes of storages that were not made in the block; each is in one batch."""
        sizes = self._session.values.storage_bytes
        new = {value: size for value, size in dict(sizes).items() if value not in self._sized}
        self._sized.update(new)
        living = set(alive.tolist())
        for value in [value for value in self._sized if value not in living and value < self._values]:
            sizes.pop(value, None)
            self._sized.discard(value)
        return _pairs(new)

    def _new_learned(self, alive: IntArray) -> list[ValueUpdate]:
        """Kinds and names that became known since the last batch, of values whose rows were taken.

        With ``last=`` one that came before the row of its value would be forgotten with the batch.
        """
        values = self._session.values
        new = [
            learned
            for learned in _learned(self._session)
            if learned.value < self._values
            and learned.value not in self._missing
            and self._sent.get(learned.value) != learned
        ]
        self._sent |= {learned.value: learned for learned in new}
        living = set(alive.tolist())
        for value in [value for value in self._sent if value not in living and value < self._values]:
            values.kinds.pop(value, None)
            values.names.pop(value, None)
            del self._sent[value]
        return new


class JournalLookups:
    """Operators and FLOPs of the ops in each batch, for a journal: recovering one must work without torch."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._operators: dict[tuple[int, int], str | None] = {}
        self._flops: dict[tuple[Any, ...], int] = {}
        self._counted: list[bool] = []
        self._api: list[bool] = []
        self._ids, self._metas = EMPTY, EMPTY  # metadata of the live values

    def entries(self) -> tuple[list[tuple[int, int, str]], list[tuple[Any, ...]]]:
        """All entries so far, as `new_entries` returns them."""
        operators = [(*key, symbol) for key, symbol in self._operators.items() if symbol is not None]
        return operators, [(*key, count) for key, count in self._flops.items()]

    def new_entries(
        self, ops: Rows, batch: Batch, tables: Tables
    ) -> tuple[list[tuple[int, int, str]], list[tuple[Any, ...]]]:
        """New in a batch: (stack, operation, operator) and (operation, form, inputs, outputs, FLOPs)."""
        for info in self._session.infos[len(self._counted) :]:
            self._counted.append(has_plain_formula(info))
            self._api.append(info.flavour != OP)
        fresh = batch.rows.fresh.reshape(-1, streams.FRESH_WIDTH)
        ids = np.concatenate([self._ids, _value_ids(batch.rows)])
        metas = [self._metas, Rows(batch.rows.values, streams.VALUE).column("meta"), fresh[:, 1]]
        order = np.argsort(ids, kind="stable")
        self._ids, self._metas = ids[order], np.concatenate(metas)[order]
        entries = self._new_operators(ops, tables), self._new_flops(ops, tables)
        if batch.alive is not None:  # any value of this batch may be used again
            first = int(_value_ids(batch.rows).min(initial=_END))
            live = (positions_in(batch.alive, self._ids) >= 0) | (self._ids >= first)
            self._ids, self._metas = self._ids[live], self._metas[live]
        return entries

    def _new_operators(self, ops: Rows, tables: Tables) -> list[tuple[int, int, str]]:
        info, stack = ops.column("info"), ops.column("stack")
        calls = np.array(self._api or [False])[info] & (stack >= 0)
        new = []
        for key in np.unique((stack[calls] << 32) + info[calls]).tolist():
            pair = key >> 32, key & 0xFFFFFFFF
            if pair not in self._operators:
                symbol = self._operators[pair] = tables.operator(*pair)
                if symbol is not None:
                    new.append((*pair, symbol))
        return new

    def _new_flops(self, ops: Rows, tables: Tables) -> list[tuple[Any, ...]]:
        info = ops.column("info")
        counted = np.flatnonzero(np.array(self._counted or [False])[info])
        if not len(counted):
            return []
        form, result = ops.column("form"), ops.column("result")
        input_counts = ops.column("input_count")
        values = ops.lists(streams.OP.width, ops.column("length") - streams.OP.width)
        at = positions_in(self._ids, values)
        every_meta = np.full(len(values), -1)
        if len(self._ids):
            every_meta = np.where(at >= 0, self._metas[at], -1)
        starts = offsets_of(ops.column("length") - streams.OP.width)
        new: list[tuple[Any, ...]] = []
        seen: set[tuple[int, int, int, bytes]] = set()
        for op in counted.tolist():
            part = every_meta[starts[op] : starts[op + 1]]
            signature = (int(info[op]), int(form[op]), int(input_counts[op]), part.tobytes())
            if signature in seen:
                continue
            seen.add(signature)
            metas = tuple(part.tolist())
            key = (*signature[:2], metas[: signature[2]], metas[signature[2] :])
            if key in self._flops or -1 in metas:
                continue
            result_form = int(result[op]) if result[op] >= 0 else tables.one_tensor
            self._flops[key] = tables.flops(key[0], key[1], result_form, key[2], key[3])
            new.append((*key, self._flops[key]))
        return new
