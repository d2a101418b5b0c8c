"""From streams to a `TraceData`: everything that could be left for later is done here.

Ids become dense, storages are told apart, backward ops find their forward ops, code objects become lines
and columns, and what only torch knows (FLOPs, argument names) is stored. It runs once, after the block, or
for a snapshot of the run so far.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.recording import session as s
from sightline.recording import values as v
from sightline.recording.buffers import Rows
from sightline.recording.costs import flops_of
from sightline.recording.lanes import BACKWARD, FORWARD, RECOMPUTE, THREAD_SHIFT
from sightline.recording.operations import OP, OPAQUE, OpInfo
from sightline.recording.places import frame_columns, operator_names
from sightline.recording.torchapi import OpOverload
from sightline.recording.versions import alias_versions, extent, spans_of
from sightline.trace import data as d
from sightline.trace.forms import Form

if TYPE_CHECKING:
    from sightline.recording.session import Session

Numbers = NDArray[np.int64]


def build(session: Session) -> d.TraceData:
    """The recording so far. The session goes on unharmed if it is still running."""
    names = _Names()
    forms = list(session.arguments.forms.all)
    op_rows, calls_rows = _op_rows(session), _call_rows(session)
    frames, codes, files = frame_columns(session.stacks)
    ops = _Ops(session, op_rows, names, forms)
    ops.call_ids = _dense(calls_rows.column(1), ops.call_ids)
    recomputes = _recompute_stacks(frames, codes)
    ops.find_forward_ops(recomputes, session)
    ops.calls_of_backward()
    values = _Values(session, ops, names)
    ops.inputs, ops.outputs = values.dense(ops.inputs), values.dense(ops.outputs)
    ops.opaque_outputs(values)
    values.add_versions(session, ops)
    ops.operators(session)
    columns = ops.columns(values, forms, session)
    calls = _calls(calls_rows, ops, values, recomputes)
    value_columns = values.columns(ops, session)
    return d.TraceData(
        ops=columns,
        values=value_columns,
        calls=calls,
        frames=frames,
        modules=session.module_infos or session.modules.infos(),
        codes=codes,
        files=files,
        metas=list(session.values.metas),
        forms=forms,
        names=names.all,
        storages=values.storages,
        schemas=_schemas(session.infos),
        info=_info(session, value_columns),
    )


class _Names:
    """Strings, each stored once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._ids: dict[str, int] = {}

    def id(self, name: str) -> int:
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = len(self.all)
            self.all.append(name)
        return found


def _op_rows(session: Session) -> Rows:
    rows = session.ops.rows()
    pending = [lane.open_op for lane in list(session.lanes.values()) if lane.open_op is not None]
    if not pending:
        return rows
    extra: list[int] = []
    for number, info, form, stack, start, ids in pending:
        extra += [
            s.O_WIDTH + len(ids), number, info, form, session.arguments.nothing, stack, -1, -1, -1, -1,
            start - session.begin, 0, d.UNFINISHED << s.FLAG_SHIFT, len(ids), *ids,
        ]  # fmt: skip
    return Rows(np.concatenate([rows.flat, np.array(extra, dtype=np.int64)]))


def _call_rows(session: Session) -> Rows:
    rows = session.calls.rows()
    now = s.clock()
    extra: list[int] = []
    order = len(rows)
    for lane in list(session.lanes.values()):
        for call in reversed(lane.calls):
            if call.input_form < 0 and call.frame is not None:
                local = call.frame.f_locals
                session.read_inputs(call, local.get("args", ()), local.get("kwargs"))
            duration = now - call.start - (lane.spent - call.spent)
            extra += session.call_row(
                call, [], session.arguments.nothing, d.UNFINISHED, duration, 1 << 60, order + len(extra)
            )
    if not extra:
        return rows
    return Rows(np.concatenate([rows.flat, np.array(extra, dtype=np.int64)]))


def _dense(ids: Numbers, wanted: Numbers) -> Numbers:
    """Positions of ids in a sorted list of ids; -1 for what is not there."""
    if not len(ids):
        return np.full(len(wanted), -1, dtype=np.int64)
    at = np.searchsorted(ids, wanted)
    at[at == len(ids)] = 0
    return np.where(ids[at] == wanted, at, -1)


def _offsets(counts: Numbers) -> Numbers:
    made = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=made[1:])
    return made


