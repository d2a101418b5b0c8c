"""Where a thread stands: the open module calls, the current API call, the phase, the marks on its stack.

Each thread that runs recorded code has a lane of its own. A *mark* is a live frame above which the stack
is known; it also says which call it belongs to, so that a call which ended without a word (an exception
that passed no hook, a KeyboardInterrupt) is noticed at the next event and closed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

from sightline.recording.layout import THREAD_SHIFT

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = range(4)  # positions in data.PHASES


class Mark:
    """A frame of a call in progress, and the stack of everything above it."""

    __slots__ = ("above", "frame")

    frame: FrameType | None
    above: int

    @classmethod
    def at(cls, frame: FrameType | None, above: int) -> Self:
        mark = cls()
        mark.frame = frame
        mark.above = above
        return mark


class OptimizerStep(Mark):
    """An optimizer's step in progress."""

    __slots__ = ()


class OpenCall(Mark):
    """A module call in progress."""

    __slots__ = (
        "args_key", "first_op", "id", "input_form", "inputs", "key", "module", "ops", "parent",
        "phase", "spent", "start", "without_functions",
    )  # fmt: skip

    id: int
    module: int
    key: int  #: id of the module object
    parent: int
    phase: int
    start: int
    spent: int  #: recorder time up to its start, to be left out of its duration
    ops: int  #: aten ops up to its start
    first_op: int
    inputs: list[int]
    input_form: int
    args_key: int
    without_functions: bool  #: the function mode is off inside it


#: An API call in progress: id, operation, form, stack, start, inputs.
OpenOp = tuple[int, int, int, int, int, list[int]]


NO_OP: Final[OpenOp] = (-1, -1, -1, -1, 0, [])


class Lane:
    """The state of one thread."""

    __slots__ = (
        "above", "api", "api_stack", "aten_count", "bits", "call", "calls", "compiled_node", "enter",
        "frame", "ident", "leave", "marks", "off", "open_op", "phase", "session", "spent",
    )  # fmt: skip

    def __init__(self, session: Any, ident: int, number: int, base: Mark) -> None:
        self.session = session
        self.ident = ident
        self.bits = number << THREAD_SHIFT
        self.calls: list[OpenCall] = []
        self.call = -1
        self.open_op: OpenOp | None = None
        self.api = -1
        self.api_stack = -1
        self.phase = FORWARD
        self.spent = 0
        self.aten_count = 0
        self.compiled_node: int | None = None  #: the compiled backward that is running
        #: what runs now is not recorded: the session has stopped, or compiled code is running
        self.off = False
        self.marks: list[Mark] = [base]
        #: what the module hooks do on this lane, made by `callpath`
        self.enter: Callable[..., None]
        self.leave: Callable[..., None]
        self.frame = base.frame
        self.above = base.above

    def push(self, mark: Mark) -> None:
        self.marks.append(mark)
        self.frame = mark.frame
        self.above = mark.above

    def pop(self) -> Mark:
        gone = self.marks.pop()
        top = self.marks[-1]
        self.frame = top.frame
        self.above = top.above
        return gone
