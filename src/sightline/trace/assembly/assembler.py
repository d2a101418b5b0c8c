"""`Assembler`: batches in, columns out. What it keeps in between does not grow with the recording.

Batches are added in order. Of each it writes the ops, the values, and the calls that have ended to a `Sink`;
what a later batch changes of what is written (the time of a call that went on, a name that was learned) is a
patch. A recording in memory is one batch.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np

from sightline.trace import data as d
from sightline.trace.assembly import layout as row
from sightline.trace.assembly.arrays import NONE, Mask, Names, Numbers, Rows, dense, joined, offsets_of
from sightline.trace.assembly.batch import Batch, Late, Learned, Streams, Tables
from sightline.trace.assembly.calls import Calls, IdMap, Steps
from sightline.trace.assembly.layout import BACKWARD
from sightline.trace.assembly.ops import OPAQUE, Ops, OpsSoFar, recompute_stacks
from sightline.trace.assembly.statistics import Statistics
from sightline.trace.assembly.values import (
    ACTIVATION,
    KIND,
    LASTING,
    Allocations,
    IncomingValues,
    LiveValues,
    Storages,
    earlier,
    floating,
    inherit,
    relevant,
)
from sightline.trace.assembly.versions import Changes, NewVersions
from sightline.trace.data import CaptureInfo, StepInfo

_UNMADE = [KIND["input"], KIND["external"], KIND["constant"]]
_END = 1 << 62


class Sink(Protocol):
    """Where columns go."""

    def add(self, kind: str, columns: dict[str, Any]) -> None:
        """Rows at the end of a table; instead of offsets the lengths of the lists."""
        ...

    def patch(self, kind: str, name: str, place: int, value: int) -> None:
        """Another number for a row that is there."""
        ...


class Assembler:
    """Turns the batches of one recording into columns."""

    def __init__(self, tables: Tables, late: Late, sink: Sink, *, sparse: bool = False) -> None:
        self._tables, self._late, self._sink = tables, late, sink
        self.names = Names()
        self._late_ops = Rows(late.rows.ops, row.O_WIDTH)
        self._late_calls = Rows(late.rows.calls, row.C_WIDTH)
        self._late_values = Rows(late.rows.values, row.V_WIDTH)
        self._late_outputs = late.outputs.reshape(-1, 2)
        self.ops = OpsSoFar(tables.first_sequence, set(self._late_ops.ids.tolist()))
        self.calls = Calls(tables)
        self._living = LiveValues()
        self._storages = Storages()
        self._changes = Changes()
        self._statistics = Statistics(tables)
        self._allocations = Allocations()
        self.place_of = IdMap(late.absent)
        self._sparse = sparse
        self._begin = 0  # ids of ops and calls before this one are written
        self._first_value = 0  # and values before this one
        self._arrived = 0  # values before this one have come
        self._left = Streams()  # of those, the ones whose ops have not
        self._bytes = _sizes([late.nbytes])
        self._learned: list[Learned] = []
        self._steps = Steps()
        self._captures: list[CaptureInfo] = []
        self._slots: dict[int, int] = {}  # of values that opaque ops turn out to have made
        self.values = 0  #: how many are written
        self.external = self.evicted = 0
        self._storage_sizes: dict[int, int] = {}

    # -- a batch -----------------------------------------------------------------------------------------

    def add(self, batches: list[Batch], last: bool) -> None:
        """The next batches, as one; ``last`` says that nothing follows."""
        end = _END if last else max((batch.end for batch in batches), default=self._begin)
        rows = Streams.joined([batch.rows for batch in batches])
        opened = batches[-1] if batches and last else Batch()
        ops_rows = self._ops_of(rows, opened, end)
        ops = Ops(ops_rows, self._tables, self.ops, self.names)
        began = self.calls.begin(self._calls_of(rows, opened, end), ops)
        ops.call = self.calls.places(ops_rows.column(row.O_CALL))
        self._bytes = _sizes([self._bytes.T.reshape(-1), *(batch.nbytes for batch in batches)])
        cut = max((batch.end for batch in batches), default=end)
        first = self._arrive(rows, cut, ops)
        for batch in batches:
            self._learned += batch.learned
            self._steps.waiting += batch.steps
            self._captures += batch.captures
        self._learn(first)
        inherit(self._living, first)
        recomputes = recompute_stacks(self._tables.places, self._tables.codes)
        ops.find_forward_ops(recomputes, self._living)
        self._write(ops, first, rows)
        self._write_allocations(joined([batch.memory for batch in batches]), last)
        self._write_device_work(joined([batch.device for batch in batches]))
        self.calls.end(end, ops, self._living, self.place_of, recomputes)
        self._write_calls()
        self._steps.place(end, ops, began, self.calls.count - len(began))
        ops.note_makers(self._living)
        self.ops.aten += int(ops.level.sum())
        self.ops.own += int(np.where(ops.level == 1, ops_rows.column(row.O_DURATION), 0).sum())
        self.ops.advance(ops)
        self._begin = end
        if not last and batches:
            self._forget(batches[-1])

    def _ops_of(self, rows: Streams, opened: Batch, end: int) -> Rows:
        parts = [rows.ops, _between(self._late_ops, self._begin, end)]
        here = Rows(joined(parts), row.O_WIDTH)
        return _with_open(here, opened.open_ops, self._begin, row.O_WIDTH)

    def _calls_of(self, rows: Streams, opened: Batch, end: int) -> Rows:
        parts = [rows.calls, _between(self._late_calls, self._begin, end)]
        here = Rows(joined(parts), row.C_WIDTH)
        return _with_open(here, opened.open_calls, self._begin, row.C_WIDTH)

    def _arrive(self, rows: Streams, cut: int, ops: Ops) -> int:
        """The values of the batch join the living; returns the row of the first.

        Where an op was interrupted, or the process killed, the op that has made a value may never come.
        """
        here = Streams(values=joined([self._left.values, rows.values]), fresh=rows.fresh)
        begin, upto = self._arrived, max(_last_value(here), self._arrived)
        late = _between(self._late_values, begin, upto)
        plain = self._late.rows.fresh.reshape(-1, row.FRESH_WIDTH)
        fresh = plain[(plain[:, 0] >= begin) & (plain[:, 0] < upto)].reshape(-1)
        self._arrived = upto
        arriving = IncomingValues(joined([here.values, late]), joined([here.fresh, fresh]))
        new, left = arriving.split(cut, ops.ids)
        self._left = Streams(values=left)
        ids = new["id"]
        if self._sparse:
            self.place_of = IdMap(NONE, ids)
        if len(ids) and (ids[0] < self._first_value or (np.diff(ids) <= 0).any()):
            raise ValueError("values do not come in order")
        for name in ("previous", "base"):
            if (new[name] >= ids).any():
                raise ValueError("a value comes before the one it is made of")
        producer = ops.before.place(new["producer"], ops.ids)
        new["kind"] = np.where((producer < 0) & (new["producer"] >= 0), KIND["external"], new["kind"])
        new["producer"] = producer
        first = self._living.extend(new)
        if len(ids):
            self._first_value = int(ids[-1]) + 1
        metas = self._tables.metas
        numbers, sizes = self._storages.assign(self._living, first, self._bytes, metas)
        self._grow_storages(numbers, sizes)
        return first

    def _grow_storages(self, numbers: Numbers, sizes: Numbers) -> None:
        written = len(self._storage_sizes)
        new = np.zeros(max(self._storages.count - self._storages_written, 0), dtype=np.int64)
        fresh = numbers >= self._storages_written
        np.maximum.at(new, numbers[fresh] - self._storages_written, sizes[fresh])
        for number, size in zip(numbers[~fresh].tolist(), sizes[~fresh].tolist(), strict=True):
            if size > self._storage_sizes.get(number, -1):
                self._storage_sizes[number] = size
                self._sink.patch("storages", "nbytes", number, size)
        self._sink.add("storages", {"nbytes": new})
        held = self._living.storage
        if written > 4 * len(held) + 8192:
            alive = set(held.tolist())
            self._storage_sizes = {at: size for at, size in self._storage_sizes.items() if at in alive}
        self._storage_sizes.update(enumerate(new.tolist(), self._storages_written))
        self._storages_written = self._storages.count

    _storages_written = 0

    def _learn(self, first: int) -> None:
        """Names and kinds that became known after a value was written down."""
        if not self._learned:
            return
        now, self._learned = relevant(self._learned, self._first_value)
        living = self._living
        rows = living.at(np.array([one.value for one in now], dtype=np.int64))
        names = np.array([self.names.id(one.name) if one.name else -1 for one in now], dtype=np.int64)
        kinds = np.array([one.kind for one in now], dtype=np.int64)
        # Up to the first that is written, or has an older version that this is said of too, all at once.
        special = rows < first
        special[~special] = np.isin(kinds, list(LASTING))[~special] & (living.previous[rows[~special]] >= 0)
        plain = int(special.argmax()) if special.any() else len(now)
        for column, numbers in ((living.kind, kinds[:plain]), (living.name, names[:plain])):
            known = numbers >= 0
            column[rows[:plain][known]] = numbers[known]
        for one, at, name in zip(now[plain:], rows[plain:].tolist(), names[plain:].tolist(), strict=True):
            if at >= 0 and one.kind >= 0:
                living.kind[at] = one.kind
            if at >= 0 and name >= 0:
                living.name[at] = name
            if at < first:  # it is written
                self._patch(one.value, one.kind, name)
            for older in earlier(living, at) if one.kind in LASTING else ():
                living.kind[older], living.name[older] = one.kind, name
                if older < first:
                    self._patch(int(living.id[older]), one.kind, name)

    def _patch(self, value: int, kind: int, name: int) -> None:
        """What became known of a value that is written."""
        place = int(self.place_of(np.array([value]))[0])
        if kind >= 0:
            self._sink.patch("values", "kind", place, kind)
        if name >= 0:
            self._sink.patch("values", "name", place, name)

    # -- columns -----------------------------------------------------------------------------------------

    def _write(self, ops: Ops, first: int, rows: Streams) -> None:
        """The columns of ops and values."""
        living, sink = self._living, self._sink
        advanced = ops.advanced()
        linked = ops.forward >= 0
        ops.call = np.where(linked, ops.forward_call, ops.call)
        self._opaque_outputs(ops, first)
        ops.operators()
        result = ops.rows.column(row.O_RESULT)
        result[result < 0] = self._tables.one_tensor
        flops = ops.flops(living, result)
        made = self._changes.apply(
            (ops.flags & d.MUTATES).astype(bool), ops.base, offsets_of(ops.input_counts), ops.inputs,
            offsets_of(ops.output_counts), ops.outputs, living, self._storages.spans(living),
            advanced, ops.phase == BACKWARD,
        ) if len(living) else NewVersions()  # fmt: skip
        late = self._late.rows
        picked = (late.counts[:, 0] < self._first_value) & (late.counts[:, 0] >= _first_id(living, first))
        self._write_stats(
            np.concatenate([rows.floats, late.floats[picked]]),
            np.concatenate([rows.counts, late.counts[picked]]), first, ops,
        )  # fmt: skip
        duration, changed = ops.durations()
        for place, spent in changed.items():
            sink.patch("ops", "duration", place, spent)
        sink.add("ops", {
            "name": ops.names, "level": ops.level, "flavour": ops.flavour, "phase": ops.phase,
            "call": ops.call, "frame": ops.stack, "parent": ops.parent, "forward": ops.forward,
            "form": ops.rows.column(row.O_FORM), "result": result, "start": ops.rows.column(row.O_START),
            "duration": duration, "flops": flops, "flags": ops.flags, "thread": ops.thread,
            "input_offsets": ops.input_counts, "inputs": self.place_of(ops.inputs),
            "output_offsets": ops.output_counts, "outputs": self.place_of(ops.outputs),
        })  # fmt: skip
        self._write_values(ops, first, advanced)
        self._write_versions(made)

    def _opaque_outputs(self, ops: Ops, first: int) -> None:
        """The outputs of an opaque op are the values that turned out to be its own."""
        opaque = ops.flavour == OPAQUE
        if not opaque.any():
            return
        living = self._living
        local = living.producer[first:] - ops.base
        mine = (local >= 0) & (local < len(ops.ids))
        mine[mine] = opaque[local[mine]]
        values, owners = living.id[first:][mine], local[mine]
        late = self._late_outputs
        place = dense(ops.ids, late[:, 0])
        more = (place >= 0) & (dense(values, late[:, 1]) < 0)
        more[more] = opaque[place[more]]
        before = np.repeat(np.arange(len(ops.ids)), ops.output_counts)
        every = np.concatenate([ops.outputs, values, late[more, 1]])
        owner = np.concatenate([before, owners, place[more]])
        ops.outputs = every[np.argsort(owner, kind="stable")]
        ops.output_counts = np.bincount(owner, minlength=len(ops.ids))
        starts = offsets_of(ops.output_counts)
        for op in np.flatnonzero(opaque).tolist():
            for slot, value in enumerate(ops.outputs[starts[op] : starts[op + 1]].tolist()):
                self._slots.setdefault(value, slot)

    def _final(self, kind: Numbers, producer: Numbers, backward: Mask) -> Numbers:
        """What a backward pass makes, and nothing else says what it is, is a gradient."""
        kind = kind.copy()
        kind[(producer >= 0) & (kind == ACTIVATION) & backward] = KIND["gradient"]
        self.external += int((kind == KIND["external"]).sum())
        self.evicted += int((kind == KIND["evicted"]).sum())
        return kind

    def _write_values(self, ops: Ops, first: int, advanced: Mask) -> None:
        living = self._living
        ids, producer = living.id[first:], living.producer[first:]
        local = np.where(producer >= ops.base, producer - ops.base, -1)
        in_backward = np.zeros(len(ids), dtype=bool)
        graded = np.zeros(len(ids), dtype=bool)
        here = local >= 0
        in_backward[here] = ops.phase[local[here]] == BACKWARD
        graded[here] = advanced[local[here]] & floating(self._tables)[living.meta[first:][here]]
        self._sink.add("values", {
            "meta": living.meta[first:], "storage": living.storage[first:], "offset": living.offset[first:],
            "kind": self._final(living.kind[first:], producer, in_backward), "name": living.name[first:],
            "producer": producer, "slot": self._slots_of(ops, ids, producer),
            "previous": self.place_of(living.previous[first:]), "base": self.place_of(living.base[first:]),
            "flags": living.flags[first:] | np.where(graded, d.REQUIRES_GRAD, 0),
        })  # fmt: skip
        self.values += len(ids)

    def _slots_of(self, ops: Ops, ids: Numbers, producer: Numbers) -> Numbers:
        """Which output of its producer a value is; -1 if it is one that was changed along with another."""
        slot = np.full(len(ids), -1, dtype=np.int64)
        writers = ops.base + np.repeat(np.arange(len(ops.ids)), ops.output_counts)
        place = np.arange(len(ops.outputs)) - np.repeat(offsets_of(ops.output_counts)[:-1], ops.output_counts)
        at = dense(ids, ops.outputs)
        own = (at >= 0) & (producer[at] == writers) if len(ids) else np.zeros(len(at), dtype=bool)
        slot[at[own][::-1]] = place[own][::-1]  # the first of equal ones is written last
        slot[producer < 0] = 0
        if self._slots:
            for row_, value in enumerate(ids.tolist()):
                if value in self._slots and producer[row_] >= 0:
                    slot[row_] = self._slots.pop(value)
        return slot

    def _write_versions(self, made: NewVersions) -> None:
        if not made.like:
            return
        living = self._living
        at = living.at(np.array(made.like, dtype=np.int64))
        producer = np.array(made.producer, dtype=np.int64)
        in_backward = np.array(made.backward)
        graded = np.array(made.graded) & floating(self._tables)[living.meta[at]]
        kind = living.kind[at]
        kind[np.isin(kind, _UNMADE)] = ACTIVATION
        self._sink.add("versions", {
            "meta": living.meta[at], "storage": living.storage[at], "offset": living.offset[at],
            "kind": self._final(kind, producer, in_backward), "name": living.name[at], "producer": producer,
            "slot": np.full(len(at), -1, dtype=np.int64),
            "previous": self.place_of(np.array(made.previous, dtype=np.int64)),
            "base": self.place_of(np.array(made.base, dtype=np.int64)),
            "flags": living.flags[at] | np.where(graded, d.REQUIRES_GRAD, 0),
        })  # fmt: skip

    def _write_stats(self, floats: d.F64, counts: Numbers, first: int, ops: Ops) -> None:
        if not len(counts) and self._statistics.empty:
            return
        columns = self._statistics.add(floats, counts, self._living, first, ops)
        columns["value"] = self.place_of(columns["value"])  # type: ignore[arg-type]  # numbers, here
        self._sink.add("stats", columns)

    def _write_allocations(self, rows: Numbers, last: bool) -> None:
        columns = self._allocations.add(rows, self._first_value, last)
        columns["value"] = self.place_of(columns["value"])
        self._sink.add("allocations", columns)

    def _write_device_work(self, rows: Numbers) -> None:
        columns = rows.reshape(-1, len(fields(d.DeviceWorkColumns))).T
        names = np.array([self.names.id(name) for name in self._tables.kernels], dtype=np.int64)
        named = dict(zip((one.name for one in fields(d.DeviceWorkColumns)), columns, strict=True))
        self._sink.add("device_work", named | {"name": names[columns[0]] if len(names) else columns[0]})

    def _write_calls(self) -> None:
        columns = self.calls.ready()
        if columns is not None:
            columns["input_offsets"], columns["output_offsets"] = (
                columns.pop("input_counts"), columns.pop("output_counts"),
            )  # fmt: skip
            del columns["place"]
            self._sink.add("calls", columns)

    # -- the rest ----------------------------------------------------------------------------------------

    def steps(self, elapsed: int) -> list[StepInfo]:
        """The steps in order of their beginning."""
        return self._steps.infos(self._tables.begin, elapsed, self.ops.count, self.calls.count)

    def captures(self) -> list[CaptureInfo]:
        """What was kept, with the places values have."""
        ids = np.array([info.value for info in self._captures], dtype=np.int64)
        places = self.place_of(ids)
        places[ids >= self._first_value] = -1
        return [
            replace(info, value=place) for info, place in zip(self._captures, places.tolist(), strict=True)
        ]

    def node_ops(self) -> dict[int, int]:
        """Autograd nodes and the ops that made them."""
        numbers, ops, _ = self.ops.nodes
        return dict(zip(numbers.tolist(), ops.tolist(), strict=True))

    # -- between batches ---------------------------------------------------------------------------------

    def _forget(self, batch: Batch) -> None:
        """Let go of values that can no longer be referred to."""
        if batch.alive is None:
            return
        living = self._living
        wanted = np.unique(np.concatenate([batch.alive, self.calls.open_inputs(), self._left_sources()]))
        recent = _first_value(batch.rows)  # a tensor may have been noted a moment after its row was written
        living.keep((living.id >= recent) | (dense(wanted, living.id) >= 0))
        self._changes.forget(living)
        self._statistics.forget(living)
        self._bytes = self._bytes[:, self._bytes[0] >= self._first_value]

    def _left_sources(self) -> Numbers:
        rows = Rows(self._left.values, row.V_WIDTH)
        return np.concatenate([rows.column(row.V_BASE), rows.column(row.V_PREVIOUS)])


def _first_id(living: LiveValues, first: int) -> int:
    return int(living.id[first]) if first < len(living) else _END


def _sizes(parts: list[Numbers]) -> Numbers:
    """Values in order, and their bytes, out of pairs; the last pair of a value counts."""
    pairs = joined(parts).reshape(-1, 2)[::-1]
    values, last = np.unique(pairs[:, 0], return_index=True)
    return np.stack([values, pairs[last, 1]])


def _last_value(rows: Streams) -> int:
    """After the last value there is."""
    values, fresh = rows.values[1 :: row.V_WIDTH], rows.fresh.reshape(-1, row.FRESH_WIDTH)[:, 0]
    return 1 + max(int(values.max()) if len(values) else -1, int(fresh.max()) if len(fresh) else -1)


def _first_value(rows: Streams) -> int:
    first = Rows(rows.values, row.V_WIDTH).ids
    fresh = rows.fresh.reshape(-1, row.FRESH_WIDTH)[:, 0]
    return min(int(first[0]) if len(first) else _END, int(fresh.min()) if len(fresh) else _END)


def _between(rows: Rows, begin: int, end: int) -> Numbers:
    if not len(rows):
        return NONE
    ids = rows.ids
    return rows.taken((ids >= begin) & (ids < end))


def _with_open(rows: Rows, opened: Numbers, begin: int, width: int) -> Rows:
    """The rows with those of what has not ended, as far as it is not among them already."""
    if not len(opened):
        return rows
    more = Rows(opened, width)
    new = (more.ids >= begin) & (dense(rows.ids, more.ids) < 0)
    return Rows(joined([rows.flat, more.taken(new)]), width)