class _Ops:
    """The op columns in the making."""

    def __init__(self, session: Session, rows: Rows, names: _Names, forms: list[Form]) -> None:
        self.rows = rows
        self.ids = rows.column(1)
        self.info = rows.column(s.O_INFO)
        infos = session.infos
        self.names = np.array([names.id(info.name) for info in infos] or [0], dtype=np.int64)[self.info]
        self.flavour = np.array([info.flavour for info in infos] or [0], dtype=np.int64)[self.info]
        self.level = (self.flavour == OP).astype(np.int64)
        bits = rows.column(s.O_BITS)
        self.phase = bits & ((1 << s.FLAG_SHIFT) - 1)
        self.flags = (bits >> s.FLAG_SHIFT) & 0x7F
        self.thread = bits >> THREAD_SHIFT
        self.call_ids = rows.column(s.O_CALL)
        self.stack = rows.column(s.O_STACK)
        self.parent = _dense(self.ids, rows.column(s.O_PARENT))
        self.input_counts = rows.column(s.O_INPUTS)
        self.output_counts = rows.column(0) - s.O_WIDTH - self.input_counts
        self.inputs = rows.lists(s.O_WIDTH, self.input_counts)
        self.outputs = rows.lists(s.O_WIDTH + self.input_counts, self.output_counts)
        self.forward = np.full(len(self.ids), -1, dtype=np.int64)
        self._names = names

    def find_forward_ops(self, recomputes: NDArray[np.bool_], session: Session) -> None:
        """Link every backward op to the forward op whose autograd node it belongs to."""
        sequence, node = self.rows.column(s.O_SEQUENCE), self.rows.column(s.O_NODE)
        in_backward = (node != -1) & (self.level == 1)
        again = in_backward & recomputes[self.stack]
        self.phase[again] = RECOMPUTE
        api_again = (self.level == 0) & (self.phase == BACKWARD) & recomputes[self.stack]
        self.phase[api_again] = RECOMPUTE
        owner: dict[int, int] = {}
        last: dict[int, int] = {}
        links = self.forward
        makes_nodes = ((self.level == 1) | (self.flavour == OPAQUE)).tolist()
        listed = zip(sequence.tolist(), node.tolist(), self.thread.tolist(), makes_nodes, strict=True)
        again_list = again.tolist()
        for op, (now, evaluated, thread, makes) in enumerate(listed):
            if not makes:
                continue
            before = last.get(thread, -1)
            if now > before:
                if before >= 0:
                    previous = self._last_op
                    for number in range(before, now - 1):  # nodes made after the previous op had run
                        owner.setdefault(number, previous)
                owner[now - 1] = op
                last[thread] = now
            if evaluated >= 0 and not again_list[op]:
                links[op] = owner.get(evaluated, -1)
            self._last_op = op
        self._link_accumulations(node, in_backward & ~again)
        self._link_first_gradients(session)

    _last_op = -1

    def _link_accumulations(self, node: Numbers, in_backward: NDArray[np.bool_]) -> None:
        """An op that adds into a leaf's gradient belongs where the gradient came from."""
        lost = np.flatnonzero((node == -2) & in_backward)
        if not len(lost):
            return
        starts = _offsets(self.input_counts)
        maker = self._makers()
        for op in lost.tolist():
            for value in self.inputs[starts[op] : starts[op + 1]].tolist():
                source = maker.get(value, -1)
                if source >= 0 and source != op and self.forward[source] >= 0:
                    self.forward[op] = self.forward[source]
                    break

    def _link_first_gradients(self, session: Session) -> None:
        """What ``backward()`` does before its first node: it makes the gradient of the loss."""
        starts_backward = np.array([info.backward for info in session.infos] or [False])[self.info]
        self.phase[starts_backward & (self.phase == FORWARD)] = BACKWARD
        inside = np.flatnonzero((self.parent >= 0) & (self.phase == FORWARD))
        inside = inside[starts_backward[self.parent[inside]]]
        if not len(inside):
            return
        self.phase[inside] = BACKWARD
        starts = _offsets(self.input_counts)
        makers = self._makers()
        for op in inside.tolist():
            sources = (makers.get(value, -1) for value in self.inputs[starts[op] : starts[op + 1]].tolist())
            self.forward[op] = next((source for source in sources if 0 <= source < op), -1)

    def opaque_outputs(self, values: _Values) -> None:
        """The outputs of an opaque op are the values that turned out to be its own."""
        opaque = self.flavour == OPAQUE
        if not opaque.any():
            return
        made = np.flatnonzero(values.producer >= 0)
        made = made[opaque[values.producer[made]]]
        owners = np.repeat(np.arange(len(self.ids)), self.output_counts)
        every, owner = np.concatenate([self.outputs, made]), np.concatenate([owners, values.producer[made]])
        self.outputs = every[np.argsort(owner, kind="stable")]
        self.output_counts = np.bincount(owner, minlength=len(self.ids))

    def _makers(self) -> dict[int, int]:
        """The aten op that made each value."""
        made_starts = _offsets(self.output_counts)
        outputs = self.outputs.tolist()
        makers: dict[int, int] = {}
        for op in np.flatnonzero(self.level == 1).tolist():
            for value in outputs[made_starts[op] : made_starts[op + 1]]:
                makers.setdefault(value, op)
        return makers

    def calls_of_backward(self) -> None:
        """A backward op belongs to the module call of its forward op."""
        linked = self.forward >= 0
        self.call_ids[linked] = self.call_ids[self.forward[linked]]

    def operators(self, session: Session) -> None:
        """Tell ``x @ y`` from ``x.matmul(y)`` by the instruction that made the call."""
        found = operator_names(session.stacks)
        flavours, names = self.flavour, self.names
        for op in np.flatnonzero(self.level == 0).tolist():
            stack = int(self.stack[op])
            symbol = found(stack, session.infos[int(self.info[op])].name) if stack >= 0 else None
            if symbol is not None:
                flavours[op] = d.FLAVOURS.index("operator")
                names[op] = self._names.id(symbol)

    def columns(self, values: _Values, forms: list[Form], session: Session) -> d.OpColumns:
        rows = self.rows
        result = rows.column(s.O_RESULT)
        result[result < 0] = session.arguments.one_tensor
        inputs, outputs = self.inputs, self.outputs
        form = rows.column(s.O_FORM)
        flops = flops_of(
            session.infos, self.info, form, result, self.level, self.input_counts, self.output_counts, inputs,
            outputs, values.meta, session.values.metas, forms,
        )  # fmt: skip
        call = self.call_ids
        return d.OpColumns(
            name=_i32(self.names), level=_i8(self.level), flavour=_i8(self.flavour), phase=_i8(self.phase),
            call=_i32(call), frame=_i32(self.stack), parent=_i32(self.parent), forward=_i32(self.forward),
            form=_i32(form), result=_i32(result), start=rows.column(s.O_START),
            duration=np.maximum(rows.column(s.O_DURATION), 0), flops=flops, flags=_i8(self.flags),
            thread=_i8(self.thread), input_offsets=_offsets(self.input_counts), inputs=_i32(inputs),
            output_offsets=_offsets(self.output_counts), outputs=_i32(outputs),
        )  # fmt: skip


