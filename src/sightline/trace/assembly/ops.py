"""Ops batch by batch: the forward op of each backward op, operators, durations, FLOPs.

`OpHistory` is what later batches need of earlier ops; `BatchOps` are the ops of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.trace import data as d
from sightline.trace.assembly import layout as row
from sightline.trace.assembly.arrays import (
    EMPTY,
    IntArray,
    Mask,
    Names,
    Rows,
    expand_ranges,
    offsets_of,
    positions_in,
)
from sightline.trace.assembly.batch import Operation, SourcePosition, Tables
from sightline.trace.assembly.layout import BACKWARD, FORWARD, RECOMPUTE

if TYPE_CHECKING:
    from sightline.trace.assembly.values import LiveValues

OP: Final = d.FLAVOURS.index("op")
OPAQUE: Final = d.FLAVOURS.index("opaque")
OPERATOR: Final = d.FLAVOURS.index("operator")
#: How many autograd nodes, counted from the last, keep the op that made them.
_NODES: Final = 1 << 17
#: How many ops are kept that later batches may refer to: opaque regions, and ops open at a batch's end.
_ANCHORS: Final = 1 << 14


class OpenApiCall:
    """An API call that other ops run in, and that may go on in later batches."""

    __slots__ = ("children", "duration", "least")

    def __init__(self, duration: int) -> None:
        self.duration = duration
        self.children = 0
        self.least = 0


class OpHistory:
    """What later batches need of earlier ops."""

    def __init__(self, first_sequence: int, late: set[int]) -> None:
        self.count = 0
        self.aten = 0  #: aten ops so far, and their time
        self.own = 0
        self.anchors: dict[int, int] = {}  #: id -> position, of ops that later ones may refer to
        self.backwards: set[int] = set()  #: ids of calls that run a backward pass
        self.open_calls: dict[int, OpenApiCall] = {}  #: by position, open when a batch ended
        self.late = late  #: ids of ops that were open when a batch ended
        self.last_op, self.last_call = -1, -1
        self.sequences: dict[int, int] = {}  #: thread -> its last autograd number
        self.first_sequence = first_sequence
        self.forward_sequences: dict[int, int] = {}  #: the same for ops outside a backward pass
        self.nodes = np.zeros((3, 0), dtype=np.int64)  #: autograd number, op, its call; sorted
        self._ids, self._base = EMPTY, 0

    def positions(self, ids: IntArray, now: IntArray) -> IntArray:
        """Positions of ops by id, of this batch, whose ids are ``now``, or of earlier ones; -1 if unknown."""
        positions = positions_in(now, ids)
        positions[positions >= 0] += self.count
        missing = np.flatnonzero((positions < 0) & (ids >= 0))
        if len(missing):
            before = positions_in(self._ids, ids[missing])
            before[before >= 0] += self._base
            for at in np.flatnonzero(before < 0).tolist():
                before[at] = self.anchors.get(int(ids[missing[at]]), -1)
            positions[missing] = before
        return positions

    def advance(self, ops: BatchOps) -> None:
        """Go on to the next batch: these ops are written."""
        self._ids, self._base = ops.ids, self.count
        self.count += len(ops.ids)
        for table in (self.anchors, self.open_calls):
            for key in list(table)[: max(0, len(table) - _ANCHORS)]:
                del table[key]


class BatchOps:
    """The ops of a batch while it is assembled."""

    def __init__(self, rows: Rows, tables: Tables, before: OpHistory, names: Names) -> None:
        self.rows, self.ids, self.before, self._names, self._tables = rows, rows.ids, before, names, tables
        self.base = before.count
        self.info = rows.column(row.O_INFO)
        operations = tables.operations
        self.names = np.array([names.id(one.name) for one in operations] or [0], dtype=np.int64)[self.info]
        self.flavour = np.array([one.flavour for one in operations] or [0], dtype=np.int64)[self.info]
        self.level = (self.flavour == OP).astype(np.int64)
        bits = rows.column(row.O_BITS)
        self.phase = bits & ((1 << row.FLAG_SHIFT) - 1)
        self.flags = (bits >> row.FLAG_SHIFT) & 0x7F
        self.thread = bits >> row.THREAD_SHIFT
        self.stack = rows.column(row.O_STACK)
        self.parent_ids = rows.column(row.O_PARENT)
        self.parent = before.positions(self.parent_ids, self.ids)
        self.call = EMPTY  #: positions of module calls, set by the assembler
        self.input_counts = rows.column(row.O_INPUTS)
        self.output_counts = rows.column(0) - row.O_WIDTH - self.input_counts
        if len(rows) and self.output_counts.min() < 0:
            raise ValueError("an op has more inputs than its row")
        self.inputs = rows.lists(row.O_WIDTH, self.input_counts)  #: ids of values
        self.outputs = rows.lists(row.O_WIDTH + self.input_counts, self.output_counts)
        self.forward = np.full(len(self.ids), -1, dtype=np.int64)
        self.forward_call = np.full(len(self.ids), -1, dtype=np.int64)
        self._batch_makers = EMPTY
        self._note_anchors(operations)

    def _note_anchors(self, operations: list[Operation]) -> None:
        before = self.before
        starts = np.array([one.backward for one in operations] or [False])[self.info]
        self.starts_backward = starts
        lasting = starts | (self.flavour == OPAQUE)
        if before.late:
            lasting |= np.isin(self.ids, list(before.late))
        for at in np.flatnonzero(lasting).tolist():
            before.anchors[int(self.ids[at])] = self.base + at
        before.backwards.update(self.ids[starts].tolist())

    # -- forward and backward ----------------------------------------------------------------------------

    def find_forward_ops(self, recomputes: Mask, live: LiveValues) -> None:
        """Link every backward op to the forward op whose autograd node it belongs to."""
        node = self.rows.column(row.O_NODE)
        in_backward = (node != -1) & (self.level == 1)
        again = in_backward & recomputes[self.stack]
        self.phase[again] = RECOMPUTE
        self.phase[(self.level == 0) & (self.phase == BACKWARD) & recomputes[self.stack]] = RECOMPUTE
        makes = (self.level == 1) | (self.flavour == OPAQUE)
        self._note_nodes(np.flatnonzero(makes))
        nodes = self.before.nodes
        asking = np.flatnonzero(makes & (node >= 0) & ~again)
        if len(asking) and nodes.shape[1]:
            keys = (nodes[0] << 32) + nodes[1]
            at = np.searchsorted(keys, (node[asking] << 32) + self.base + asking, side="right") - 1
            fits = (at >= 0) & (nodes[0][at] == node[asking])
            self.forward[asking[fits]] = nodes[1][at[fits]]
            self.forward_call[asking[fits]] = nodes[2][at[fits]]
        self._batch_makers = self._makers(live)
        self._link_accumulations(np.flatnonzero((node == -2) & in_backward & ~again), live)
        self._link_first_gradients(live)

    def _note_nodes(self, making: IntArray) -> None:
        """Add the autograd nodes of these ops to the table of nodes."""
        before, sequence = self.before, self.rows.column(row.O_SEQUENCE)
        parts = [np.zeros((3, 0), dtype=np.int64)]
        for thread in np.unique(self.thread[making]).tolist():
            here = making[self.thread[making] == thread]
            now = sequence[here]
            reached = np.maximum.accumulate(np.concatenate([[before.sequences.get(thread, -1)], now]))
            earlier = reached[:-1]
            ahead = now > earlier
            parts.append(np.stack([now[ahead] - 1, self.base + here[ahead], self.call[here[ahead]]]))
            # An op recorded from outside made all the nodes counted since; one recorded below autograd made
            # only the last, and the op before it made the others.
            more = np.where(ahead & (earlier >= 0), np.minimum(now - 1 - earlier, _NODES), 0)
            if more.any():
                owner = np.searchsorted(making, here) - (not self._tables.whole_ops)
                op = np.where(owner >= 0, self.base + making[owner], before.last_op)
                call = np.where(owner >= 0, self.call[making[owner]], before.last_call)
                numbers = np.arange(int(more.sum())) + np.repeat(earlier - (np.cumsum(more) - more), more)
                extra = np.stack([numbers, np.repeat(op, more), np.repeat(call, more)])
                parts.append(extra[:, extra[1] >= 0])
            before.sequences[thread] = int(reached[-1])
        if len(making):
            before.last_op, before.last_call = self.base + int(making[-1]), int(self.call[making[-1]])
        new = np.concatenate(parts, axis=1)
        new = new[:, np.lexsort((new[1], new[0]))]
        old = before.nodes
        nodes = np.concatenate([old, new], axis=1)
        if old.shape[1] and new.shape[1] and new[0, 0] <= old[0, -1]:  # each thread counts on its own
            nodes = nodes[:, np.lexsort((nodes[1], nodes[0]))]
        if nodes.shape[1] > _NODES + _NODES // 4:
            nodes = nodes[:, np.sort(np.argpartition(nodes[1], -_NODES)[-_NODES:])]
        before.nodes = nodes

    def _makers(self, live: LiveValues) -> IntArray:
        """For each live value the aten op of this batch that first returned it; -1 for none."""
        owners = np.repeat(np.arange(len(self.ids)), self.output_counts)
        rows = live.at(self.outputs)
        mine = (self.level[owners] == 1) & (rows >= 0)
        makers = np.full(len(live), -1, dtype=np.int64)
        makers[rows[mine][::-1]] = owners[mine][::-1]  # the first of equal ones is written last
        makers[live.maker >= 0] = -1
        return makers

    def note_makers(self, live: LiveValues) -> None:
        """Store with the values what later batches need of the ops that made them."""
        rows = np.flatnonzero(self._batch_makers >= 0)
        ops = self._batch_makers[rows]
        live.maker[rows], live.maker_call[rows] = self.base + ops, self.call[ops]
        live.maker_forward[rows] = self.forward[ops]
        live.maker_forward_call[rows] = self.forward_call[ops]

    def _input_makers(self, ops: IntArray, live: LiveValues) -> Iterator[tuple[int, int, int]]:
        """The inputs of some ops: the op, the value's row, and the op of this batch that made it."""
        counts = self.input_counts[ops]
        rows = live.at(self.inputs[expand_ranges(offsets_of(self.input_counts)[ops], counts)])
        makers = np.where(rows >= 0, self._batch_makers[rows], -1) if len(live) else rows
        return zip(np.repeat(ops, counts).tolist(), rows.tolist(), makers.tolist(), strict=True)

    def _link_accumulations(self, unlinked: IntArray, live: LiveValues) -> None:
        """Link an op that adds into a leaf's gradient to the forward op of that gradient."""
        linked = -1
        for op, input_row, maker in self._input_makers(unlinked, live):
            if op == linked:
                continue
            if maker >= 0:
                forward, call = int(self.forward[maker]), int(self.forward_call[maker])
            elif input_row >= 0 and live.maker[input_row] >= 0:
                forward, call = int(live.maker_forward[input_row]), int(live.maker_forward_call[input_row])
            else:
                continue
            if maker != op and forward >= 0:
                self.forward[op], self.forward_call[op] = forward, call
                linked = op

    def _link_first_gradients(self, live: LiveValues) -> None:
        """Link what ``backward()`` runs before its first node: the gradient of the loss."""
        self.phase[self.starts_backward & (self.phase == FORWARD)] = BACKWARD
        inside = np.flatnonzero((self.parent >= 0) & (self.phase == FORWARD))
        if len(inside):
            inside = inside[np.isin(self.parent_ids[inside], list(self.before.backwards))]
        self.phase[inside] = BACKWARD
        linked = -1
        for op, input_row, maker in self._input_makers(inside, live):
            if op == linked:
                continue
            if 0 <= maker < op:
                self.forward[op], self.forward_call[op] = self.base + maker, self.call[maker]
            elif maker < 0 and input_row >= 0 and live.maker[input_row] >= 0:
                self.forward[op] = live.maker[input_row]
                self.forward_call[op] = live.maker_call[input_row]
            else:
                continue
            linked = op

    # -- the rest ----------------------------------------------------------------------------------------

    def advanced(self) -> Mask:
        """Which ops outside a backward pass have made an autograd node."""
        sequence = self.rows.column(row.O_SEQUENCE)
        aten = (self.level == 1) & (self.phase != BACKWARD)
        advanced = np.zeros(len(sequence), dtype=bool)
        before = self.before
        for thread in np.unique(self.thread[aten]).tolist():
            here = np.flatnonzero(aten & (self.thread == thread))
            start = before.forward_sequences.get(thread, before.first_sequence)
            advanced[here] = sequence[here] > np.concatenate([[start], sequence[here][:-1]])
            before.forward_sequences[thread] = int(sequence[here][-1])
        return advanced

    def name_operators(self) -> None:
        """Rename calls written as operators: ``x @ y`` instead of ``x.matmul(y)``."""
        calls = np.flatnonzero((self.level == 0) & (self.stack >= 0))
        keys, which = np.unique((self.stack[calls] << 32) + self.info[calls], return_inverse=True)
        symbols = [self._tables.operator(int(key >> 32), int(key & 0xFFFFFFFF)) for key in keys.tolist()]
        names = np.array([-1 if one is None else self._names.id(one) for one in symbols] or [-1])[which]
        written = names >= 0
        self.flavour[calls[written]] = OPERATOR
        self.names[calls[written]] = names[written]

    def durations(self) -> tuple[IntArray, dict[int, int]]:
        """Host time without the recorder's, and for API calls without what torch adds to each op inside.

        The second result are new durations of calls that began in an earlier batch, by position.
        """
        durations = np.maximum(self.rows.column(row.O_DURATION), 0)
        inner = np.flatnonzero(self.parent >= self.base)
        parents = self.parent[inner] - self.base
        count = np.bincount(parents, minlength=len(durations))
        with np.errstate(invalid="ignore"):  # of a damaged file
            least = np.bincount(parents, durations[inner], minlength=len(durations)).astype(np.int64)
        before, outer = self.before, self.level == 0
        for at in np.flatnonzero(np.isin(self.ids, list(before.late))).tolist() if before.late else ():
            opened = before.open_calls[self.base + at] = OpenApiCall(int(durations[at]))
            opened.children, opened.least = int(count[at]), int(least[at])
        passage = self._tables.aten_passage
        changed: dict[int, int] = {}
        old = np.flatnonzero((self.parent >= 0) & (self.parent < self.base))
        for position, spent in zip(self.parent[old].tolist(), durations[old].tolist(), strict=True):
            call = before.open_calls.get(position)
            if call is not None:
                call.children, call.least = call.children + 1, call.least + spent
                changed[position] = max(call.duration - call.children * passage, call.least)
        durations[outer] = np.maximum(durations - count * passage, least)[outer]
        return durations, changed

    def flops(self, live: LiveValues, result: IntArray) -> IntArray:
        """The FLOPs of every op: -1 if unknown, `UNCOUNTED` where a heavy op that ended has no formula."""
        operations = self._tables.operations
        counted = np.array([one.counted for one in operations] or [False])[self.info] & (self.level == 1)
        flops = np.full(len(self.ids), -1, dtype=np.int64)
        ops = np.flatnonzero(counted)
        if len(ops):
            flops[ops] = self._counted_flops(ops, live, result)
        missed = np.array([one.multiplies for one in operations] or [False])[self.info] & (flops < 0)
        missed &= (self.flags & (d.RAISED | d.UNFINISHED)) == 0
        flops[missed & ((self.level == 1) | (self.flavour == OPAQUE))] = d.UNCOUNTED
        return flops

    def _counted_flops(self, ops: IntArray, live: LiveValues, result: IntArray) -> list[int]:
        """The FLOPs of some ops, computed once for each distinct signature."""
        form = self.rows.column(row.O_FORM)
        signatures = zip(
            self.info[ops].tolist(), form[ops].tolist(),
            _metas(live, self.inputs, self.input_counts, ops),
            _metas(live, self.outputs, self.output_counts, ops), strict=True,
        )  # fmt: skip
        cache: dict[tuple[int, int, bytes, bytes], int] = {}
        flops = []
        for op, signature in zip(ops.tolist(), signatures, strict=True):
            if signature not in cache:
                inputs, outputs = (tuple(np.frombuffer(one, np.int64).tolist()) for one in signature[2:])
                known = -1 not in inputs + outputs
                cache[signature] = (
                    self._tables.flops(*signature[:2], int(result[op]), inputs, outputs) if known else -1
                )
            flops.append(cache[signature])
        return flops


