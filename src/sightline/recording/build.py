"""From streams to a `TraceData`: everything that could be left for later is done here.

Ids become dense, storages are told apart, backward ops find their forward ops, code objects become lines
and columns, and what only torch knows (FLOPs, argument names) is stored. It runs once, after the block, or
for a snapshot of the run so far.
"""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.recording import layout as row
from sightline.recording import values as v
from sightline.recording.buffers import Rows
from sightline.recording.build_ops import Ops, op_rows, recompute_stacks
from sightline.recording.build_stats import stat_columns
from sightline.recording.build_values import Values
from sightline.recording.calibration import passage
from sightline.recording.columns import Names, Numbers, dense, i8, i32, offsets_of
from sightline.recording.lanes import BACKWARD, RECOMPUTE
from sightline.recording.operations import OpInfo
from sightline.recording.places import frame_columns
from sightline.recording.steps import StepMark
from sightline.recording.torchapi import OpOverload
from sightline.trace import data as d
from sightline.trace.stores import Store

if TYPE_CHECKING:
    from sightline.recording.session import Session


def build(session: Session) -> d.TraceData:
    """The recording so far. The session goes on unharmed if it is still running."""
    names = Names()
    forms = list(session.arguments.forms.all)
    rows, calls_rows = op_rows(session), _call_rows(session)
    frames, codes, files = frame_columns(session.stacks)
    ops = Ops(session, rows, names)
    ops.call_ids = dense(calls_rows.column(1), ops.call_ids)
    recomputes = recompute_stacks(frames, codes)
    ops.find_forward_ops(recomputes, session)
    ops.calls_of_backward()
    values = Values(session, ops, names)
    ops.inputs, ops.outputs = values.dense(ops.inputs), values.dense(ops.outputs)
    ops.opaque_outputs(values)
    values.add_versions(session, ops)
    ops.operators(session)
    columns = ops.columns(values, forms, session)
    calls = _calls(calls_rows, ops, values, recomputes)
    value_columns = values.columns(ops, session)
    stats = stat_columns(session, ops, values)
    captures, store = _captures(session, values)
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
        stats=stats,
        steps=_steps(session, ops, calls_rows),
        captures=captures,
        store=store,
    )


def _call_rows(session: Session) -> Rows:
    rows = session.calls.rows()
    now = time.perf_counter_ns()
    extra: list[int] = []
    for lane in list(session.lanes.values()):
        for call in reversed(lane.calls()):
            if call.input_form < 0 and call.frame is not None:
                local = call.frame.f_locals
                session.read_inputs(call, local.get("args", ()), local.get("kwargs"))
            duration = now - call.start - (lane.spent - call.spent)
            extra += session.call_row(call, [], session.arguments.nothing, d.UNFINISHED, duration, 1 << 60)
    if not extra:
        return rows
    return Rows(np.concatenate([rows.flat, np.array(extra, dtype=np.int64)]))


def _calls(rows: Rows, ops: Ops, values: Values, recomputes: NDArray[np.bool_]) -> d.CallColumns:
    ids, op_ids = rows.column(1), ops.ids
    bits, module = rows.column(row.C_BITS), rows.column(row.C_MODULE)
    phase, flags = bits & ((1 << row.FLAG_SHIFT) - 1), bits >> row.FLAG_SHIFT
    phase[(phase == BACKWARD) & recomputes[rows.column(row.C_STACK)]] = RECOMPUTE
    # A checkpoint ends its second forward by an exception of its own, as soon as it has what it needs.
    flags[(phase == RECOMPUTE) & (flags == d.RAISED)] = 0
    first = np.searchsorted(op_ids, ids).astype(np.int64)
    end = np.searchsorted(op_ids, rows.column(row.C_END)).astype(np.int64)
    inputs = rows.column(row.C_INPUTS)
    outputs = rows.column(0) - row.C_WIDTH - inputs
    given = _as_given(values, values.dense(rows.lists(row.C_WIDTH, inputs)), np.repeat(first, inputs))
    return d.CallColumns(
        module=i32(module), index=i32(_ranks(module)),
        parent=i32(dense(ids, rows.column(row.C_PARENT))), frame=i32(rows.column(row.C_STACK)),
        phase=i8(phase), start=rows.column(row.C_START),
        duration=_durations(rows, ops, first, end),
        first_op=i32(first),
        end_op=i32(end),
        flags=i8(flags), input_form=i32(rows.column(row.C_INPUT_FORM)),
        output_form=i32(rows.column(row.C_OUTPUT_FORM)), input_offsets=offsets_of(inputs),
        inputs=i32(given), output_offsets=offsets_of(outputs),
        outputs=i32(values.dense(rows.lists(row.C_WIDTH + inputs, outputs))), order=i32(rows.written()),
    )  # fmt: skip


def _ranks(module: Numbers) -> Numbers:
    """How many calls of the same module came before each."""
    order = np.argsort(module, kind="stable")
    first = np.searchsorted(module[order], module[order])
    ranks = np.empty_like(module)
    ranks[order] = np.arange(len(module)) - first
    return ranks


def _durations(rows: Rows, ops: Ops, first: Numbers, end: Numbers) -> Numbers:
    """Host time less our own, and less what torch adds to each op and API call inside."""
    durations = rows.column(row.C_DURATION)
    aten = offsets_of(ops.level)
    own = offsets_of(np.where(ops.level == 1, ops.rows.column(row.O_DURATION), 0))
    inside = aten[end] - aten[first]
    calls = (end - first) - inside
    watched = inside * passage().aten + calls * passage().api
    least: Numbers = own[end] - own[first]
    found: Numbers = np.maximum(durations - watched, least)
    return found


def _as_given(values: Values, inputs: Numbers, first: Numbers) -> Numbers:
    """Inputs of calls were read when the call ended: go back to the version that went in."""
    while True:
        later = (values.producer[inputs] >= first) & (values.previous[inputs] >= 0)
        if not later.any():
            return inputs
        inputs = np.where(later, values.previous[inputs], inputs)


def _captures(session: Session, values: Values) -> tuple[list[d.CaptureInfo], Store | None]:
    """The tensors that were kept, and where they are."""
    if session.captures is None:
        return [], None
    captures = session.captures.captures(lambda ids: values.dense(np.array(ids, dtype=np.int64)).tolist())
    return captures, session.captures.store()


def _steps(session: Session, ops: Ops, calls: Rows) -> list[d.StepInfo]:
    """The steps in order of their beginning; one that is still open goes on to the end."""
    call_ids = calls.column(1)
    open_steps: list[StepMark] = []
    found: list[tuple[StepMark, StepMark]] = []
    for mark in list(session.steps):
        if mark.begins:
            open_steps.append(mark)
        elif open_steps:
            found.append((open_steps.pop(), mark))
    end = StepMark("", 1 << 62, session.begin + session.elapsed(), begins=False)
    found += ((mark, end) for mark in open_steps)
    steps = []
    for first, last in sorted(found, key=lambda pair: pair[0].op):
        first_op, end_op = np.searchsorted(ops.ids, [first.op, last.op]).tolist()
        first_call, end_call = np.searchsorted(call_ids, [first.op, last.op]).tolist()
        start = max(first.time - session.begin, 0)
        duration = last.time - session.begin - start
        steps.append(d.StepInfo(first.name, first_op, end_op, first_call, end_call, start, duration))
    return steps


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
        "check": None if session.check is None else "nonfinite",
        "allow": [] if session.check is None else session.check.allowed,
        "checked": 0 if session.check is None else session.check.checked,
        "left_out": 0 if session.captures is None else session.captures.left_out,
    }  # fmt: skip
