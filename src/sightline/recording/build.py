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
from numpy.typing import NDArray

from sightline.recording import session as s
from sightline.recording import values as v
from sightline.recording.buffers import Rows
from sightline.recording.costs import flops_of
from sightline.recording.lanes import BACKWARD, RECOMPUTE
from sightline.recording.operations import OP, OpInfo
from sightline.recording.places import frame_columns, operator_names
from sightline.recording.torchapi import OpOverload, torch
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
    ops.find_forward_ops(frames, codes)
    ops.calls_of_backward()
    values = _values(session, ops, names)
    ops.operators(session)
    columns = ops.columns(values, forms, session)
    calls = _calls(calls_rows, ops.ids, values)
    return d.TraceData(
        ops=columns,
        values=values.columns,
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
        info=_info(session, values.columns),
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
            s.O_WIDTH + len(ids), number, info, form, session.arguments.nothing, stack, -1, -1, 0, -1, -1,
            start - session.begin, 0, d.UNFINISHED, 0, len(ids), 0, *ids,
        ]  # fmt: skip
    return Rows(np.concatenate([rows.flat, np.array(extra, dtype=np.int64)]))


def _call_rows(session: Session) -> Rows:
    rows = session.calls.rows()
    now = s.clock()
    extra: list[int] = []
    order = len(rows)
    for lane in list(session.lanes.values()):
        for call in reversed(lane.calls):
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
        self.phase = rows.column(s.O_PHASE)
        self.call_ids = rows.column(s.O_CALL)
        self.stack = rows.column(s.O_STACK)
        self.parent = _dense(self.ids, rows.column(s.O_PARENT))
        self.flags = rows.column(s.O_FLAGS)
        self.thread = rows.column(s.O_THREAD)
        self.input_counts = rows.column(s.O_INPUTS)
        self.output_counts = rows.column(s.O_OUTPUTS)
        self.inputs = rows.lists(s.O_WIDTH, self.input_counts)
        self.outputs = rows.lists(s.O_WIDTH + self.input_counts, self.output_counts)
        self.forward = np.full(len(self.ids), -1, dtype=np.int64)
        self._names = names

    def find_forward_ops(self, frames: d.FrameColumns, codes: list[d.CodeInfo]) -> None:
        """Link every backward op to the forward op whose autograd node it belongs to."""
        sequence, node = self.rows.column(s.O_SEQUENCE), self.rows.column(s.O_NODE)
        in_backward = (node != -1) & (self.level == 1)
        recomputes = _recompute_stacks(frames, codes)
        again = in_backward & recomputes[self.stack]
        self.phase[again] = RECOMPUTE
        api_again = (self.level == 0) & (self.phase == BACKWARD) & recomputes[self.stack]
        self.phase[api_again] = RECOMPUTE
        owner: dict[int, int] = {}
        last: dict[int, int] = {}
        links = self.forward
        listed = zip(sequence.tolist(), node.tolist(), self.thread.tolist(), self.level.tolist(), strict=True)
        again_list = again.tolist()
        for op, (now, evaluated, thread, level) in enumerate(listed):
            if not level:
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

    _last_op = -1

    def _link_accumulations(self, node: Numbers, in_backward: NDArray[np.bool_]) -> None:
        """An op that adds into a leaf's gradient belongs where the gradient came from."""
        lost = np.flatnonzero((node == -2) & in_backward)
        if not len(lost):
            return
        starts = _offsets(self.input_counts)
        maker: dict[int, int] = {}
        made_starts = _offsets(self.output_counts)
        outputs = self.outputs.tolist()
        for op in range(len(self.ids)):
            for value in outputs[made_starts[op] : made_starts[op + 1]]:
                maker.setdefault(value, op)
        for op in lost.tolist():
            for value in self.inputs[starts[op] : starts[op + 1]].tolist():
                source = maker.get(value, -1)
                if source >= 0 and source != op and self.forward[source] >= 0:
                    self.forward[op] = self.forward[source]
                    break

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
        inputs, outputs = values.dense(self.inputs), values.dense(self.outputs)
        form = rows.column(s.O_FORM)
        flops = flops_of(session.infos, self.info, form, result, self.level, self.input_counts,
                         self.output_counts, inputs, outputs, values.columns.meta, session.values.metas, forms)  # fmt: skip
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
        if code.file.endswith("checkpoint.py") and code.function.split(".")[-1] in ("recompute_fn", "unpack_hook")
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
    """The value columns, and how to find a value by the id it had while recording."""

    def __init__(self, ids: Numbers, columns: d.ValueColumns, storages: Numbers) -> None:
        self.ids = ids
        self.columns = columns
        self.storages = storages

    def dense(self, wanted: Numbers) -> Numbers:
        return _dense(self.ids, wanted)