def _recompute_stacks(frames: d.FrameColumns, codes: list[d.CodeInfo]) -> NDArray[np.bool_]:
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
    found = np.zeros(len(frames) + 1, dtype=bool)
    inside = np.zeros(len(frames) + 1, dtype=bool)
    engine = {n for n, code in enumerate(codes) if code.function.split(".")[-1] == "_engine_run_backward"}
    for node, (parent, code) in enumerate(zip(frames.parent.tolist(), frames.code.tolist(), strict=True)):
        inside[node] = (inside[parent] or code in reentrant) and code not in engine
        found[node] = (found[parent] and code not in engine) or code in again or inside[node]
    return found


class _Values:
    """The value columns in the making, and how to find a value by the id it had while recording."""

    def __init__(self, session: Session, ops: _Ops, names: _Names) -> None:
        rows = session.values.stream.rows()
        session.values.fresh.pack()
        plain = np.array(session.values.fresh.packed, dtype=np.int64).reshape(-1, 3)
        ids = np.concatenate([rows.column(1), plain[:, 0]])
        order = np.argsort(ids, kind="stable")

        def column(position: int, default: int) -> Numbers:
            rest = np.full(len(plain), default, dtype=np.int64)
            return np.concatenate([rows.column(position), rest])[order]

        self.ids = ids[order]
        self.meta = np.concatenate([rows.column(v.V_META), plain[:, 1]])[order]
        self.producer = _dense(ops.ids, np.concatenate([rows.column(v.V_PRODUCER), plain[:, 2]])[order])
        self.kind = column(v.V_KIND, v.ACTIVATION)
        self.slot = column(v.V_SLOT, 0)
        self.flags = column(v.V_FLAGS, 0)
        self.previous = self.dense(column(v.V_PREVIOUS, -1))
        self.base = self.dense(column(v.V_BASE, -1))
        self.offset = column(v.V_OFFSET, 0)
        self.name = np.full(len(self.ids), -1, dtype=np.int64)
        self._learned(session, names)
        self.storage, self.storages = self._storages(session, column(v.V_STORAGE, 0))

    def dense(self, wanted: Numbers) -> Numbers:
        return _dense(self.ids, wanted)

    def _learned(self, session: Session, names: _Names) -> None:
        """Names and kinds that became known after a value was written."""
        kinds, texts = session.values.kinds, session.values.names
        found = self.dense(np.fromiter(kinds, dtype=np.int64, count=len(kinds)))
        self.kind[found[found >= 0]] = np.array(list(kinds.values()), dtype=np.int64)[found >= 0]
        found = self.dense(np.fromiter(texts, dtype=np.int64, count=len(texts)))
        numbers = np.array([names.id(text) for text in texts.values()], dtype=np.int64)
        self.name[found[found >= 0]] = numbers[found >= 0]

    def _storages(self, session: Session, address: Numbers) -> tuple[Numbers, Numbers]:
        """A storage number for every value: a view shares its base's, a version its predecessor's."""
        storage: list[int] = []
        sizes: list[int] = []
        seen: dict[int, int] = {}  # addresses of tensors not made here, which outlive the block's own
        metas = session.values.metas
        reach = [extent(one) for one in metas]
        known = session.values.storage_bytes
        offset = self.offset.tolist()
        listed = zip(
            self.ids.tolist(), self.meta.tolist(), address.tolist(), self.previous.tolist(),
            self.base.tolist(), strict=True,
        )  # fmt: skip
        for at, (value, look, place, old, view) in enumerate(listed):
            source = view if view >= 0 else old
            if offset[at] == v.INHERITED:
                offset[at] = offset[source] if source >= 0 else 0
            if source >= 0:
                number = storage[source]
            elif place and value in known:
                number = seen.setdefault(place, len(sizes))
            else:
                number = len(sizes)
            if number == len(sizes):
                sizes.append(0)
            size = known.get(value) or reach[look] + offset[at] * metas[look].itemsize
            sizes[number] = max(sizes[number], size)
            storage.append(number)
        self.offset = np.array(offset, dtype=np.int64)
        return np.array(storage, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def add_versions(self, session: Session, ops: _Ops) -> None:
        """Give the views and bases of what was changed in place the versions they have since."""
        mutating = (ops.flags & d.MUTATES).astype(bool)
        if not mutating.any():
            return
        spans = spans_of(self.meta, self.offset, session.values.metas)
        new = alias_versions(
            mutating, _offsets(ops.input_counts), ops.inputs, _offsets(ops.output_counts), ops.outputs,
            self.storage, self.producer, self.previous, spans,
        )  # fmt: skip
        like = np.array(new.like, dtype=np.int64)
        for name in ("meta", "offset", "storage", "kind", "flags"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(self, name)[like]]))
        count = len(like)
        made = np.isin(self.kind, [v.INPUT, v.EXTERNAL, v.KIND["constant"]])
        self.kind[-count or len(self.kind) :][made[-count or len(made) :]] = v.ACTIVATION
        self.name = np.concatenate([self.name, self.name[like]])
        self.slot = np.concatenate([self.slot, np.full(count, -1, dtype=np.int64)])
        self.producer = np.concatenate([self.producer, np.array(new.producer, dtype=np.int64)])
        self.previous = np.concatenate([self.previous, np.array(new.previous, dtype=np.int64)])
        self.base = np.concatenate([self.base, np.array(new.base, dtype=np.int64)])

    def columns(self, ops: _Ops, session: Session) -> d.ValueColumns:
        made = self.producer >= 0
        gradient = made & (self.kind == v.ACTIVATION)
        gradient[made] &= ops.phase[self.producer[made]] == BACKWARD
        self.kind[gradient] = v.KIND["gradient"]
        self.flags[_has_gradient(ops, self.producer, self.meta, session)] |= d.REQUIRES_GRAD
        return d.ValueColumns(
            meta=_i32(self.meta), storage=_i32(self.storage), offset=self.offset, kind=_i8(self.kind),
            name=_i32(self.name), producer=_i32(self.producer), slot=_i32(self.slot),
            previous=_i32(self.previous), base=_i32(self.base), flags=_i8(self.flags),
        )  # fmt: skip


