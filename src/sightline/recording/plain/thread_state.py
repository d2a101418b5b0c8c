"""The state of each thread: its open module calls, its open API call, its phase, its stack anchors.

Each thread that runs recorded code has a state of its own in each recording. A *stack anchor* is a live frame
whose stack is known, so that only the frames it called are walked. It belongs to a call: one that ended
without its exit hook firing (an exception in another hook, a KeyboardInterrupt) is noticed at the next event,
because its frame is gone, and closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sightline.recording.torchapi import DISPATCH_MODES
from sightline.schema.streams import THREAD_SHIFT
from sightline.schema.tables import FORWARD

if TYPE_CHECKING:
    from sightline.recording.plain.session import PlainSession


class OpenOp(NamedTuple):
    """The part of a row that is known when an op, an API call or a compiled region begins."""

    number: int  #: its id
    operation: int  #: the number of its `OpInfo`
    form: int
    stack: int
    start: int  #: nanoseconds since the recording began, as all times here
    inputs: list[int]


class StackAnchor:
    """A frame of a call in progress, and its stack."""

    def __init__(self, frame: FrameType | None, stack: int) -> None:
        self.frame = frame
        self.stack = stack
        self.call = -1  #: the innermost open module call; -1 if none is
        self.outer_phase = FORWARD  #: the phase to restore when the call ends
        self.outer: StackAnchor | None = None


class OptimizerStep(StackAnchor):
    """An optimizer's step in progress."""

    def __init__(self, frame: FrameType | None, stack: int, closure: CodeType | None) -> None:
        super().__init__(frame, stack)
        self.closure = closure  #: the code of the function that computes the loss

    def is_in_closure(self, frame: FrameType | None) -> bool:
        """Whether a frame inside the step is of the closure, or called by it."""
        at = frame if self.closure is not None else None
        while at is not None and at is not self.frame:
            if at.f_code is self.closure:
                return True
            at = at.f_back
        return False


class OpenCall(StackAnchor):
    """A module call in progress. Its number, ``call``, comes before that of the first op inside it."""

    outer: StackAnchor

    def __init__(self, frame: FrameType, stack: int, module: int, key: int, phase: int, no_form: int) -> None:
        super().__init__(frame, stack)
        self.module = module
        self.key = key  #: id of the module object
        self.phase = phase
        self.mode = 0  #: flags: whether the module was training, and gradients were on
        self.start = 0
        self.spent = 0  #: recorder time up to its start, to be left out of its duration
        self.inputs: list[int] = []
        self.input_form = no_form
        self.args_key = -1  #: id of the tuple the inputs were read from; -1 until they are
        self.taken_mode: Any = None  #: the function mode, where it is off during the call


class ThreadState:
    """The state of one thread in one recording."""

    def __init__(self, session: PlainSession, ident: int, number: int, base: StackAnchor) -> None:
        self.session = session
        self.ident = ident
        self.bits = number << THREAD_SHIFT
        self.open_op: OpenOp | None = None  #: the API call that is running
        self.phase = FORWARD
        self.spent = 0  #: nanoseconds that went into recording
        self.aten_count = 0
        self.compiled_node: int | None = None  #: the compiled backward that is running
        #: nothing is recorded now: the session has stopped, or compiled code is running
        self.off = False
        self.top = base  #: the innermost anchor

    def push(self, anchor: StackAnchor) -> None:
        anchor.outer, anchor.outer_phase = self.top, self.phase
        if anchor.call < 0:
            anchor.call = self.top.call
        self.top = anchor

    def pop(self) -> StackAnchor:
        ended = self.top
        assert ended.outer is not None, "the anchor of the block itself stays"
        self.top, self.phase = ended.outer, ended.outer_phase
        return ended

    def pop_steps(self) -> tuple[Callable[[], object], ...]:
        """The steps of `pop`, as functions written in C for `run_atomically`."""
        ended = self.top
        assert ended.outer is not None, "the anchor of the block itself stays"
        return partial(setattr, self, "top", ended.outer), partial(setattr, self, "phase", ended.outer_phase)

    def anchors(self) -> Iterator[StackAnchor]:
        """All anchors, from the innermost to the block's own."""
        anchor: StackAnchor | None = self.top
        while anchor is not None:
            yield anchor
            anchor = anchor.outer

    def calls(self) -> list[OpenCall]:
        """The open module calls, outermost first."""
        return [anchor for anchor in self.anchors() if isinstance(anchor, OpenCall)][::-1]


#: For each thread that started recordings its state in each of them, in order of starting.
active: Final[dict[int, list[ThreadState]]] = {}


def all_states() -> list[ThreadState]:
    """The state of each recording on each thread that started one."""
    return [state for states in list(active.values()) for state in states]


def current_states() -> list[ThreadState]:
    """This thread's state in each recording; an autograd worker takes part in those of its caller."""
    states = active.get(get_ident())
    if states is not None:
        return states
    sessions = [mode.session for mode in reversed(DISPATCH_MODES.from_top()) if hasattr(mode, "session")]
    return [session.current_state() for session in sessions if getattr(session, "running", False)]
