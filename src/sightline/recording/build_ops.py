"""The op columns of a trace: what is worked out about ops when a trace is built.

Which forward op a backward op belongs to, which calls were written as operators, what each op cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sightline.recording import layout as row
from sightline.recording.buffers import Rows
from sightline.recording.calibration import passage
from sightline.recording.columns import Names, Numbers, dense, i8, i32, offsets_of
from sightline.recording.costs import flops_of
from sightline.recording.lanes import BACKWARD, FORWARD, RECOMPUTE
from sightline.recording.operations import OP, OPAQUE
from sightline.recording.places import operator_names
from sightline.trace import data as d
from sightline.trace.forms import Form

if TYPE_CHECKING:
    from sightline.recording.build_values import Values
    from sightline.recording.session import Session


def op_rows(session: Session) -> Rows:
    """Every op written, and those that have begun and not ended."""
    rows = session.ops.rows()
    pending = [lane.open_op for lane in list(session.lanes.values()) if lane.open_op is not None]
    if not pending:
        return rows
    extra: list[int] = []
    for number, info, form, stack, start, ids in pending:
        extra += [
            row.O_WIDTH + len(ids), number, info, form, session.arguments.nothing, stack, -1, -1, -1, -1,
            start - session.begin, 0, d.UNFINISHED << row.FLAG_SHIFT, len(ids), *ids,
        ]  # fmt: skip
    return Rows(np.concatenate([rows.flat, np.array(extra, dtype=np.int64)]))


class Ops:
    """The op columns in the making."""

    def __init__(self, session: Session, rows: Rows, names: Names) -> None:
        self.rows = rows
        self.ids = rows.column(1)
        self.info = rows.column(row.O_INFO)
        infos = session.infos
        self.names = np.array([names.id(info.name) for info in infos] or [0], dtype=np.int64)[self.info]
        self.flavour = np.array([info.flavour for info in infos] or [0], dtype=np.int64)[self.info]
        self.level = (self.flavour == OP).astype(np.int64)
        bits = rows.column(row.O_BITS)
        self.phase = bits & ((1 << row.FLAG_SHIFT) - 1)
        self.flags = (bits >> row.FLAG_SHIFT) & 0x7F
        self.thread = bits >> row.THREAD_SHIFT
        self.call_ids = rows.column(row.O_CALL)
        self.stack = rows.column(row.O_STACK)
        self.parent = dense(self.ids, rows.column(row.O_PARENT))
        self.input_counts = rows.column(row.O_INPUTS)
        self.output_counts = rows.column(0) - row.O_WIDTH - self.input_counts
        self.inputs = rows.lists(row.O_WIDTH, self.input_counts)
        self.outputs = rows.lists(row.O_WIDTH + self.input_counts, self.output_counts)
        self.forward = np.full(len(self.ids), -1, dtype=np.int64)
        self._names = names

    def find_forward_ops(self, recomputes: NDArray[np.bool_], session: Session) -> None:
        """Link every backward op to the forward op whose autograd node it belongs to."""
        sequence, node = self.rows.column(row.O_SEQUENCE), self.rows.column(row.O_NODE)
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
        session.node_ops = owner
        self._link_accumulations(node, in_backward & ~again)
        self._link_first_gradients(session)

    _last_op = -1

    def _link_accumulations(self, node: Numbers, in_backward: NDArray[np.bool_]) -> None:
        """An op that adds into a leaf's gradient belongs where the gradient came from."""
        lost = np.flatnonzero((node == -2) & in_backward)
        if not len(lost):
            return
        starts = offsets_of(self.input_counts)
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
        starts = offsets_of(self.input_counts)
        makers = self._makers()
        for op in inside.tolist():
            sources = (makers.get(value, -1) for value in self.inputs[starts[op] : starts[op + 1]].tolist())
            self.forward[op] = next((source for source in sources if 0 <= source < op), -1)

    def opaque_outputs(self, values: Values) -> None:
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
        made_starts = offsets_of(self.output_counts)
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

    def _durations(self) -> Numbers:
        """Host time less our own, and for API calls less what torch adds to each op inside them."""
        durations = np.maximum(self.rows.column(row.O_DURATION), 0)
        inner = np.flatnonzero(self.parent >= 0)
        held = self.parent[inner]
        count = np.bincount(held, minlength=len(durations))
        least = np.bincount(held, weights=durations[inner], minlength=len(durations)).astype(np.int64)
        outer = self.level == 0
        durations[outer] = np.maximum(durations - count * passage().aten, least)[outer]
        return durations

    def columns(self, values: Values, forms: list[Form], session: Session) -> d.OpColumns:
        """The finished columns."""
        rows = self.rows
        result = rows.column(row.O_RESULT)
        result[result < 0] = session.arguments.one_tensor
        inputs, outputs = self.inputs, self.outputs
        form = rows.column(row.O_FORM)
        flops = flops_of(
            session.infos, self.info, form, result, self.level, self.input_counts, self.output_counts, inputs,
            outputs, values.meta, session.values.metas, forms,
        )  # fmt: skip
        call = self.call_ids
        return d.OpColumns(
            name=i32(self.names), level=i8(self.level), flavour=i8(self.flavour), phase=i8(self.phase),
            call=i32(call), frame=i32(self.stack), parent=i32(self.parent), forward=i32(self.forward),
            form=i32(form), result=i32(result), start=rows.column(row.O_START),
            duration=self._durations(), flops=flops, flags=i8(self.flags),
            thread=i8(self.thread), input_offsets=offsets_of(self.input_counts), inputs=i32(inputs),
            output_offsets=offsets_of(self.output_counts), outputs=i32(outputs),
        )  # fmt: skip


def recompute_stacks(frames: d.FrameColumns, codes: list[d.CodeInfo]) -> NDArray[np.bool_]:
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
