"""Ops batch by batch: which forward op a backward op belongs to, what was written as an operator, times.

`OpsSoFar` is what has to be known of earlier ops; `Ops` are the ones of a batch in the making.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.trace import data as d
from sightline.trace.assembly import layout as row
from sightline.trace.assembly.arrays import NONE, Mask, Names, Numbers, Rows, dense, offsets_of, spread
from sightline.trace.assembly.batch import Operation, SourcePosition, Tables
from sightline.trace.assembly.layout import BACKWARD, FORWARD, RECOMPUTE

if TYPE_CHECKING:
    from sightline.trace.assembly.values import LiveValues

OP: Final = d.FLAVOURS.index("op")
OPAQUE: Final = d.FLAVOURS.index("opaque")
OPERATOR: Final = d.FLAVOURS.index("operator")
#: Autograd nodes whose makers are remembered: of the last so many.
_NODES: Final = 1 << 17
#: Ops that others may refer to long after: opaque regions, and what was open when a batch ended.
_ANCHORS: Final = 1 << 14


class OpenApiCall:
    """An API call that others are inside of, and that may go on in later batches."""

    __slots__ = ("children", "duration", "least")

    def __init__(self, duration: int) -> None:
        self.duration = duration
        self.children = 0
        self.least = 0


class OpsSoFar:
    """What has to be known of earlier ops."""

    def __init__(self, first_sequence: int, late: set[int]) -> None:
        self.count = 0
        self.aten = 0  #: aten ops so far, and their time
        self.own = 0
        self.anchors: dict[int, int] = {}  #: id -> place, of ops that later ones may refer to
        self.backwards: set[int] = set()  #: ids of calls that run a backward pass
        self.held: dict[int, OpenApiCall] = {}  #: by place, of API calls that were open when a batch ended
        self.late = late  #: ids of ops that were
        self.last_op, self.last_call = -1, -1
        self.sequences: dict[int, int] = {}  #: the last autograd number of each thread
        self.first_sequence = first_sequence
        self.started: dict[int, int] = {}  #: the same for ops outside a backward pass
        self.nodes = np.zeros((3, 0), dtype=np.int64)  #: autograd number, op, its call; sorted
        self._ids, self._base = NONE, 0

    def place(self, ids: Numbers, now: Numbers) -> Numbers:
        """Places of ops by id, of this batch, whose ids are ``now``, or of earlier ones; -1 if unknown."""
        found = dense(now, ids)
        found[found >= 0] += self.count
        missing = np.flatnonzero((found < 0) & (ids >= 0))
        if len(missing):
            before = dense(self._ids, ids[missing])
            before[before >= 0] += self._base
            for at in np.flatnonzero(before < 0).tolist():
                before[at] = self.anchors.get(int(ids[missing[at]]), -1)
            found[missing] = before
        return found

    def advance(self, ops: Ops) -> None:
        """The ops of a batch are in the columns."""
        self._ids, self._base = ops.ids, self.count
        self.count += len(ops.ids)
        for kept in (self.anchors, self.held):
            for key in list(kept)[: max(0, len(kept) - _ANCHORS)]:
                del kept[key]


class Ops:
    """The ops of a batch in the making."""

    def __init__(self, rows: Rows, tables: Tables, before: OpsSoFar, names: Names) -> None:
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
        self.parent = before.place(self.parent_ids, self.ids)
        self.call = NONE  #: places of module calls, set by who knows them
        self.input_counts = rows.column(row.O_INPUTS)
        self.output_counts = rows.column(0) - row.O_WIDTH - self.input_counts
        if len(rows) and self.output_counts.min() < 0:
            raise ValueError("an op has more inputs than its row")
        self.inputs = rows.lists(row.O_WIDTH, self.input_counts)  #: ids of values
        self.outputs = rows.lists(row.O_WIDTH + self.input_counts, self.output_counts)
        self.forward = np.full(len(self.ids), -1, dtype=np.int64)
        self.forward_call = np.full(len(self.ids), -1, dtype=np.int64)
        self._made_by = NONE
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

    def find_forward_ops(self, recomputes: Mask, living: LiveValues) -> None:
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
        self._made_by = self._makers(living)
        self._link_accumulations(np.flatnonzero((node == -2) & in_backward & ~again), living)
        self._link_first_gradients(living)

    def _note_nodes(self, making: Numbers) -> None:
        """The numbers of the autograd nodes each op has made."""
        before, sequence = self.before, self.rows.column(row.O_SEQUENCE)
        found = [np.zeros((3, 0), dtype=np.int64)]
        for thread in np.unique(self.thread[making]).tolist():
            here = making[self.thread[making] == thread]
            now = sequence[here]
            reached = np.maximum.accumulate(np.concatenate([[before.sequences.get(thread, -1)], now]))
            earlier = reached[:-1]
            ahead = now > earlier
            found.append(np.stack([now[ahead] - 1, self.base + here[ahead], self.call[here[ahead]]]))
            # An op seen from outside has made all of them; one seen below autograd only the last, and those
            # before it were made when the op before had run.
            more = np.where(ahead & (earlier >= 0), np.minimum(now - 1 - earlier, _NODES), 0)
            if more.any():
                owner = np.searchsorted(making, here) - (not self._tables.whole_ops)
                place = np.where(owner >= 0, self.base + making[owner], before.last_op)
                call = np.where(owner >= 0, self.call[making[owner]], before.last_call)
                numbers = np.arange(int(more.sum())) + np.repeat(earlier - (np.cumsum(more) - more), more)
                extra = np.stack([numbers, np.repeat(place, more), np.repeat(call, more)])
                found.append(extra[:, extra[1] >= 0])
            before.sequences[thread] = int(reached[-1])
        if len(making):
            before.last_op, before.last_call = self.base + int(making[-1]), int(self.call[making[-1]])
        new = np.concatenate(found, axis=1)
        new = new[:, np.lexsort((new[1], new[0]))]
        old = before.nodes
        nodes = np.concatenate([old, new], axis=1)
        if old.shape[1] and new.shape[1] and new[0, 0] <= old[0, -1]:  # threads count for themselves
            nodes = nodes[:, np.lexsort((nodes[1], nodes[0]))]
        if nodes.shape[1] > _NODES + _NODES // 4:
            nodes = nodes[:, np.sort(np.argpartition(nodes[1], -_NODES)[-_NODES:])]
        before.nodes = nodes

    def _makers(self, living: LiveValues) -> Numbers:
        """Of every living value the aten op that first returned it, if that is one of this batch; else -1."""
        owners = np.repeat(np.arange(len(self.ids)), self.output_counts)
        rows = living.at(self.outputs)
        mine = (self.level[owners] == 1) & (rows >= 0)
        makers = np.full(len(living), -1, dtype=np.int64)
        makers[rows[mine][::-1]] = owners[mine][::-1]  # the first of equal ones is written last
        makers[living.maker >= 0] = -1
        return makers

    def note_makers(self, living: LiveValues) -> None:
        """Write down what later batches may ask of the makers of values."""
        rows = np.flatnonzero(self._made_by >= 0)
        ops = self._made_by[rows]
        living.maker[rows], living.maker_call[rows] = self.base + ops, self.call[ops]
        living.maker_forward[rows] = self.forward[ops]
        living.maker_forward_call[rows] = self.forward_call[ops]

    def _given(self, ops: Numbers, living: LiveValues) -> Iterator[tuple[int, int, int]]:
        """The inputs of some ops: op, living row of the value, op of this batch that made it."""
        counts = self.input_counts[ops]
        rows = living.at(self.inputs[spread(offsets_of(self.input_counts)[ops], counts)])
        makers = np.where(rows >= 0, self._made_by[rows], -1) if len(living) else rows
        return zip(np.repeat(ops, counts).tolist(), rows.tolist(), makers.tolist(), strict=True)

    def _link_accumulations(self, lost: Numbers, living: LiveValues) -> None:
        """An op that adds into a leaf's gradient belongs where the gradient came from."""
        linked = -1
        for op, held, maker in self._given(lost, living):
            if op == linked:
                continue
            if maker >= 0:
                forward, call = int(self.forward[maker]), int(self.forward_call[maker])
            elif held >= 0 and living.maker[held] >= 0:
                forward, call = int(living.maker_forward[held]), int(living.maker_forward_call[held])
            else:
                continue
            if maker != op and forward >= 0:
                self.forward[op], self.forward_call[op] = forward, call
                linked = op

    def _link_first_gradients(self, living: LiveValues) -> None:
        """What ``backward()`` does before its first node: it makes the gradient of the loss."""
        self.phase[self.starts_backward & (self.phase == FORWARD)] = BACKWARD
        inside = np.flatnonzero((self.parent >= 0) & (self.phase == FORWARD))
        if len(inside):
            inside = inside[np.isin(self.parent_ids[inside], list(self.before.backwards))]
        self.phase[inside] = BACKWARD
        linked = -1
        for op, held, maker in self._given(inside, living):
            if op == linked:
                continue
            if 0 <= maker < op:
                self.forward[op], self.forward_call[op] = self.base + maker, self.call[maker]
            elif maker < 0 and held >= 0 and living.maker[held] >= 0:
                self.forward[op] = living.maker[held]
                self.forward_call[op] = living.maker_call[held]
            else:
                continue
            linked = op

    # -- the rest ----------------------------------------------------------------------------------------

    def advanced(self) -> Mask:
        """Which ops outside a backward pass have made an autograd node."""
        sequence = self.rows.column(row.O_SEQUENCE)
        aten = (self.level == 1) & (self.phase != BACKWARD)
        found = np.zeros(len(sequence), dtype=bool)
        before = self.before
        for thread in np.unique(self.thread[aten]).tolist():
            here = np.flatnonzero(aten & (self.thread == thread))
            start = before.started.get(thread, before.first_sequence)
            found[here] = sequence[here] > np.concatenate([[start], sequence[here][:-1]])
            before.started[thread] = int(sequence[here][-1])
        return found

    def operators(self) -> None:
        """Tell ``x @ y`` from ``x.matmul(y)`` by the instruction that made the call."""
        calls = np.flatnonzero((self.level == 0) & (self.stack >= 0))
        keys, which = np.unique((self.stack[calls] << 32) + self.info[calls], return_inverse=True)
        found = [self._tables.operator(int(key >> 32), int(key & 0xFFFFFFFF)) for key in keys.tolist()]
        names = np.array([-1 if one is None else self._names.id(one) for one in found] or [-1])[which]
        written = names >= 0
        self.flavour[calls[written]] = OPERATOR
        self.names[calls[written]] = names[written]

    def durations(self) -> tuple[Numbers, dict[int, int]]:
        """Host time less our own, and for API calls less what torch adds to each op inside them.

        Also the new durations of calls that began in an earlier batch.
        """
        durations = np.maximum(self.rows.column(row.O_DURATION), 0)
        inner = np.flatnonzero(self.parent >= self.base)
        parents = self.parent[inner] - self.base
        count = np.bincount(parents, minlength=len(durations))
        least = np.bincount(parents, weights=durations[inner], minlength=len(durations)).astype(np.int64)
        before, outer = self.before, self.level == 0
        for at in np.flatnonzero(np.isin(self.ids, list(before.late))).tolist() if before.late else ():
            held = before.held[self.base + at] = OpenApiCall(int(durations[at]))
            held.children, held.least = int(count[at]), int(least[at])
        passage = self._tables.aten_passage
        changed: dict[int, int] = {}
        old = np.flatnonzero((self.parent >= 0) & (self.parent < self.base))
        for place, spent in zip(self.parent[old].tolist(), durations[old].tolist(), strict=True):
            known = before.held.get(place)
            if known is not None:
                known.children, known.least = known.children + 1, known.least + spent
                changed[place] = max(known.duration - known.children * passage, known.least)
        durations[outer] = np.maximum(durations - count * passage, least)[outer]
        return durations, changed

    def flops(self, living: LiveValues, result: Numbers) -> Numbers:
        """The FLOPs of every op; of those that ended, `UNCOUNTED` where a formula is missed."""
        operations = self._tables.operations
        counted = np.array([one.counted for one in operations] or [False])[self.info] & (self.level == 1)
        flops = np.full(len(self.ids), -1, dtype=np.int64)
        wanted = np.flatnonzero(counted)
        if len(wanted):
            flops[wanted] = self._known_flops(wanted, living, result)
        missed = np.array([one.multiplies for one in operations] or [False])[self.info] & (flops < 0)
        missed &= (self.flags & (d.RAISED | d.UNFINISHED)) == 0
        flops[missed & ((self.level == 1) | (self.flavour == OPAQUE))] = d.UNCOUNTED
        return flops

    def _known_flops(self, wanted: Numbers, living: LiveValues, result: Numbers) -> list[int]:
        """The FLOPs of some ops, each distinct signature worked out once."""
        form = self.rows.column(row.O_FORM)
        signatures = zip(
            self.info[wanted].tolist(), form[wanted].tolist(),
            _metas(living, self.inputs, self.input_counts, wanted),
            _metas(living, self.outputs, self.output_counts, wanted), strict=True,
        )  # fmt: skip
        known: dict[tuple[int, int, bytes, bytes], int] = {}
        found = []
        for op, signature in zip(wanted.tolist(), signatures, strict=True):
            if signature not in known:
                given, made = (tuple(np.frombuffer(one, dtype=np.int64).tolist()) for one in signature[2:])
                known[signature] = (
                    -1
                    if -1 in given + made
                    else self._tables.flops(*signature[:2], int(result[op]), given, made)
                )
            found.append(known[signature])
        return found


def _metas(living: LiveValues, ids: Numbers, counts: Numbers, ops: Numbers) -> list[bytes]:
    """What the values look like that some ops read or make: of each op as bytes, which are hashed fast."""
    starts, counts = offsets_of(counts)[ops], counts[ops]
    rows = living.at(ids[spread(starts, counts)])
    metas = (np.where(rows >= 0, living.meta[rows], -1) if len(living) else rows).tobytes()
    return [metas[start:end] for start, end in pairwise((8 * offsets_of(counts)).tolist())]


def recompute_stacks(places: list[SourcePosition], codes: list[d.CodeInfo]) -> Mask:
    """Which stacks run inside a checkpoint's second forward; position -1 is the empty stack."""
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
    found = np.zeros(len(places) + 1, dtype=bool)
    if not again and not reentrant:
        return found
    inside = np.zeros(len(places) + 1, dtype=bool)
    engine = {n for n, code in enumerate(codes) if code.function.split(".")[-1] == "_engine_run_backward"}
    for node, place in enumerate(places):
        parent, code = place.parent, place.code
        inside[node] = (inside[parent] or code in reentrant) and code not in engine
        found[node] = (found[parent] and code not in engine) or code in again or inside[node]
    return found
