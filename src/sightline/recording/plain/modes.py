"""The dispatch mode and the function mode through which the plain engine sees ops.

They are pushed on torch's thread-local stacks, without the module globals that ``with mode:`` writes, so that
recordings may overlap in threads and stop in any order.
"""

from __future__ import annotations

import sys
from functools import partial
from threading import get_ident
from typing import Any, ClassVar

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.recording.atomic import run_atomically
from sightline.recording.plain.running_ops import ApiCall, AtenOp
from sightline.recording.plain.session import PlainSession
from sightline.recording.torchapi import (
    DISPATCH_MODES,
    FUNCTION_MODES,
    DeviceContext,
    ModeStack,
    is_dynamo_compiling,
)


class StackMode:
    """A mode of ours on one of torch's stacks, which notices when other code takes it off.

    At the end of a ``with`` block torch pops the top of a stack, whatever that is. Where a recording was
    started inside the block that is our mode, and the block's own mode would stay on for good. The stack has
    the only reference to our mode, so ours is deleted at that moment: ``__del__`` then takes off the block's
    mode, and pushes a new one of ours.
    """

    stack: ClassVar[ModeStack]
    is_on = False  #: whether it is on its stack

    def __init__(self, session: PlainSession) -> None:
        super().__init__()
        self.session = session

    def put_on(self) -> None:
        """Push it on its stack. The caller keeps no reference."""
        run_atomically(partial(self.stack.push, self), partial(setattr, self, "is_on", True))

    def take_off(self) -> bool:
        """Remove it, wherever it is on the stack of this thread; False if it is not on it."""
        return self.stack.take(self, partial(setattr, self, "is_on", False))

    def __del__(self) -> None:
        if not self.is_on or get_ident() != self.session.ident:
            return
        try:
            sys._getframe(1)
        except ValueError:  # it was not popped: the thread has ended, and its stack is freed
            return
        try:
            ended = next((mode for mode in self.stack.from_top() if _is_popped_from_top(mode)), None)
            if ended is not None:
                self.stack.take(ended)
            if self.session.running:
                type(self)(self.session).put_on()
        except Exception as error:
            self.session.note_fault(error)


def _is_popped_from_top(mode: Any) -> bool:
    """Whether a mode is not ours, and its block ends by popping the top of the stack.

    Infrastructure modes of torch are kept beside the stack. The one of ``set_default_device`` is removed from
    the bottom; unlike that of ``with torch.device(…)`` it was entered in Python.
    """
    if isinstance(mode, StackMode) or hasattr(mode, "_mode_key"):
        return False
    return not (isinstance(mode, DeviceContext) and hasattr(mode, "old_device"))


class DispatchMode(StackMode, TorchDispatchMode):
    """Sees every aten op of its thread, and of the autograd threads working for it."""

    stack = DISPATCH_MODES
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, exactly once, and record it."""
        session, kwargs = self.session, kwargs or {}
        del self  # a traceback holds this frame, which would hold the mode after its stack has dropped it
        op = AtenOp.begin(session, func, args, kwargs, sys._getframe())
        if op is None:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            op.end(None, error)
            raise
        op.end(result)
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `torchapi.skip_in_dynamo` skips our frames at no cost per call


class FunctionMode(StackMode, TorchFunctionMode):
    """Sees every torch function, method and operator of its thread."""

    stack = FUNCTION_MODES

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make an API call, exactly once, and record it."""
        if is_dynamo_compiling():  # Dynamo inlines this function, and knows this call to be true
            return func(*args, **(kwargs or {}))
        session, kwargs = self.session, kwargs or {}
        del self  # as above
        call = ApiCall.begin(session, func, args, kwargs, sys._getframe())
        if call is None:
            return func(*args, **kwargs)
        try:
            try:  # an interrupt may come at any line: ``open_op`` is reset in any case
                call.enter()
                result = func(*args, **kwargs)
            finally:
                call.state.open_op = None
        except BaseException as error:
            call.end(None, error)
            raise
        call.end(result)
        return result
