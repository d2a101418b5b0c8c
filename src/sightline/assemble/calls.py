"""Module calls and steps batch by batch: a call gets its position when it begins, its row when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from sightline.assemble.batch import StepMark, Tables
from sightline.assemble.ops import BatchOps
from sightline.assemble.values import LiveValues
from sightline.data import trace_data as d
from sightline.data.arrays import (
    EMPTY,
    IntArray,
    Mask,
    Rows,
    concatenate,
    expand_ranges,
    offsets_of,
    positions_in,
)
from sightline.data.trace_data import StepInfo
from sightline.schema import streams
from sightline.schema.tables import BACKWARD, RECOMPUTE

_FIXED: Final = (
"position", "module", "index", "parent", "frame", "phase", "start", "duration", "first_op", "end_op",
    "flags", "input_form", "output_form", "order",
)  # fmt: skip


class CallAssembler:
    """The module calls of a recording so far."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.count = 0  #: calls that have begun
        self._ended = 0  # calls that have ended
        self._written = 0  # calls that are in the columns
        self._call_counts: dict[int, int] = {}  # by module
        self._open = Rows(EMPTY, streams.CALL)  # calls that have begun and not ended
        # Of the same, by id: id, position, index, first op, and the aten ops and their time before it.
        self._begins = np.zeros((6, 0), dtype=np.int64)
        self._waiting: list[dict[str, IntArray]] = []

    def begin(self, rows: Rows, ops: BatchOps) -> IntArray:
        """Give the calls that begin in a batch their positions; returns their ids."""
        ids, module = rows.ids, rows.column("module")
        # The index of a call is the number of earlier calls of its module, in this batch and before.
        order = np.argsort(module, kind="stable")
        index = np.empty_like(module)
        index[order] = np.arange(len(ids)) - np.searchsorted(module[order], module[order])
        called, which, times = np.unique(module, return_inverse=True, return_counts=True)
        before = np.array([self._call_counts.get(one, 0) for one in called.tolist()], dtype=np.int64)
        self._call_counts.update(zip(called.tolist(), (before + times).tolist(), strict=True))
        index += before[which]
        ahead = np.searchsorted(ops.ids, ids)
        aten, own = _aten_totals(ops)
        begins = np.stack([
            ids, self.count + np.arange(len(ids)), index, ops.base + ahead,
            ops.before.aten + aten[ahead], ops.before.own + own[ahead],
        ])  # fmt: skip
        self.count += len(ids)
        if len(self._open):
            rows = Rows(concatenate([self._open.flat, rows.flat]), streams.CALL)
        self._open = rows
        self._begins = np.concatenate([self._begins, begins], axis=1)
        return ids

    def positions(self, ids: IntArray) -> IntArray:
        """Positions of open calls by id; -1 for none."""
        at = positions_in(self._begins[0], ids)
        return np.where(at >= 0, self._begins[1][at], -1) if len(self._begins[1]) else at

    def end(self, end: int, ops: BatchOps, live: LiveValues, position_of: IdMap, recomputes: Mask) -> None:
        """Finish the calls that end before ``end``; all ops before it have arrived."""
        rows = self._open
        ended = rows.column("end") < end
        done = rows.select(ended)
        begins = self._begins[:, ended]
        parents = self.positions(done.column("parent"))
        # A copy, so that the ended rows are freed.
        self._open = Rows(rows.select_stream(~ended), streams.CALL)
        self._begins = self._begins[:, ~ended]
        if len(done):
            columns = self._call_columns(done, begins, parents, ops, live, position_of, recomputes)
            self._waiting.append(columns)

    def _call_columns(
        self, rows: Rows, begins: IntArray, parents: IntArray, ops: BatchOps, live: LiveValues,
        position_of: IdMap, recomputes: Mask,
    ) -> dict[str, IntArray]:  # fmt: skip
        _, position, index, first, aten_before, own_before = begins
        bits, stack = rows.column("bits"), rows.column("stack")
        phase, flags = bits & ((1 << streams.FLAG_SHIFT) - 1), bits >> streams.FLAG_SHIFT
        phase[(phase == BACKWARD) & recomputes[stack]] = RECOMPUTE
        # A checkpoint ends its second forward by an exception of its own, as soon as it has all it needs.
        flags[phase == RECOMPUTE] &= ~d.RAISED
        ends = rows.column("end")
        upto = np.searchsorted(ops.ids, ends)
        end = ops.base + upto
        aten, own = _aten_totals(ops)
        inside = ops.before.aten + aten[upto] - aten_before
        watched = inside * self._tables.aten_passage + (end - first - inside) * self._tables.api_passage
        least = ops.before.own + own[upto] - own_before
        order = np.empty(len(rows), dtype=np.int64)
        # The ids of ends are in order; of calls that never ended the innermost comes first.
        order[np.lexsort((-rows.ids, ends))] = self._ended + np.arange(len(rows))
        self._ended += len(rows)
        inputs = rows.column("input_count")
        outputs = rows.column("length") - streams.CALL.width - inputs
        entered = inputs_at_entry(live, rows.lists(streams.CALL.width, inputs), np.repeat(first, inputs))
        return rows.recorded(d.CallColumns) | {
            "position": position, "index": index, "parent": parents, "frame": stack, "phase": phase,
            "duration": np.maximum(rows.column("duration") - watched, least), "first_op": first,
            "end_op": end, "flags": flags, "order": order, "input_counts": inputs,
            "inputs": position_of(entered), "output_counts": outputs,
            "outputs": position_of(rows.lists(streams.CALL.width + inputs, outputs)),
        }  # fmt: skip

    def ready(self) -> dict[str, IntArray] | None:
        """The columns of the calls that can be written now, without gaps; None if there are none."""
        if not self._waiting:
            return None
        columns = self._waiting[0]
        if len(self._waiting) > 1:
            columns = {name: np.concatenate([part[name] for part in self._waiting]) for name in columns}
        order = np.argsort(columns["position"], kind="stable")
        expected = self._written + np.arange(len(order))
        now = int((columns["position"][order] == expected).cumprod().sum())
        self._waiting = [_select(columns, order[now:])] if now < len(order) else []
        self._written += now
        return _select(columns, order[:now]) if now else None

    def open_inputs(self) -> IntArray:
        """The inputs of the calls that have not ended."""
        rows = self._open
        return rows.lists(streams.CALL.width, rows.column("input_count"))


