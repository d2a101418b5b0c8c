"""How events reach a session: a dispatch mode and a function mode on the thread's own stacks.

Modes are pushed on torch's thread-local stacks, without the module globals that ``with mode:`` writes, so
that recordings may overlap in threads and stop in any order. Each mode holds its handler (`hotpath`) as a
method bound once.
"""

from __future__ import annotations

from types import MethodType

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.recording.hotpath import dispatch_handler, function_handler
from sightline.recording.session import Session


class DispatchMode(TorchDispatchMode):
    """Sees every aten op of its thread, and of the autograd threads working for it."""

    supports_higher_order_operators = True

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.__torch_dispatch__ = MethodType(dispatch_handler(session), self)  # type: ignore[method-assign]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # our frames are skipped by `torchapi.skip_in_dynamo`, which costs nothing per call


class FunctionMode(TorchFunctionMode):
    """Sees every torch function, method and operator of its thread."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.__torch_function__ = MethodType(function_handler(session), self)  # type: ignore[method-assign]
