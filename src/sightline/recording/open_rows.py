"""Rows of the ops and module calls that have begun and not ended, as they stand at one moment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from sightline.trace.assembly.layout import C_WIDTH, FLAG_SHIFT, NO_END, O_WIDTH
from sightline.trace.assembly.numbers import Numbers
from sightline.trace.data import UNFINISHED

if TYPE_CHECKING:
    from sightline.recording.session import Session


def open_rows(session: Session, read: bool = True) -> tuple[Numbers, Numbers]:
    """Rows of the ops and calls that have begun and not ended.

    With ``read`` what went into the calls is looked up, which only a thread of the recording may do.
    """
    now = time.perf_counter_ns()
    ops: list[int] = []
    calls: list[int] = []
    nothing = session.arguments.nothing
    for lane in list(session.lanes.values()):
        pending = lane.open_op
        if pending is not None:
            number, info, form, stack, start, ids = pending
            ops += [
                O_WIDTH + len(ids), number, info, form, nothing, stack, lane.top.call, -1, -1, -1,
                start - session.begin, 0, lane.bits | UNFINISHED << FLAG_SHIFT, len(ids), *ids,
            ]  # fmt: skip
        for call in reversed(lane.calls()):
            if call.input_form < 0 and read and call.frame is not None:
                local = call.frame.f_locals
                session.read_inputs(call, local.get("args", ()), local.get("kwargs"))
            start = getattr(call, "start", now)  # another thread may be about to set it
            duration = now - start - (lane.spent - getattr(call, "spent", lane.spent))
            form, inputs = (call.input_form, call.inputs) if call.input_form >= 0 else (nothing, [])
            calls += [
                C_WIDTH + len(inputs), call.call, call.module, call.up.call, call.above,
                call.phase | UNFINISHED << FLAG_SHIFT, start - session.begin, duration, NO_END, form, nothing,
                len(inputs), *inputs,
            ]  # fmt: skip
    return np.array(ops, dtype=np.int64), np.array(calls, dtype=np.int64)
