"""Ops and calls that raised: they are kept, with their inputs, and their exception is remembered."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

from sightline.recording.lanes import BACKWARD, Lane, Mark, OpenOp
from sightline.recording.operations import OpInfo
from sightline.recording.session import clock
from sightline.recording.torchapi import quiet, sequence_number
from sightline.trace.data import RAISED

if TYPE_CHECKING:
    from sightline.recording.session import Session


def failed_op(
    session: Session, lane: Lane, info: OpInfo, node: Any, frame: FrameType | None, args: tuple[Any, ...],
    kwargs: dict[str, Any] | None, start: int, error: BaseException,
) -> None:  # fmt: skip
    """An aten op raised."""
    end = clock()
    try:
        with quiet():
            stack = lane.api_stack if node is None and lane.api_stack >= 0 else session.stack(lane, frame)
            ids: list[int] = []
            form = session.arguments.read(info.forms, args, kwargs, ids)
            op = (next(session.op_ids), info.number, form, stack, start, ids)
            phase = lane.phase if node is None else BACKWARD
            evaluated = -1 if node is None else node._sequence_nr()
            session.write_op(
                lane, op, [], session.arguments.nothing, end - start, RAISED, phase, sequence_number(),
                evaluated if evaluated < 1 << 62 else -2, lane.api,
            )  # fmt: skip
        lane.aten_count += 1
        session.failure = id(error)
        if session.observer is not None:
            session.observe_op(lane, info, node, stack, op[0], ids, args, kwargs, None, raised=True)
    except Exception as own:  # the op's own exception goes on, and no other
        session.note_fault(own)


def failed_call(
    session: Session, lane: Lane, open_op: OpenOp, mark: Mark | None, duration: int, error: BaseException
) -> None:
    """An API call raised; an aten op inside it may have said so already."""
    lane.api, lane.api_stack, lane.open_op = -1, -1, None
    if not session.running:
        return
    try:
        if mark is not None:
            session.unwind(lane, mark)
        session.write_op(lane, open_op, [], session.arguments.nothing, duration, RAISED, lane.phase)
        session.failure = id(error)
    except Exception as own:
        session.note_fault(own)
