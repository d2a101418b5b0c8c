"""Module calls and steps batch by batch: a call has its place when it begins, its row when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from sightline.trace import data as d
from sightline.trace.assembly import layout as row
from sightline.trace.assembly.arrays import NONE, Mask, Numbers, Rows, dense, joined, offsets_of, spread
from sightline.trace.assembly.batch import StepMark, Tables
from sightline.trace.assembly.layout import BACKWARD, RECOMPUTE
from sightline.trace.assembly.ops import Ops
from sightline.trace.assembly.values import LiveValues
from sightline.trace.data import StepInfo

_FIXED: Final = (
    "place", "module", "index", "parent", "frame", "phase", "start", "duration", "first_op", "end_op",
    "flags", "input_form", "output_form", "order",
)  # fmt: skip


class Calls:
    """The calls of a recording so far."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.count = 0  #: calls that have begun
        self._ended = 0  # calls that have ended
        self._written = 0  # calls that are in the columns
        self._often: dict[int, int] = {}  # calls of each module
        self._open = Rows(NONE, row.C_WIDTH)  # of those that have begun and are not ended yet
        #: of the same, in order of their ids: id, place, index, first op, aten ops and their time before it
        self._known = np.zeros((6, 0), dtype=np.int64)
        self._waiting: list[dict[str, Numbers]] = []

    @property
    def ids(self) -> Numbers:
        """Ids of the calls that ops of this batch may be in."""
        ids: Numbers = self._known[0]
        return ids

    def begin(self, rows: Rows, ops: Ops) -> Numbers:
        """Give the calls that begin in a batch their places; returns their ids."""
        ids, module = rows.ids, rows.column(row.C_MODULE)
        ahead = np.searchsorted(ops.ids, ids)
        aten, own = _totals(ops)
        known = np.stack([
            ids, self.count + np.arange(len(ids)), self._ranks(module), ops.base + ahead,
            ops.before.aten + aten[ahead], ops.before.own + own[ahead],
        ])  # fmt: skip
        self.count += len(ids)
        self._open = Rows(joined([self._open.flat, rows.flat]), row.C_WIDTH) if len(self._open) else rows
        self._known = np.concatenate([self._known, known], axis=1)
        return ids

    def places(self, ids: Numbers) -> Numbers:
        """Places of open calls by id; -1 for none."""
        found = dense(self._known[0], ids)
        return np.where(found >= 0, self._known[1][found], -1) if len(self._known[1]) else found

    def _ranks(self, module: Numbers) -> Numbers:
        """How many calls of the same module came before each."""
        order = np.argsort(module, kind="stable")
        first = np.searchsorted(module[order], module[order])
        ranks = np.empty_like(module)
        ranks[order] = np.arange(len(module)) - first
        found, which, times = np.unique(module, return_inverse=True, return_counts=True)
        before = np.array([self._often.get(one, 0) for one in found.tolist()], dtype=np.int64)
        self._often.update(zip(found.tolist(), (before + times).tolist(), strict=True))
        return ranks + before[which] if len(found) else ranks

    def end(self, end: int, ops: Ops, living: LiveValues, place_of_value: IdMap, recomputes: Mask) -> None:
        """Finish the calls that end before ``end``, when all ops before it are known."""
        rows = self._open
        over = rows.column(row.C_END) < end
        done = rows.picked(over)
        known = self._known[:, over]
        parents = self.places(done.column(row.C_PARENT))
        self._open = Rows(rows.taken(~over), row.C_WIDTH)  # without the others, which would stay in memory
        self._known = self._known[:, ~over]
        if len(done):
            self._waiting.append(
                self._finished(done, known, parents, ops, living, place_of_value, recomputes)
            )

    def _finished(
        self, rows: Rows, known: Numbers, parents: Numbers, ops: Ops, living: LiveValues, place_of: IdMap,
        recomputes: Mask,
    ) -> dict[str, Numbers]:  # fmt: skip
        _, place, index, first, aten_before, own_before = known
        bits, stack = rows.column(row.C_BITS), rows.column(row.C_STACK)
        phase, flags = bits & ((1 << row.FLAG_SHIFT) - 1), bits >> row.FLAG_SHIFT
        phase[(phase == BACKWARD) & recomputes[stack]] = RECOMPUTE
        # A checkpoint ends its second forward by an exception of its own, as soon as it has what it needs.
        flags[phase == RECOMPUTE] &= ~d.RAISED
        ends = rows.column(row.C_END)
        upto = np.searchsorted(ops.ids, ends)
        end = ops.base + upto
        aten, own = _totals(ops)
        inside = ops.before.aten + aten[upto] - aten_before
        watched = inside * self._tables.aten_passage + (end - first - inside) * self._tables.api_passage
        least = ops.before.own + own[upto] - own_before
        order = np.empty(len(rows), dtype=np.int64)
        # Ids of ends are given in order; of calls that never ended the innermost comes first.
        order[np.lexsort((-rows.ids, ends))] = self._ended + np.arange(len(rows))
        self._ended += len(rows)
        inputs = rows.column(row.C_INPUTS)
        outputs = rows.column(0) - row.C_WIDTH - inputs
        given = as_given(living, rows.lists(row.C_WIDTH, inputs), np.repeat(first, inputs))
        return {
            "place": place, "module": rows.column(row.C_MODULE), "index": index, "parent": parents,
            "frame": stack, "phase": phase, "start": rows.column(row.C_START),
            "duration": np.maximum(rows.column(row.C_DURATION) - watched, least), "first_op": first,
            "end_op": end, "flags": flags, "input_form": rows.column(row.C_INPUT_FORM),
            "output_form": rows.column(row.C_OUTPUT_FORM), "order": order, "input_counts": inputs,
            "inputs": place_of(given), "output_counts": outputs,
            "outputs": place_of(rows.lists(row.C_WIDTH + inputs, outputs)),
        }  # fmt: skip

    def ready(self) -> dict[str, Numbers] | None:
        """The columns of the calls that can be written now; None if there are none."""
        if not self._waiting:
            return None
        columns = self._waiting[0]
        if len(self._waiting) > 1:
            columns = {name: np.concatenate([part[name] for part in self._waiting]) for name in columns}
        order = np.argsort(columns["place"], kind="stable")
        columns = _reordered(columns, order)
        now = int((columns["place"] == self._written + np.arange(len(order))).cumprod().sum())
        self._waiting = [_cut(columns, now, len(order))] if now < len(order) else []
        if not now:
            return None
        self._written += now
        return _cut(columns, 0, now)

    def open_inputs(self) -> Numbers:
        """Values that went into calls that go on."""
        rows = self._open
        return rows.lists(row.C_WIDTH, rows.column(row.C_INPUTS))