def _has_gradient(ops: _Ops, producer: Numbers, meta: Numbers, session: Session) -> NDArray[np.bool_]:
    """Floating results of ops that made an autograd node."""
    sequence = ops.rows.column(s.O_SEQUENCE)
    aten = (ops.level == 1) & (ops.phase != BACKWARD)
    advanced = np.zeros(len(sequence), dtype=bool)
    for thread in np.unique(ops.thread):
        here = np.flatnonzero(aten & (ops.thread == thread))
        numbers = sequence[here]
        if len(numbers):
            start = np.concatenate([[session.first_sequence], numbers[:-1]])
            advanced[here] = numbers > start
    floating = np.array(
        [one.dtype.startswith(("float", "bfloat", "complex")) for one in session.values.metas] or [False]
    )
    found = np.zeros(len(producer), dtype=bool)
    made = producer >= 0
    found[made] = advanced[producer[made]] & floating[meta[made]]
    return found


def _calls(rows: Rows, ops: _Ops, values: _Values, recomputes: NDArray[np.bool_]) -> d.CallColumns:
    ids, op_ids = rows.column(1), ops.ids
    phase = rows.column(s.C_PHASE)
    phase[(phase == BACKWARD) & recomputes[rows.column(s.C_STACK)]] = RECOMPUTE
    first = np.searchsorted(op_ids, rows.column(s.C_FIRST)).astype(np.int64)
    inputs, outputs = rows.column(s.C_INPUTS), rows.column(s.C_OUTPUTS)
    given = _as_given(values, values.dense(rows.lists(s.C_WIDTH, inputs)), np.repeat(first, inputs))
    order = np.argsort(np.argsort(rows.column(s.C_ORDER), kind="stable"), kind="stable")
    return d.CallColumns(
        module=_i32(rows.column(s.C_MODULE)), index=_i32(rows.column(s.C_INDEX)),
        parent=_i32(_dense(ids, rows.column(s.C_PARENT))), frame=_i32(rows.column(s.C_STACK)),
        phase=_i8(phase), start=rows.column(s.C_START),
        duration=np.maximum(rows.column(s.C_DURATION), 0),
        first_op=_i32(first),
        end_op=_i32(np.searchsorted(op_ids, rows.column(s.C_END))),
        flags=_i8(rows.column(s.C_FLAGS)), input_form=_i32(rows.column(s.C_INPUT_FORM)),
        output_form=_i32(rows.column(s.C_OUTPUT_FORM)), input_offsets=_offsets(inputs),
        inputs=_i32(given), output_offsets=_offsets(outputs),
        outputs=_i32(values.dense(rows.lists(s.C_WIDTH + inputs, outputs))), order=_i32(order),
    )  # fmt: skip


def _as_given(values: _Values, inputs: Numbers, first: Numbers) -> Numbers:
    """Inputs of calls were read when the call ended: go back to the version that went in."""
    while True:
        later = (values.producer[inputs] >= first) & (values.previous[inputs] >= 0)
        if not later.any():
            return inputs
        inputs = np.where(later, values.previous[inputs], inputs)


def _schemas(infos: list[OpInfo]) -> dict[str, tuple[str, ...]]:
    return {
        info.name: tuple(argument.name for argument in info.function._schema.arguments)
        for info in infos
        if isinstance(info.function, OpOverload)
    }


def _info(session: Session, values: d.ValueColumns) -> dict[str, Any]:
    external = int((values.kind == v.EXTERNAL).sum())
    return {
        "name": session.name, "ops": session.level, "torch": str(torch.__version__),
        "python": platform.python_version(), "pid": os.getpid(), "duration_ns": session.elapsed(),
        "faults": list(session.faults), "fault_count": session.fault_count, "external": external,
        "exception": session.exception, "compiled": session.compiled, "threads": len(session.lanes),
    }  # fmt: skip


def _i32(column: Numbers) -> d.I32:
    return column.astype(np.int32)


def _i8(column: Numbers) -> d.I8:
    return column.astype(np.int8)