def _metas(live: LiveValues, ids: IntArray, counts: IntArray, ops: IntArray) -> list[bytes]:
    """The metadata of the values that some ops read or make: for each op as bytes, which hash fast."""
    starts, counts = offsets_of(counts)[ops], counts[ops]
    rows = live.at(ids[expand_ranges(starts, counts)])
    metas = (np.where(rows >= 0, live.meta[rows], -1) if len(live) else rows).tobytes()
    return [metas[start:end] for start, end in pairwise((8 * offsets_of(counts)).tolist())]


def recompute_stacks(places: list[SourcePosition], codes: list[d.CodeInfo]) -> Mask:
    """Which stacks are inside a checkpoint's second forward; position -1 is the empty stack."""
    again = {
        number
        for number, code in enumerate(codes)
        if code.file.endswith("checkpoint.py")
        and code.function.split(".")[-1] in ("recompute_fn", "unpack_hook")
    }
    reentrant = {
        number
        for number, code in enumerate(codes)
        if code.file.endswith("checkpoint.py") and code.function.endswith("CheckpointFunction.backward")
    }
    recomputes = np.zeros(len(places) + 1, dtype=bool)
    if not again and not reentrant:
        return recomputes
    inside = np.zeros(len(places) + 1, dtype=bool)
    engine = {n for n, code in enumerate(codes) if code.function.split(".")[-1] == "_engine_run_backward"}
    for node, place in enumerate(places):
        parent, code = place.parent, place.code
        inside[node] = (inside[parent] or code in reentrant) and code not in engine
        recomputes[node] = (recomputes[parent] and code not in engine) or code in again or inside[node]
    return recomputes