def as_given(living: LiveValues, inputs: Numbers, first: Numbers) -> Numbers:
    """Inputs that a hook put in are read when the call ends: go back to the version that went in."""
    inputs = inputs.copy()
    if not len(living):
        return inputs
    while True:
        at = living.at(inputs)
        later = (at >= 0) & (living.producer[at] >= first) & (living.previous[at] >= 0)
        earlier = living.previous[at[later]]
        if (earlier >= inputs[later]).any():
            raise ValueError("a value replaces a later one")
        if not later.any():
            return inputs
        inputs[later] = earlier


def _totals(ops: Ops) -> tuple[Numbers, Numbers]:
    """Aten ops, and their time, before each op and after the last."""
    aten = ops.level == 1
    return offsets_of(aten), offsets_of(np.where(aten, ops.rows.column(row.O_DURATION), 0))


def _reordered(columns: dict[str, Numbers], order: Numbers) -> dict[str, Numbers]:
    found = {name: columns[name][order] for name in _FIXED}
    for name in ("input", "output"):
        counts = columns[f"{name}_counts"]
        found[f"{name}s"] = columns[f"{name}s"][spread(offsets_of(counts)[order], counts[order])]
        found[f"{name}_counts"] = counts[order]
    return found


def _cut(columns: dict[str, Numbers], first: int, end: int) -> dict[str, Numbers]:
    found = {name: columns[name][first:end] for name in _FIXED}
    for name in ("input", "output"):
        starts = offsets_of(columns[f"{name}_counts"])
        found[f"{name}s"] = columns[f"{name}s"][starts[first] : starts[end]]
        found[f"{name}_counts"] = columns[f"{name}_counts"][first:end]
    return found


class IdMap:
    """Where values stand in the trace: a value's id, less the ids before it that never came."""

    def __init__(self, absent: Numbers, there: Numbers | None = None) -> None:
        self._absent = absent
        self._there = there  # where few ids mean anything, those that do

    def __call__(self, ids: Numbers) -> Numbers:
        """Places of ids; references to new versions, and -1, stay as they are."""
        if self._there is not None:
            return np.where(ids >= 0, dense(self._there, ids), ids)
        if not len(self._absent):
            return ids
        return np.where(ids >= 0, ids - np.searchsorted(self._absent, ids), ids)


_END = 1 << 62


class Placed(NamedTuple):
    """A mark, and the first op and call after it."""

    mark: StepMark
    op: int
    call: int


def opening(opened: Sequence[StepMark], end: StepMark) -> int:
    """Which of the open marks one ends: the last of its name, -1 for none.

    An optimizer whose step raised leaves its mark open.
    """
    return next((at for at in range(len(opened) - 1, -1, -1) if opened[at].name == end.name), -1)


class Steps:
    """The marks of a recording so far."""

    def __init__(self) -> None:
        self.waiting: list[StepMark] = []  #: those whose ops have not come yet
        self._placed: list[Placed] = []

    def place(self, end: int, ops: Ops, calls: Numbers, first_call: int) -> None:
        """Place the marks before ``end``; ``calls`` are the ids of the calls that began in this batch."""
        now = [mark for mark in self.waiting if mark.op < end]
        self.waiting = [mark for mark in self.waiting if mark.op >= end]
        for mark in now:
            op = ops.base + int(np.searchsorted(ops.ids, mark.op))
            self._placed.append(Placed(mark, op, first_call + int(np.searchsorted(calls, mark.op))))

    def infos(self, begin: int, elapsed: int, ops: int, calls: int) -> list[StepInfo]:
        """The steps in order of their beginning; one that is still open goes on to the end."""
        opened: list[Placed] = []
        found: list[tuple[Placed, Placed]] = []
        for placed in self._placed:
            if placed.mark.begins:
                opened.append(placed)
            else:
                at = opening([each.mark for each in opened], placed.mark)
                found += [(opened.pop(at), placed)] if at >= 0 else []
        end = Placed(StepMark("", _END, begin + elapsed, begins=False), ops, calls)
        found += ((placed, end) for placed in opened)
        steps = []
        for first, last in sorted(found, key=lambda pair: pair[0].mark.op):
            start = max(first.mark.time - begin, 0)
            duration = last.mark.time - begin - start
            steps.append(StepInfo(first.mark.name, first.op, last.op, first.call, last.call, start, duration))
        return steps
