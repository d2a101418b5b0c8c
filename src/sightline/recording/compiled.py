"""Compiled code: it stays compiled, and appears as one opaque op per call.

Nothing of torch's compiled artefacts passes a mode, so a region is noticed at its entry — Dynamo says when
the guards of a compiled function have passed, and when it begins to compile one — and at its end, which is
the first event on the thread that no longer has the wrapper of the compiled function on its stack.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch

from sightline.recording.atomic import at_once, stored
from sightline.recording.compilations import Compilations
from sightline.recording.operations import OpInfo, opaque_facts
from sightline.recording.rows import op_row
from sightline.recording.thread_state import Mark, OpenOp, ThreadState, active, states_here
from sightline.recording.torchapi import Tensor, quiet, sequence_number, set_guard_complete_hook
from sightline.trace.assembly.layout import BACKWARD

if TYPE_CHECKING:
    from sightline.recording.session import Session

_WRAPPER: Final = "compile_wrapper"  # the function torch.compile returns
_WRAPPER_FILE: Final = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py")
COMPILED_BACKWARD: Final = "compiled backward"  # the op that stands for it
COMPILED_NODE: Final = "CompiledFunctionBackward"  # the autograd node of a compiled region


class Region(Mark):
    """A compiled function that is running; its frame is the wrapper ``torch.compile`` returned."""

    def __init__(self, frame: FrameType, op: OpenOp, spent: int) -> None:
        super().__init__(frame, op.stack)
        self.op = op
        self.spent = spent  #: what was no part of the run before it


def is_wrapper(frame: FrameType) -> bool:
    """Whether a frame is of the function ``torch.compile`` returned."""
    code = frame.f_code
    return code.co_name == _WRAPPER and code.co_filename == _WRAPPER_FILE


def enter_region(session: Session, state: ThreadState, frame: FrameType | None) -> None:
    """Compiled code begins somewhere below ``frame``: open one opaque op for its outermost wrapper."""
    if state.off and not leave_region(session, state, frame):
        return
    wrapper: FrameType | None = None
    at = frame
    while at is not None and at is not state.top.frame:
        if is_wrapper(at):
            wrapper = at
        at = at.f_back
    if wrapper is None:
        return
    local = wrapper.f_locals
    stack = session.stack(state, wrapper.f_back)
    _note_tensors(session, wrapper.f_back)
    info = _info(session, state, local.get("fn"))
    inputs: list[int] = []
    form = session.arguments.read(info.forms, local.get("args", ()), local.get("kwargs"), inputs)
    op = OpenOp(session.next_id(), info.number, form, stack, session.now(), inputs)
    state.push(Region(wrapper, op, state.spent))
    state.off = True


def leave_region(session: Session, state: ThreadState, frame: FrameType | None) -> bool:
    """Whether the region that is open on this state has ended; if so it is written down."""
    region = state.top
    if not isinstance(region, Region):
        return False  # off because the session has stopped
    at = frame
    while at is not None:
        if at is region.frame:
            return False
        at = at.f_back
    close_region(session, state)
    return True


def close_region(session: Session, state: ThreadState) -> None:
    """Write the opaque op; its outputs are the tensors seen from now on that nothing else explains."""
    region = state.top
    assert isinstance(region, Region)
    duration = session.now() - region.op.start - (state.spent - region.spent)
    row = _row(session, state, region.op, duration, region.outer_phase)
    # Written and over in one step: an interrupt in between would write it twice, or never.
    at_once(
        partial(session.ops.write, row), partial(session.regions.append, region.op.number), *state.popping()
    )
    state.off = not session.running
    state.compiled_node = None


def compiled_backward(session: Session, state: ThreadState, node: Any, frame: FrameType | None) -> None:
    """A kernel ran inside the compiled backward of a region: one opaque op stands for all of them."""
    number = node._sequence_nr()
    if state.compiled_node == number:
        return
    state.compiled_node = number
    info = session.info(opaque_facts, (COMPILED_BACKWARD, None))
    stack = session.stack(state, frame)
    op = OpenOp(session.next_id(), info.number, session.arguments.nothing, stack, session.now(), [])
    row = _row(session, state, op, 0, BACKWARD, number)
    at_once(partial(session.ops.write, row), partial(session.regions.append, op.number))


def _row(
    session: Session, state: ThreadState, op: OpenOp, duration: int, phase: int, node: int = -1
) -> list[int]:
    """The row of an opaque op, whose outputs are still unknown."""
    nothing, sequence = session.arguments.nothing, sequence_number()
    return op_row(state, op, duration, [], nothing, phase=phase, sequence=sequence, node=node)


def _info(session: Session, state: ThreadState, function: Any) -> OpInfo:
    """What a compiled function is called: its own name, or the class of the compiled module."""
    name = getattr(function, "__qualname__", type(function).__name__)
    owner = getattr(function, "__self__", None)
    calls = state.calls()
    if name.startswith("wrap_inline.") and calls:  # torch.compile(module)
        called = session.modules.all[calls[-1].module].ref()
        owner = getattr(called, "_orig_mod", called)
        name = type(owner).__name__
    elif owner is not None and name in ("Module._call_impl", "Module._wrapped_call_impl"):
        name = type(owner).__name__
    return session.info(opaque_facts, (f"compiled {name}", getattr(function, "__code__", function)))


def _note_tensors(session: Session, frame: FrameType | None) -> None:
    """The tensors a frame holds in variables are no outputs of what it calls now.

    What is unknown among them was there before the first region, or came out of an earlier one.
    """
    for value in list(frame.f_locals.values()) if frame is not None else ():
        if isinstance(value, Tensor) and session.values.known(value) is None:
            if session.regions:
                session.values.value(value)
            else:
                session.before_region[id(value)] = ref(value)


def _sessions() -> list[Session]:
    """Every recording of this engine that is running."""
    return [state.session for states in list(active.values()) for state in states]


class CompileWatch:
    """Dynamo's word that compiled code is about to run. One for the process while anything records."""

    def __init__(self) -> None:
        self._before: list[Any] = []  # what was there before ours; nothing while ours is not
        self._found: list[Any] = []  # what was there when ours was to go
        self._hook = self._guards_passed
        self._compilations = Compilations(_sessions, lambda: self._enter(sys._getframe(1)))

    def install(self) -> None:
        if not self._before:
            stored(self._before.append, partial(set_guard_complete_hook, self._hook))
        self._compilations.install()

    def remove(self) -> None:
        if self._before and not self._found:
            stored(self._found.append, partial(set_guard_complete_hook, self._before[0]))
        if self._found and self._found[0] is not self._hook:  # somebody else's came after ours: it stays
            set_guard_complete_hook(self._found[0])
        at_once(self._before.clear, self._found.clear)
        self._compilations.remove()

    def _guards_passed(self, passed: bool) -> bool:
        if passed:
            self._enter(sys._getframe(1))
        before = self._before[0] if self._before else None
        return bool(before(passed)) if before is not None else passed

    def _enter(self, frame: FrameType | None) -> None:
        for state in states_here():
            try:
                with quiet():
                    enter_region(state.session, state, frame)
            except Exception as error:
                state.session.fault(error)
