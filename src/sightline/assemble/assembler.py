"""`Assembler`: batches in, columns out. Its state between batches does not grow with the recording.

Batches are added in order. For each, the ops, the values and the calls that have ended are written to a
`Sink`. A later batch may change a written row by a patch: the duration of a call that went on, the name of a
value. A recording in memory is one batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from sightline.assemble.batch import Batch, LateRows, Streams, Tables, ValueUpdate
from sightline.assemble.calls import CallAssembler, IdMap, StepAssembler
from sightline.assemble.forward_links import ForwardLinks
from sightline.assemble.ops import OPAQUE, BatchOps, OpHistory, first_gradient_stacks, recompute_stacks
from sightline.assemble.statistics import Statistics
from sightline.assemble.values import (
    ACTIVATION,
    LASTING,
    Allocations,
    LiveValues,
    Storages,
    earlier_versions,
    floating_metas,
    inherit_kinds,
    split_incoming,
    value_rows,
)
from sightline.assemble.versions import Changes, NewVersions
from sightline.data import trace_data as d
from sightline.data.arrays import (
    EMPTY,
    IntArray,
    Mask,
    Names,
    Rows,
    concatenate,
    offsets_of,
    positions_in,
)
from sightline.data.trace_data import CaptureInfo, StepInfo
from sightline.schema import streams
from sightline.schema.tables import BACKWARD

_FROM_OUTSIDE = [d.KIND["input"], d.KIND["external"], d.KIND["constant"]]


class Sink(Protocol):
    """Receives the columns of tables, batch by batch."""

    def add(self, kind: str, columns: dict[str, Any]) -> None:
        """Append rows to a table; offset columns hold the lengths of the lists."""
        ...

    def patch(self, kind: str, name: str, position: int, value: int) -> None:
        """Replace the number of a row that was added."""
        ...


class Assembler:
    """Turns the batches of one recording into columns."""

    def __init__(self, tables: Tables, late: LateRows, sink: Sink, *, sparse: bool = False) -> None:
        self._tables, self._late, self._sink = tables, late, sink
        self.names = Names()
        self._late_ops = Rows(late.rows.ops, streams.OP)
        self._late_calls = Rows(late.rows.calls, streams.CALL)
        self._late_values = Rows(late.rows.values, streams.VALUE)
        self._late_outputs = late.outputs.reshape(-1, 2)
        self.ops = OpHistory(tables, set(self._late_ops.ids.tolist()))
        self.calls = CallAssembler(tables)
        self._live = LiveValues()
        self._storages, self._storages_written = Storages(), 0
        self._changes = Changes()
        self._statistics = Statistics(tables)
        self._allocations = Allocations()
        self.position_of = IdMap(late.absent)
        self._sparse = sparse
        self._begin = 0  # ids of ops and calls below this are written
        self._first_value = 0  # and ids of values below this
        self._arrived = 0  # ids of values below this have arrived
        self._waiting = EMPTY  # rows of values that have arrived before their ops
        self._bytes = _storage_sizes([late.nbytes])
        self._updates: list[ValueUpdate] = []
        self._steps = StepAssembler()
        self._captures: list[CaptureInfo] = []
        self._slots: dict[int, int] = {}  # of values that came from opaque ops
        self.values = 0  #: how many values are written
        self.external = self.evicted = 0
        self._storage_sizes: dict[int, int] = {}  # by id

    # -- batches -----------------------------------------------------------------------------------------

    def add(self, batches: list[Batch], last: bool) -> None:
        """Add the next batches, as one; ``last`` says that no more follow."""
        end = streams.END if last else max((batch.end for batch in batches), default=self._begin)
        rows = Streams.concatenate([batch.rows for batch in batches])
        opened = batches[-1] if batches and last else Batch()
        op_rows = self._rows_until(end, rows.ops, self._late_ops, opened.open_ops)
        ops = BatchOps(op_rows, self._tables, self.ops, self.names)
        began = self.calls.begin(self._rows_until(end, rows.calls, self._late_calls, opened.open_calls), ops)
        ops.call = self.calls.positions(op_rows.column("call"))
        self._bytes = _storage_sizes([self._bytes.T.reshape(-1), *(batch.nbytes for batch in batches)])
        cut = max((batch.end for batch in batches), default=end)
        first = self._add_values(rows, cut, ops)
        for batch in batches:
            self._updates += batch.updates
            self._steps.waiting += batch.steps
            self._captures += batch.captures
        self._apply_updates(first)
        inherit_kinds(self._live, first)
        recomputes = recompute_stacks(self._tables.places, self._tables.codes)
        first_gradients = first_gradient_stacks(self._tables.places, self._tables.codes)
        links = ForwardLinks(ops, self._live)
        links.find(recomputes, first_gradients)
        self._write_ops_and_values(ops, first, rows)
        self.calls.end(end, ops, self._live, self.position_of, recomputes)
        self._write_other_tables(batches, last)
        self._steps.place(end, ops, began, self.calls.count - len(began))
        links.note_makers()
        self.ops.aten += int(ops.level.sum())
        self.ops.own += int(np.where(ops.level == 1, op_rows.column("duration"), 0).sum())
        self.ops.advance(ops)
        self._begin = end
        if not last and batches:
            self._forget(batches[-1])

    def _rows_until(self, end: int, flat: IntArray, late: Rows, opened: IntArray) -> Rows:
        """The rows of a batch with the late ones, and with those of ops or calls that have not ended."""
        rows = Rows(concatenate([flat, _between(late, self._begin, end)]), late.layout)
        if not len(opened):
            return rows
        more = Rows(opened, late.layout)
        new = (more.ids >= self._begin) & (positions_in(rows.ids, more.ids) < 0)
        return Rows(concatenate([rows.flat, more.select_stream(new)]), late.layout)

    def _add_values(self, rows: Streams, cut: int, ops: BatchOps) -> int:
        """Add the values of the batch to the live ones; returns the row of the first.

        After an interrupt or a kill the op that made a value may never arrive.
        """
        values = concatenate([self._waiting, rows.values])
        last = int(_value_ids(values, rows.fresh).max(initial=-1))
        begin, upto = self._arrived, max(last + 1, self._arrived)
        late = _between(self._late_values, begin, upto)
        late_fresh = self._late.rows.fresh.reshape(-1, streams.FRESH_WIDTH)
        late_fresh = late_fresh[(late_fresh[:, 0] >= begin) & (late_fresh[:, 0] < upto)]
        self._arrived = upto
        incoming = value_rows(concatenate([values, late]), concatenate([rows.fresh, late_fresh.reshape(-1)]))
        new, self._waiting = split_incoming(incoming, cut, ops.ids)
        ids = new["id"]
        if self._sparse:
            self.position_of = IdMap(EMPTY, ids)
        if len(ids) and (ids[0] < self._first_value or (np.diff(ids) <= 0).any()):
            raise ValueError("the values are not in order")
        for name in ("previous", "base"):
            if (new[name] >= ids).any():
                raise ValueError("a value comes before its base or previous version")
        producer = ops.before.positions(new["producer"], ops.ids)
        new["kind"] = np.where((producer < 0) & (new["producer"] >= 0), d.KIND["external"], new["kind"])
        new["producer"] = producer
        first = self._live.extend(new)
        if len(ids):
            self._first_value = int(ids[-1]) + 1
        self._write_storages(*self._storages.assign(self._live, first, self._bytes, self._tables.metas))
        return first

    def _write_storages(self, ids: IntArray, sizes: IntArray) -> None:
        """Write the new storages, and raise the sizes of those that turn out to be larger."""
        count = len(self._storage_sizes)
        new = np.zeros(max(self._storages.count - self._storages_written, 0), dtype=np.int64)
        is_new = ids >= self._storages_written
        np.maximum.at(new, ids[is_new] - self._storages_written, sizes[is_new])
        for id, size in zip(ids[~is_new].tolist(), sizes[~is_new].tolist(), strict=True):
            if size > self._storage_sizes.get(id, -1):
                self._storage_sizes[id] = size
                self._sink.patch("storages", "nbytes", id, size)
        self._sink.add("storages", {"nbytes": new})
        if count > 4 * len(self._live) + 8192:
            alive = set(self._live.storage.tolist())
            self._storage_sizes = {id: size for id, size in self._storage_sizes.items() if id in alive}
        self._storage_sizes.update(enumerate(new.tolist(), self._storages_written))
        self._storages_written = self._storages.count

    def _apply_updates(self, first: int) -> None:
        """Set the names and kinds that became known after a value's row was written."""
        if not self._updates:
            return
        now = [update for update in self._updates if update.value < self._first_value]
        self._updates = [update for update in self._updates if update.value >= self._first_value]
        live = self._live
        rows = live.at(np.array([one.value for one in now], dtype=np.int64))
        names = np.array([self.names.id(one.name) if one.name else -1 for one in now], dtype=np.int64)
        kinds = np.array([one.kind for one in now], dtype=np.int64)
        # All at once up to the first update of a value that is written, or has older versions to update too.
        special = rows < first
        special[~special] = np.isin(kinds, list(LASTING))[~special] & (live.previous[rows[~special]] >= 0)
        plain = int(special.argmax()) if special.any() else len(now)
        for column, numbers in ((live.kind, kinds[:plain]), (live.name, names[:plain])):
            is_set = numbers >= 0
            column[rows[:plain][is_set]] = numbers[is_set]
        for one, at, name in zip(now[plain:], rows[plain:].tolist(), names[plain:].tolist(), strict=True):
            if at >= 0 and one.kind >= 0:
                live.kind[at] = one.kind
            if at >= 0 and name >= 0:
                live.name[at] = name
            if at < first:  # its row is written
                self._patch(one.value, one.kind, name)
            for older in earlier_versions(live, at) if one.kind in LASTING else ():
                live.kind[older], live.name[older] = one.kind, name
                if older < first:
                    self._patch(int(live.id[older]), one.kind, name)

    def _patch(self, value: int, kind: int, name: int) -> None:
        """Change the kind and the name of a value whose row is written."""
        position = int(self.position_of(np.array([value]))[0])
        if kind >= 0:
            self._sink.patch("values", "kind", position, kind)
        if name >= 0:
            self._sink.patch("values", "name", position, name)

    # -- columns -----------------------------------------------------------------------------------------

    def _write_ops_and_values(self, ops: BatchOps, first: int, rows: Streams) -> None:
        """Write ops, values, new versions of values, and statistics."""
        live, sink = self._live, self._sink
        advanced = ops.advanced()
        linked = ops.forward >= 0
        ops.call = np.where(linked, ops.forward_call, ops.call)
        self._set_opaque_outputs(ops, first)
        ops.name_operators()
        result = ops.rows.column("result")
        result[result < 0] = self._tables.one_tensor
        flops = ops.flops(live, result)
        versions = self._changes.apply(
            (ops.flags & d.MUTATES).astype(bool), ops.base, offsets_of(ops.input_counts), ops.inputs,
            offsets_of(ops.output_counts), ops.outputs, live, self._storages.spans(live),
            advanced, ops.phase == BACKWARD,
        ) if len(live) else NewVersions()  # fmt: skip
        late = self._late.rows
        first_id = int(live.id[first]) if first < len(live) else streams.END
        late_rows = (late.counts[:, 0] < self._first_value) & (late.counts[:, 0] >= first_id)
        floats = np.concatenate([rows.floats, late.floats[late_rows]])
        counts = np.concatenate([rows.counts, late.counts[late_rows]])
        if len(counts) or not self._statistics.empty:
            columns = self._statistics.add(floats, counts, live, first, ops)
            columns["value"] = self.position_of(columns["value"])  # type: ignore[arg-type]  # an array of ids
            sink.add("stats", columns)
        duration, changed = ops.durations()
        for position, spent in changed.items():
            sink.patch("ops", "duration", position, spent)
        sink.add("ops", ops.rows.recorded(d.OpColumns) | {
            "name": ops.names, "level": ops.level, "flavour": ops.flavour, "phase": ops.phase,
            "call": ops.call, "frame": ops.stack, "parent": ops.parent, "forward": ops.forward,
            "result": result,
            "duration": duration, "flops": flops, "flags": ops.flags, "thread": ops.thread,
            "input_offsets": ops.input_counts, "inputs": self.position_of(ops.inputs),
            "output_offsets": ops.output_counts, "outputs": self.position_of(ops.outputs),
        })  # fmt: skip
        self._write_values(ops, first, advanced)
        self._write_versions(versions)

    def _set_opaque_outputs(self, ops: BatchOps, first: int) -> None:
        """Set the outputs of opaque ops: the values whose producer is one, and those recorded late."""
        opaque = ops.flavour == OPAQUE
        if not opaque.any():
            return
        live = self._live
        local = live.producer[first:] - ops.base
        is_output = (local >= 0) & (local < len(ops.ids))
        is_output[is_output] = opaque[local[is_output]]
        values, owners = live.id[first:][is_output], local[is_output]
        late = self._late_outputs
        late_owner = positions_in(ops.ids, late[:, 0])
        more = (late_owner >= 0) & (positions_in(values, late[:, 1]) < 0)
        more[more] = opaque[late_owner[more]]
        before = np.repeat(np.arange(len(ops.ids)), ops.output_counts)
        outputs = np.concatenate([ops.outputs, values, late[more, 1]])
        owner = np.concatenate([before, owners, late_owner[more]])
        ops.outputs = outputs[np.argsort(owner, kind="stable")]
        ops.output_counts = np.bincount(owner, minlength=len(ops.ids))
        starts = offsets_of(ops.output_counts)
        for op in np.flatnonzero(opaque).tolist():
            for slot, value in enumerate(ops.outputs[starts[op] : starts[op + 1]].tolist()):
                self._slots.setdefault(value, slot)

    def _final_kinds(self, kind: IntArray, producer: IntArray, backward: Mask) -> IntArray:
        """Kinds to write: an activation that a backward pass made is a gradient."""
        kind = kind.copy()
        kind[(producer >= 0) & (kind == ACTIVATION) & backward] = d.KIND["gradient"]
        self.external += int((kind == d.KIND["external"]).sum())
        self.evicted += int((kind == d.KIND["evicted"]).sum())
        return kind

    def _write_values(self, ops: BatchOps, first: int, advanced: Mask) -> None:
        """Write the values from row ``first`` of the live ones on."""
        live = self._live
        ids, producer = live.id[first:], live.producer[first:]
        local = np.where(producer >= ops.base, producer - ops.base, -1)
        in_backward = np.zeros(len(ids), dtype=bool)
        graded = np.zeros(len(ids), dtype=bool)
        here = local >= 0
        in_backward[here] = ops.phase[local[here]] == BACKWARD
        graded[here] = advanced[local[here]] & floating_metas(self._tables)[live.meta[first:][here]]
        # The index among the producer's outputs; -1 if another value's change made it.
        slot = np.full(len(ids), -1, dtype=np.int64)
        writers = ops.base + np.repeat(np.arange(len(ops.ids)), ops.output_counts)
        index = np.arange(len(ops.outputs)) - np.repeat(offsets_of(ops.output_counts)[:-1], ops.output_counts)
        at = positions_in(ids, ops.outputs)
        own = (at >= 0) & (producer[at] == writers) if len(ids) else np.zeros(len(at), dtype=bool)
        slot[at[own][::-1]] = index[own][::-1]  # of duplicates the first is written last
        slot[producer < 0] = 0
        for row, value in enumerate(ids.tolist()) if self._slots else ():
            if value in self._slots and producer[row] >= 0:
                slot[row] = self._slots.pop(value)
        self._sink.add("values", {
            "meta": live.meta[first:], "storage": live.storage[first:], "offset": live.offset[first:],
            "kind": self._final_kinds(live.kind[first:], producer, in_backward), "name": live.name[first:],
            "producer": producer, "slot": slot,
            "previous": self.position_of(live.previous[first:]), "base": self.position_of(live.base[first:]),
            "flags": live.flags[first:] | np.where(graded, d.REQUIRES_GRAD, 0),
        })  # fmt: skip
        self.values += len(ids)

    def _write_versions(self, new: NewVersions) -> None:
        if not new.like:
            return
        live = self._live
        at = live.at(np.array(new.like, dtype=np.int64))
        producer = np.array(new.producer, dtype=np.int64)
        in_backward = np.array(new.backward)
        graded = np.array(new.graded) & floating_metas(self._tables)[live.meta[at]]
        kind = live.kind[at]
        kind[np.isin(kind, _FROM_OUTSIDE)] = ACTIVATION
        self._sink.add("versions", {
            "meta": live.meta[at], "storage": live.storage[at], "offset": live.offset[at],
            "kind": self._final_kinds(kind, producer, in_backward), "name": live.name[at],
            "producer": producer, "slot": np.full(len(at), -1, dtype=np.int64),
            "previous": self.position_of(np.array(new.previous, dtype=np.int64)),
            "base": self.position_of(np.array(new.base, dtype=np.int64)),
            "flags": live.flags[at] | np.where(graded, d.REQUIRES_GRAD, 0),
        })  # fmt: skip

    def _write_other_tables(self, batches: list[Batch], last: bool) -> None:
        """Write allocations, device work, and the module calls that have ended."""
        memory = concatenate([batch.memory for batch in batches])
        allocations = self._allocations.add(memory, self._first_value, last)
        allocations["value"] = self.position_of(allocations["value"])
        self._sink.add("allocations", allocations)
        fields = d.DeviceWorkColumns.dtypes()
        work = concatenate([batch.device for batch in batches]).reshape(-1, len(fields)).T
        names = np.array([self.names.id(name) for name in self._tables.kernels], dtype=np.int64)
        name = names[work[0]] if len(names) else work[0]
        self._sink.add("device_work", dict(zip(fields, work, strict=True)) | {"name": name})
        calls = self.calls.ready()
        if calls is not None:
            for offsets, counts in (("input_offsets", "input_counts"), ("output_offsets", "output_counts")):
                calls[offsets] = calls.pop(counts)
            del calls["position"]
            self._sink.add("calls", calls)

    # -- results ----------------------------------------------------------------------------------------

    def steps(self, elapsed: int) -> list[StepInfo]:
        """The steps in order of their begin."""
        return self._steps.infos(self._tables.begin, elapsed, self.ops.count, self.calls.count)

    def captures(self) -> list[CaptureInfo]:
        """The captures, with positions of values in place of ids."""
        lost = self._tables.lost_captures
        captures = [info for info in self._captures if info.key not in lost] if lost else self._captures
        ids = np.array([info.value for info in captures], dtype=np.int64)
        positions = self.position_of(ids)
        positions[ids >= self._first_value] = -1
        return [replace(info, value=at) for info, at in zip(captures, positions.tolist(), strict=True)]

    def node_ops(self) -> dict[int, int]:
        """Autograd nodes and the ops that made them."""
        numbers, ops, _ = self.ops.nodes
        return dict(zip(numbers.tolist(), ops.tolist(), strict=True))

    # -- between batches ---------------------------------------------------------------------------------

    def _forget(self, batch: Batch) -> None:
        """Drop the values that no later batch can refer to."""
        if batch.alive is None:
            return
        live = self._live
        waiting = self._waiting.reshape(-1, streams.VALUE.width)
        sources = waiting[:, [streams.V_BASE, streams.V_PREVIOUS]].reshape(-1)
        alive = np.unique(np.concatenate([batch.alive, self.calls.open_inputs(), sources]))
        # A tensor may be registered a moment after its row is written.
        recent = int(_value_ids(batch.rows.values, batch.rows.fresh).min(initial=streams.END))
        live.keep((live.id >= recent) | (positions_in(alive, live.id) >= 0))
        self._changes.forget(live)
        self._statistics.forget(live)
        self._bytes = self._bytes[:, self._bytes[0] >= self._first_value]


def _storage_sizes(parts: list[IntArray]) -> IntArray:
    """Values in order, and their bytes, from pairs; the last pair of a value counts."""
    pairs = concatenate(parts).reshape(-1, 2)[::-1]
    values, last = np.unique(pairs[:, 0], return_index=True)
    return np.stack([values, pairs[last, 1]])


def _value_ids(values: IntArray, fresh: IntArray) -> IntArray:
    """The ids of the values of two streams, not sorted."""
    return np.concatenate([values[1 :: streams.VALUE.width], fresh[:: streams.FRESH_WIDTH]])


def _between(rows: Rows, begin: int, end: int) -> IntArray:
    if not len(rows):
        return EMPTY
    ids = rows.ids
    return rows.select_stream((ids >= begin) & (ids < end))
