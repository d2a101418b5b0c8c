"""Compiled code under the plain engine: it stays compiled, and each call is one opaque op."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

from sightline.recording.atomic import run_atomically, store_atomically
from sightline.recording.compilations import (
    COMPILED_BACKWARD,
    Compilations,
    is_wrapper,
    new_tensors,
    region_name,
)
from sightline.recording.observers import notify_region
from sightline.recording.operations import opaque_traits
from sightline.recording.plain.row_streams import op_row
from sightline.recording.plain.thread_state import (
    OpenOp,
    StackAnchor,
    ThreadState,
    all_states,
    current_states,
)
from sightline.recording.stacks import frames_from
from sightline.recording.torchapi import no_torch_function, sequence_number, set_guard_complete_hook
from sightline.schema.tables import BACKWARD

if TYPE_CHECKING:
    from sightline.recording.plain.session import PlainSession


class CompiledRegion(StackAnchor):
    """A compiled function that is running; its frame is the wrapper ``torch.compile`` returned."""

    def __init__(self, frame: FrameType, op: OpenOp, spent: int) -> None:
        super().__init__(frame, op.stack)
        self.op = op
        self.spent = spent  #: excluded time of the thread before it


def enter_region(session: PlainSession, state: ThreadState, frame: FrameType | None) -> None:
    """Compiled code begins somewhere below ``frame``: open one opaque op for its outermost wrapper."""
    if state.off and not leave_region(session, state, frame):
        return
    wrapper: FrameType | None = None
    for at in frames_from(frame):
        if at is state.top.frame:
            break
        if is_wrapper(at):
            wrapper = at
    if wrapper is None:
        return
    local = wrapper.f_locals
    stack = session.stack(state, wrapper.f_back)
    for tensor in new_tensors(session, wrapper.f_back):
        if session.regions:  # it came out of an earlier region
            session.values.value(tensor)
        else:  # it existed before the first
            session.before_region[id(tensor)] = ref(tensor)
    function = local.get("fn")
    key = region_name(session, function), getattr(function, "__code__", function)
    info = session.info(opaque_traits, key)
    inputs: list[int] = []
    args, kwargs = local.get("args", ()), local.get("kwargs")
    form = session.arguments.read(info.forms, args, kwargs, inputs)
    op = OpenOp(session.next_id(), info.number, form, stack, session.now(), inputs)
    state.push(CompiledRegion(wrapper, op, state.spent))
    state.off = True
    notify_region(session, info, op.number, stack, inputs, args, kwargs, form)


def leave_region(session: PlainSession, state: ThreadState, frame: FrameType | None) -> bool:
    """Whether the open region has ended: its frame has returned. If so its op is written."""
    region = state.top
    if not isinstance(region, CompiledRegion):
        return False  # off because the session has stopped
    if any(at is region.frame for at in frames_from(frame)):
        return False
    close_region(session, state)
    return True


def close_region(session: PlainSession, state: ThreadState) -> None:
    """Write the opaque op; its outputs are the tensors seen from now on that have no other producer."""
    region = state.top
    assert isinstance(region, CompiledRegion)
    duration = session.now() - region.op.start - (state.spent - region.spent)
    row = _row(session, state, region.op, duration, region.outer_phase)
    # Written and popped in one step: an interrupt in between would write it twice, or never.
    run_atomically(
        partial(session.ops.write, row), partial(session.regions.append, region.op.number), *state.pop_steps()
    )
    state.off = not session.running
    state.compiled_node = None


def compiled_backward(session: PlainSession, state: ThreadState, node: Any, frame: FrameType | None) -> None:
    """A kernel ran inside the compiled backward of a region: one opaque op stands for all of them."""
    number = node._sequence_nr()
    if state.compiled_node == number:
        return
    state.compiled_node = number
    info = session.info(opaque_traits, (COMPILED_BACKWARD, None))
    stack = session.stack(state, frame)
    op = OpenOp(session.next_id(), info.number, session.arguments.nothing, stack, session.now(), [])
    row = _row(session, state, op, 0, BACKWARD, number)
    run_atomically(partial(session.ops.write, row), partial(session.regions.append, op.number))
    notify_region(session, info, op.number, stack, node=number)


def _row(
    session: PlainSession, state: ThreadState, op: OpenOp, duration: int, phase: int, node: int = -1
) -> list[int]:
    """The row of an opaque op, whose outputs are still unknown."""
    nothing, sequence = session.arguments.nothing, sequence_number()
    return op_row(state, op, duration, [], nothing, phase=phase, sequence=sequence, node=node)


class CompileWatch:
    """Notices by a hook of Dynamo that compiled code is about to run; there is one for the process."""

    def __init__(self) -> None:
        self._before: list[Any] = []  # the hook before ours; empty while ours is not installed
        self._replaced: list[Any] = []  # the hook that was installed when ours was to be removed
        self._hook = self._guards_passed
        self._compilations = Compilations(
            lambda: [state.session for state in all_states()], lambda: self._enter(sys._getframe(1))
        )

    def install(self) -> None:
        if not self._before:
            store_atomically(self._before.append, partial(set_guard_complete_hook, self._hook))
        self._compilations.install()

    def remove(self) -> None:
        if self._before and not self._replaced:
            store_atomically(self._replaced.append, partial(set_guard_complete_hook, self._before[0]))
        if (
            self._replaced and self._replaced[0] is not self._hook
        ):  # a hook that was installed after ours: it stays
            set_guard_complete_hook(self._replaced[0])
        run_atomically(self._before.clear, self._replaced.clear)
        self._compilations.remove()

    def _guards_passed(self, passed: bool) -> bool:
        if passed:
            self._enter(sys._getframe(1))
        before = self._before[0] if self._before else None
        return bool(before(passed)) if before is not None else passed

    def _enter(self, frame: FrameType | None) -> None:
        for state in current_states():
            try:
                with no_torch_function():
                    enter_region(state.session, state, frame)
            except Exception as error:
                state.session.fault(error)