def _values(session: Session, ops: _Ops, names: _Names) -> _Values:
    rows = session.values.stream.rows()
    fresh = session.values.fresh
    fresh.pack()
    plain = np.array(fresh.packed, dtype=np.int64).reshape(-1, 3)
    ids = np.concatenate([rows.column(1), plain[:, 0]])
    order = np.argsort(ids, kind="stable")

    def column(position: int, default: int) -> Numbers:
        rest = np.full(len(plain), default, dtype=np.int64)
        return np.concatenate([rows.column(position), rest])[order]

    meta = np.concatenate([rows.column(v.V_META), plain[:, 1]])[order]
    producer_ids = np.concatenate([rows.column(v.V_PRODUCER), plain[:, 2]])[order]
    ids = ids[order]
    producer = _dense(ops.ids, producer_ids)
    kind = column(v.V_KIND, v.ACTIVATION)
    for value, learned in session.values.kinds.items():
        at = int(_dense(ids, np.array([value]))[0])
        if at >= 0:
            kind[at] = learned
    name = np.full(len(ids), -1, dtype=np.int64)
    for value, text in session.values.names.items():
        at = int(_dense(ids, np.array([value]))[0])
        if at >= 0:
            name[at] = names.id(text)
    made = producer >= 0
    gradient = made & (kind == v.ACTIVATION)
    gradient[made] &= ops.phase[producer[made]] == BACKWARD
    kind[gradient] = v.KIND["gradient"]
    previous = _dense(ids, column(v.V_PREVIOUS, -1))
    base = _dense(ids, column(v.V_BASE, -1))
    storage, sizes = _storages(session, ids, meta, column(v.V_STORAGE, 0), column(v.V_OFFSET, 0), previous, base)
    flags = column(v.V_FLAGS, 0)
    flags[_has_gradient(ops, producer, meta, session)] |= d.REQUIRES_GRAD
    columns = d.ValueColumns(
        meta=_i32(meta), storage=_i32(storage), offset=column(v.V_OFFSET, 0), kind=_i8(kind),
        name=_i32(name), producer=_i32(producer), slot=_i32(column(v.V_SLOT, 0)),
        previous=_i32(previous), base=_i32(base), flags=_i8(flags),
    )  # fmt: skip
    return _Values(ids, columns, sizes)


def _storages(session: Session, ids: Numbers, meta: Numbers, address: Numbers, offset: Numbers,
              previous: Numbers, base: Numbers) -> tuple[Numbers, Numbers]:  # fmt: skip
    """A storage number for every value: a view shares its base's, a version its predecessor's."""
    storage = np.full(len(ids), -1, dtype=np.int64)
    sizes: list[int] = []
    seen: dict[int, int] = {}  # addresses of tensors not made here, which outlive the block's own
    metas = session.values.metas
    reach = [_reach(one) for one in metas]
    known = session.values.storage_bytes
    listed = zip(
        ids.tolist(), meta.tolist(), address.tolist(), offset.tolist(), previous.tolist(), base.tolist(),
        strict=True,
    )  # fmt: skip
    for at, (value, look, place, start, old, view) in enumerate(listed):
        source = view if view >= 0 else old
        if 0 <= source < at:
            number = int(storage[source])
        elif place and value in known:
            number = seen.setdefault(place, len(sizes))
        else:
            number = len(sizes)
        if number == len(sizes):
            sizes.append(0)
        size = known.get(value, reach[look] + start * metas[look].itemsize)
        if number >= 0:
            sizes[number] = max(sizes[number], size)
        storage[at] = number
    return storage, np.array(sizes, dtype=np.int64)


def _reach(meta: d.TensorMeta) -> int:
    """Bytes from the first to the last element."""
    if meta.stride is None or 0 in meta.shape:
        return meta.nbytes
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=False))
    return (last + 1) * meta.itemsize


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
    floating = np.array([one.dtype.startswith(("float", "bfloat", "complex")) for one in session.values.metas] or [False])
    found = np.zeros(len(producer), dtype=bool)
    made = producer >= 0
    found[made] = advanced[producer[made]] & floating[meta[made]]
    return found


def _calls(rows: Rows, op_ids: Numbers, values: _Values) -> d.CallColumns:
    ids = rows.column(1)
    inputs, outputs = rows.column(s.C_INPUTS), rows.column(s.C_OUTPUTS)
    order = np.argsort(np.argsort(rows.column(s.C_ORDER), kind="stable"), kind="stable")
    return d.CallColumns(
        module=_i32(rows.column(s.C_MODULE)), index=_i32(rows.column(s.C_INDEX)),
        parent=_i32(_dense(ids, rows.column(s.C_PARENT))), frame=_i32(rows.column(s.C_STACK)),
        phase=_i8(rows.column(s.C_PHASE)), start=rows.column(s.C_START),
        duration=np.maximum(rows.column(s.C_DURATION), 0),
        first_op=_i32(np.searchsorted(op_ids, rows.column(s.C_FIRST))),
        end_op=_i32(np.searchsorted(op_ids, rows.column(s.C_END))),
        flags=_i8(rows.column(s.C_FLAGS)), input_form=_i32(rows.column(s.C_INPUT_FORM)),
        output_form=_i32(rows.column(s.C_OUTPUT_FORM)), input_offsets=_offsets(inputs),
        inputs=_i32(values.dense(rows.lists(s.C_WIDTH, inputs))), output_offsets=_offsets(outputs),
        outputs=_i32(values.dense(rows.lists(s.C_WIDTH + inputs, outputs))), order=_i32(order),
    )  # fmt: skip


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

