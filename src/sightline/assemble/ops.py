"""Ops batch by batch: names, levels, phases, operators, durations, FLOPs.

`OpHistory` remembers the earlier ops that later batches need; `BatchOps` are the ops of one batch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.assemble.batch import SourcePosition, Tables
from sightline.data import trace_data as d
from sightline.data.arrays import (
    EMPTY,
    IntArray,
    Mask,
    Names,
    Rows,
    expand_ranges,
    offsets_of,
    positions_in,
)
from sightline.schema import streams
from sightline.schema.tables import BACKWARD

if TYPE_CHECKING:
    from sightline.assemble.values import LiveValues

OP: Final = d.FLAVOURS.index("op")
OPAQUE: Final = d.FLAVOURS.index("opaque")
OPERATOR: Final = d.FLAVOURS.index("operator")
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
    """The state of earlier ops that later batches need."""

    def __init__(self, tables: Tables, late: set[int]) -> None:
        self.count = 0
        self.aten = 0  #: aten ops so far, and their time
        self.own = 0
        self.anchors: dict[int, int] = {}  #: id -> position, of ops that later ones may refer to
        self.backwards: set[int] = set()  #: ids of calls that run a backward pass
        self.open_calls: dict[int, OpenApiCall] = {}  #: by position, open when a batch ended
        self.late = late  #: ids of ops that were open when a batch ended
        self.last_op, self.last_call = -1, -1
        #: thread -> its last autograd number; the thread that began the recording is the first
        self.sequences = {0: tables.first_sequence, **tables.sequences}
        self.forward_sequences = dict(self.sequences)  #: the same for ops outside a backward pass
        self.first_sequence = tables.first_sequence
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
        self.rows, self.ids, self.before, self._names, self.tables = rows, rows.ids, before, names, tables
        self.base = before.count
        self.info = rows.column("info")
        operations = tables.operations
        self.names = np.array([names.id(one.name) for one in operations] or [0], dtype=np.int64)[self.info]
        self.flavour = np.array([one.flavour for one in operations] or [0], dtype=np.int64)[self.info]
        self.level = (self.flavour == OP).astype(np.int64)
        bits = rows.column("bits")
        self.phase = bits & ((1 << streams.FLAG_SHIFT) - 1)
        self.flags = (bits >> streams.FLAG_SHIFT) & 0x7F
        self.thread = bits >> streams.THREAD_SHIFT
        self.stack = rows.column("stack")
        self.parent_ids = rows.column("parent")
        self.parent = before.positions(self.parent_ids, self.ids)
        self.call = EMPTY  #: positions of module calls, set by the assembler
        self.input_counts = rows.column("input_count")
        self.output_counts = rows.column("length") - streams.OP.width - self.input_counts
        if len(rows) and self.output_counts.min() < 0:
            raise ValueError("an op has more inputs than its row")
        self.inputs = rows.lists(streams.OP.width, self.input_counts)  #: ids of values
        self.outputs = rows.lists(streams.OP.width + self.input_counts, self.output_counts)
        self.forward = np.full(len(self.ids), -1, dtype=np.int64)
        self.forward_call = np.full(len(self.ids), -1, dtype=np.int64)
        starts = np.array([one.backward for one in operations] or [False])[self.info]
        self.starts_backward = starts
        lasting = starts | (self.flavour == OPAQUE)  # later ops may refer to these
        if before.late:
            lasting |= np.isin(self.ids, list(before.late))
        for at in np.flatnonzero(lasting).tolist():
            before.anchors[int(self.ids[at])] = self.base + at
        before.backwards.update(self.ids[starts].tolist())

    def advanced(self) -> Mask:
        """A mask of the ops outside a backward pass that have made an autograd node."""
        sequence = self.rows.column("sequence")
        aten = (self.level == 1) & (self.phase != BACKWARD)
        advanced = np.zeros(len(sequence), dtype=bool)
        before = self.before
        for thread in np.unique(self.thread[aten]).tolist():
            here = np.flatnonzero(aten & (self.thread == thread))
            start = before.forward_sequences.get(thread, before.first_sequence)
            advanced[here] = sequence[here] > np.concatenate([[start], sequence[here][:-1]])
            advanced[here[self.after_gaps(here)]] = False
            before.forward_sequences[thread] = int(sequence[here][-1])
        return advanced

    def after_gaps(self, ops: IntArray) -> IntArray:
        """Positions among some ops of a thread before which rows of that thread may be lost."""
        first = np.searchsorted(self.ids[ops], np.array(self.tables.gaps, dtype=np.int64))
        return first[first < len(ops)]

    def name_operators(self) -> None:
        """Rename calls written as operators: ``x @ y`` instead of ``x.matmul(y)``."""
        calls = np.flatnonzero((self.level == 0) & (self.stack >= 0))
        keys, which = np.unique((self.stack[calls] << 32) + self.info[calls], return_inverse=True)
        symbols = [self.tables.operator(int(key >> 32), int(key & 0xFFFFFFFF)) for key in keys.tolist()]
        names = np.array([-1 if one is None else self._names.id(one) for one in symbols] or [-1])[which]
        written = names >= 0
        self.flavour[calls[written]] = OPERATOR
        self.names[calls[written]] = names[written]

    def durations(self) -> tuple[IntArray, dict[int, int]]:
        """Host time without the recorder's, and for API calls without the time torch adds to each op inside.

        The second result are new durations of calls that began in an earlier batch, by position.
        """
        durations = np.maximum(self.rows.column("duration"), 0)
        inner = np.flatnonzero(self.parent >= self.base)
        parents = self.parent[inner] - self.base
        count = np.bincount(parents, minlength=len(durations))
        with np.errstate(invalid="ignore"):  # of a damaged file
            least = np.bincount(parents, durations[inner], minlength=len(durations)).astype(np.int64)
        before, outer = self.before, self.level == 0
        for at in np.flatnonzero(np.isin(self.ids, list(before.late))).tolist() if before.late else ():
            opened = before.open_calls[self.base + at] = OpenApiCall(int(durations[at]))
            opened.children, opened.least = int(count[at]), int(least[at])
        passage = self.tables.aten_passage
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
        """The FLOPs of every op: -1 if unknown, `UNCOUNTED` where a heavy op that ended has no formula.

        An op that raised has none: a checkpoint ends its second forward before the last kernel of it. They
        are computed once for each distinct signature.
        """
        operations = self.tables.operations
        ended = (self.flags & (d.RAISED | d.UNFINISHED)) == 0
        counted = np.array([one.counted for one in operations] or [False])[self.info] & (self.level == 1)
        flops = np.full(len(self.ids), -1, dtype=np.int64)
        ops = np.flatnonzero(counted & ended)
        signatures = zip(
            self.info[ops].tolist(), self.rows.column("form")[ops].tolist(),
            _metas(live, self.inputs, self.input_counts, ops),
            _metas(live, self.outputs, self.output_counts, ops), strict=True,
        )  # fmt: skip
        cache: dict[tuple[int, int, bytes, bytes], int] = {}
        counts = []
        for op, signature in zip(ops.tolist(), signatures, strict=True):
            if signature not in cache:
                inputs, outputs = (tuple(np.frombuffer(one, np.int64).tolist()) for one in signature[2:])
                known = -1 not in inputs + outputs
                cache[signature] = (
                    self.tables.flops(*signature[:2], int(result[op]), inputs, outputs) if known else -1
                )
            counts.append(cache[signature])
        flops[ops] = counts
        missed = np.array([one.multiplies for one in operations] or [False])[self.info] & (flops < 0)
        flops[missed & ended & ((self.level == 1) | (self.flavour == OPAQUE))] = d.UNCOUNTED
        return flops


def _metas(live: LiveValues, ids: IntArray, counts: IntArray, ops: IntArray) -> list[bytes]:
    """The metadata of the values that some ops read or make: for each op as bytes, which hash fast."""
    starts, counts = offsets_of(counts)[ops], counts[ops]
    rows = live.at(ids[expand_ranges(starts, counts)])
    metas = (np.where(rows >= 0, live.meta[rows], -1) if len(live) else rows).tobytes()
    return [metas[start:end] for start, end in pairwise((8 * offsets_of(counts)).tolist())]


def first_gradient_stacks(places: list[SourcePosition], codes: list[d.CodeInfo]) -> Mask:
    """A mask of the stacks on which a backward pass makes its first gradient; position -1 is the empty stack.

    Without API calls nothing else says that the pass has begun.
    """
    makers = [
        number
        for number, code in enumerate(codes)
        if code.function == "_make_grads"
        and code.file.replace("\\", "/").endswith("torch/autograd/__init__.py")
    ]
    stacks = np.zeros(len(places) + 1, dtype=bool)
    if makers:
        stacks[:-1] = np.isin([place.code for place in places], makers)
    return stacks


def recompute_stacks(places: list[SourcePosition], codes: list[d.CodeInfo]) -> Mask:
    """A mask of the stacks inside a checkpoint's second forward; position -1 is the empty stack."""
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
