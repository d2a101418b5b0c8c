"""Where a thread stands: the open module calls, the current API call, the phase, the marks on its stack.

Each thread that runs recorded code has a lane of its own. A *mark* is a live frame above which the stack
is known; it also says which call it belongs to, so that a call which ended without a word (an exception
that passed no hook, a KeyboardInterrupt) is noticed at the next event and closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, Self

from sightline.recording.layout import THREAD_SHIFT

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = range(4)  # positions in data.PHASES


class Mark:
    """A frame of a call in progress, and the stack of everything above it."""

    __slots__ = ("above", "call", "frame", "up")

    frame: FrameType | None
    above: int
    call: int  #: the innermost module call that is open here; -1 if none is
    up: Mark | None  #: the mark outside this one

    @classmethod
    def at(cls, frame: FrameType | None, above: int) -> Self:
        mark = cls()
        mark.frame = frame
        mark.above = above
        mark.call = -1
        mark.up = None
        return mark


class OptimizerStep(Mark):
    """An optimizer's step in progress."""

    __slots__ = ()


class OpenCall(Mark):
    """A module call in progress. Its number, ``call``, is the one of the first op inside it."""

    __slots__ = (
        "args_key", "input_form", "inputs", "key", "module", "phase", "spent", "start", "taken_mode",
    )  # fmt: skip

    up: Mark
    module: int
    key: int  #: id of the module object
    phase: int
    start: int
    spent: int  #: recorder time up to its start, to be left out of its duration
    inputs: list[int]
    input_form: int  #: -1 until they have been read
    args_key: int  #: id of the tuple they were read from
    taken_mode: Any  #: the function mode, where it is off inside the call


#: An API call in progress: id, operation, form, stack, start, inputs.
OpenOp = tuple[int, int, int, int, int, list[int]]


NO_OP: Final[OpenOp] = (-1, -1, -1, -1, 0, [])


class Lane:
    """The state of one thread."""

    __slots__ = (
        "api", "api_stack", "aten_count", "bits", "compiled_node", "enter", "ident", "leave", "off",
        "open_op", "phase", "session", "spent", "top",
    )  # fmt: skip

    def __init__(self, session: Any, ident: int, number: int, base: Mark) -> None:
        self.session = session
        self.ident = ident
        self.bits = number << THREAD_SHIFT
        self.open_op: OpenOp | None = None
        self.api = -1
        self.api_stack = -1
        self.phase = FORWARD
        self.spent = 0
        self.aten_count = 0
        self.compiled_node: int | None = None  #: the compiled backward that is running
        #: what runs now is not recorded: the session has stopped, or compiled code is running
        self.off = False
        self.top = base  #: the innermost mark
        #: what the module hooks do on this lane, made by `callpath`
        self.enter: Callable[..., None]
        self.leave: Callable[..., None]

    def push(self, mark: Mark) -> None:
        mark.up, mark.call = self.top, self.top.call
        self.top = mark

    def pop(self) -> Mark:
        gone = self.top
        assert gone.up is not None, "the mark of the block itself stays"
        self.top = gone.up
        return gone

    def marks(self) -> Iterator[Mark]:
        """From the innermost to the block's own."""
        mark: Mark | None = self.top
        while mark is not None:
            yield mark
            mark = mark.up

    def calls(self) -> list[OpenCall]:
        """The open module calls, outermost first."""
        return [mark for mark in self.marks() if isinstance(mark, OpenCall)][::-1]