def inputs_at_entry(live: LiveValues, inputs: IntArray, first: IntArray) -> IntArray:
    """The versions that went into calls: inputs that a hook replaced are read only when the call ends."""
    inputs = inputs.copy()
    if not len(live):
        return inputs
    while True:
        at = live.at(inputs)
        later = (at >= 0) & (live.producer[at] >= first) & (live.previous[at] >= 0)
        earlier = live.previous[at[later]]
        if (earlier >= inputs[later]).any():
            raise ValueError("a value replaces a later one")
        if not later.any():
            return inputs
        inputs[later] = earlier


def _aten_totals(ops: BatchOps) -> tuple[IntArray, IntArray]:
    """The number of aten ops, and their time, before each op and after the last."""
    aten = ops.level == 1
    return offsets_of(aten), offsets_of(np.where(aten, ops.rows.column("duration"), 0))


def _select(columns: dict[str, IntArray], rows: IntArray) -> dict[str, IntArray]:
    """Some rows of the columns, in the order given."""
    selected = {name: columns[name][rows] for name in _FIXED}
    for name in ("input", "output"):
        counts = columns[f"{name}_counts"]
        selected[f"{name}s"] = columns[f"{name}s"][expand_ranges(offsets_of(counts)[rows], counts[rows])]
        selected[f"{name}_counts"] = counts[rows]
    return selected


class IdMap:
    """From ids of values to positions in the trace: the id, less the unused ids before it."""

    def __init__(self, absent: IntArray, present: IntArray | None = None) -> None:
        self._absent = absent
        self._present = present  # the ids in use, where few are

    def __call__(self, ids: IntArray) -> IntArray:
        """Positions of ids; references to new versions, and -1, stay as they are."""
        if self._present is not None:
            return np.where(ids >= 0, positions_in(self._present, ids), ids)
        if not len(self._absent):
            return ids
        return np.where(ids >= 0, ids - np.searchsorted(self._absent, ids), ids)


class PlacedMark(NamedTuple):
    """A mark, and the positions of the first op and call after it."""

    mark: StepMark
    op: int
    call: int


def matching_begin(opened: Sequence[StepMark], end: StepMark) -> int:
    """The index of the mark that ``end`` closes: the last open one of its name, -1 for none.

    An optimizer whose step raised leaves its mark open.
    """
    return next((at for at in range(len(opened) - 1, -1, -1) if opened[at].name == end.name), -1)


class StepAssembler:
    """The steps of a recording so far."""

    def __init__(self) -> None:
        self.waiting: list[StepMark] = []  #: marks whose ops have not arrived
        self._placed: list[PlacedMark] = []

    def place(self, end: int, ops: BatchOps, calls: IntArray, first_call: int) -> None:
        """Locate the marks before ``end``; ``calls`` are the ids of the calls that began in this batch."""
        now = [mark for mark in self.waiting if mark.op < end]
        self.waiting = [mark for mark in self.waiting if mark.op >= end]
        for mark in now:
            op = ops.base + int(np.searchsorted(ops.ids, mark.op))
            self._placed.append(PlacedMark(mark, op, first_call + int(np.searchsorted(calls, mark.op))))

    def infos(self, begin: int, elapsed: int, ops: int, calls: int) -> list[StepInfo]:
        """The steps in order of their begin; one that is still open lasts to the end."""
        opened: list[PlacedMark] = []
        steps: list[tuple[PlacedMark, PlacedMark]] = []
        for placed in self._placed:
            if placed.mark.begins:
                opened.append(placed)
            else:
                at = matching_begin([each.mark for each in opened], placed.mark)
                steps += [(opened.pop(at), placed)] if at >= 0 else []
        end = PlacedMark(StepMark("", streams.END, begin + elapsed, begins=False), ops, calls)
        steps += ((placed, end) for placed in opened)
        infos = []
        for first, last in sorted(steps, key=lambda pair: pair[0].mark.op):
            start = max(first.mark.time - begin, 0)
            duration = last.mark.time - begin - start
            infos.append(StepInfo(first.mark.name, first.op, last.op, first.call, last.call, start, duration))
        return infos
