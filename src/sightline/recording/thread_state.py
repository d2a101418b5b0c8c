"""Where each thread stands: its open module calls, its open API call, its phase, and the marks on its stack.

Each thread that runs recorded code has a state of its own in each recording. A *mark* is a live frame above
which the stack is known; it also says which call it belongs to, so that a call which ended without its hook
(an exception in another hook, a KeyboardInterrupt) is noticed at the next event and closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sightline.recording.torchapi import DISPATCH_MODES
from sightline.trace.assembly.layout import FORWARD, THREAD_SHIFT

if TYPE_CHECKING:
    from sightline.recording.session import Session


class OpenOp(NamedTuple):
    """What is known of an op, an API call or a compiled region when it begins."""

    number: int  #: its id
    operation: int  #: the number of its `OpInfo`
    form: int
    stack: int
    start: int  #: nanoseconds since the recording began, as all times here
    inputs: list[int]


class StackAnchor:
    """A frame of a call in progress, and the stack of everything above it."""

    def __init__(self, frame: FrameType | None, above: int) -> None:
        self.frame = frame
        self.above = above
        self.call = -1  #: the innermost module call that is open here; -1 if none is
        self.outer_phase = FORWARD  #: the phase of what runs after the call
        self.up: StackAnchor | None = None  #: the mark outside this one


class OptimizerStep(StackAnchor):
    """An optimizer's step in progress."""

    def __init__(self, frame: FrameType | None, above: int, closure: CodeType | None) -> None:
        super().__init__(frame, above)
        self.closure = closure  #: of the function it was given to compute the loss

    def is_in_closure(self, frame: FrameType | None) -> bool:
        """Whether a frame inside the step is of that function, or below it."""
        at = frame if self.closure is not None else None
        while at is not None and at is not self.frame:
            if at.f_code is self.closure:
                return True
            at = at.f_back
        return False


class OpenCall(StackAnchor):
    """A module call in progress. Its number, ``call``, comes before that of the first op inside it."""

    up: StackAnchor

    def __init__(self, frame: FrameType, above: int, module: int, key: int, phase: int, nothing: int) -> None:
        super().__init__(frame, above)
        self.module = module
        self.key = key  #: id of the module object
        self.phase = phase
        self.mode = 0  #: flags: whether the module was training, and gradients were on
        self.start = 0
        self.spent = 0  #: recorder time up to its start, to be left out of its duration
        self.inputs: list[int] = []
        self.input_form = nothing  #: the form of no arguments
        self.args_key = -1  #: id of the tuple the inputs were read from; -1 until they are
        self.taken_mode: Any = None  #: the function mode, where it is off inside the call


class ThreadState:
    """The state of one thread in one recording."""

    def __init__(self, session: Session, ident: int, number: int, base: StackAnchor) -> None:
        self.session = session
        self.ident = ident
        self.bits = number << THREAD_SHIFT
        self.open_op: OpenOp | None = None  #: the API call that is running
        self.phase = FORWARD
        self.spent = 0  #: nanoseconds that went into recording
        self.aten_count = 0
        self.compiled_node: int | None = None  #: the compiled backward that is running
        #: what runs now is not recorded: the session has stopped, or compiled code is running
        self.off = False
        self.top = base  #: the innermost mark

    def push(self, mark: StackAnchor) -> None:
        mark.up, mark.outer_phase = self.top, self.phase
        if mark.call < 0:
            mark.call = self.top.call
        self.top = mark

    def pop(self) -> StackAnchor:
        gone = self.top
        assert gone.up is not None, "the mark of the block itself stays"
        self.top, self.phase = gone.up, gone.outer_phase
        return gone

    def popping(self) -> tuple[Callable[[], object], ...]:
        """The same as functions written in C, to be called at once with others."""
        gone = self.top
        assert gone.up is not None, "the mark of the block itself stays"
        return partial(setattr, self, "top", gone.up), partial(setattr, self, "phase", gone.outer_phase)

    def marks(self) -> Iterator[StackAnchor]:
        """From the innermost to the block's own."""
        mark: StackAnchor | None = self.top
        while mark is not None:
            yield mark
            mark = mark.up

    def calls(self) -> list[OpenCall]:
        """The open module calls, outermost first."""
        return [mark for mark in self.marks() if isinstance(mark, OpenCall)][::-1]


#: For each thread on which a recording was started its state in each recording, in order of starting.
active: Final[dict[int, list[ThreadState]]] = {}


def states_here() -> list[ThreadState]:
    """This thread's state in each recording; an autograd worker has those of the thread it works for."""
    found = active.get(get_ident())
    if found is not None:
        return found
    sessions = [mode.session for mode in reversed(DISPATCH_MODES.from_top()) if hasattr(mode, "session")]
    return [session.state_here() for session in sessions if getattr(session, "running", False)]
