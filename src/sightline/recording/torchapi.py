"""Every torch name the recorder stands on, private ones included, in one place.

A name that a torch version no longer has gives one clear sentence here, and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import repeat
from operator import call, itemgetter
from types import CodeType
from typing import Any, TypeVar

from sightline.errors import TorchMissing, UnsupportedTorch
from sightline.recording.atomic import at_once, exhaust

try:
    import torch
except ImportError as error:  # viewing works without torch, so this is a sentence and no stack of imports
    raise TorchMissing(
        "Recording needs torch, which is not installed here (looking at a saved trace does not): "
        "install torch and try again."
    ) from error


def _private(path: str) -> Any:
    """A private torch name, or the sentence that says which one this torch lacks."""
    found: Any = torch
    for part in path.split(".")[1:]:
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UnsupportedTorch(
                f"torch {torch.__version__} has no {path}, which sightline records with; "
                "use torch 2.11 to 2.13, or a newer sightline."
            ) from None
    return found


module_hooks: Any = import_module("torch.nn.modules.module")
optimizer_hooks: Any = import_module("torch.optim.optimizer")  # torch.optim hides it
DeviceContext: Any = import_module("torch.utils._device").DeviceContext
#: A reference that does not keep a storage, and its memory, alive.
StorageWeakRef: Any = import_module("torch.multiprocessing.reductions").StorageWeakRef
#: Whether the storage that such a reference was made for is freed; the reference is told by its ``cdata``.
expired = _private("torch.UntypedStorage._expired")
Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Module = torch.nn.Module
OpOverload = _private("torch._ops.OpOverload")

#: The autograd node being evaluated on this thread; None outside a backward pass.
current_node = _private("torch._C._current_autograd_node")
#: The number the next autograd node of this thread will get.
sequence_number = _private("torch.autograd._get_sequence_nr")
#: Identity of a tensor's storage, without making a Python storage object.
storage_address = _private("torch._C._storage_address")
#: int8 matrices to an int32 one, exactly.
int_mm = _private("torch._int_mm")
#: A stretch whose ops pass no dispatch mode, and one whose ops make no autograd nodes.
no_dispatch = _private("torch._C._DisableTorchDispatch")
below_autograd = _private("torch._C._AutoDispatchBelowAutograd")
#: Set while ``torch.jit.trace`` runs; reading a shape would then add to the traced graph.
jit_tracing = _private("torch._C._get_tracing_state")

#: Torch's own profiler: whether it runs, and to end it with what it has seen.
profiler_enabled = _private("torch._C._autograd._profiler_enabled")
disable_profiler = _private("torch._C._autograd._disable_profiler")
DeviceType = _private("torch._C._autograd.DeviceType")

push_dispatch_mode = _private("torch._C._push_on_torch_dispatch_stack")
pop_dispatch_mode = partial(_private("torch._C._pop_torch_dispatch_stack"), None)
dispatch_depth = _private("torch._C._len_torch_dispatch_stack")
dispatch_mode_at = _private("torch._C._get_dispatch_stack_at")
push_function_mode = _private("torch._C._push_on_torch_function_stack")
pop_function_mode = _private("torch._C._pop_torch_function_stack")
function_depth = _private("torch._C._len_torch_function_stack")
function_mode_at = _private("torch._C._get_function_stack_at")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModeStack:
    """One of the thread's two stacks of modes."""

    depth: Callable[[], int]
    at: Callable[[int], Any]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def from_top(self) -> list[Any]:
        """The modes, the one that sees an op first in front."""
        return [self.at(position) for position in reversed(range(self.depth()))]

    def take(self, mode: Any, *then: Callable[[], object]) -> bool:
        """Take a mode off, wherever it is on the stack; the others keep their order. False: not on it.

        It is one step, in which ``then`` is called, too: an interrupt finds the stack as it was or is.
        """
        modes = self.from_top()
        at = next((place for place, one in enumerate(modes) if one is mode), None)
        if at is None:
            return False
        at_once(*[self.pop] * (at + 1), *(partial(self.push, one) for one in reversed(modes[:at])), *then)
        return True

    def set_aside(
        self, work: Callable[[], T], before: Callable[[], object] = int, after: Callable[[], object] = int
    ) -> T:
        """Do some work without any mode on the stack; ``before`` and ``after`` are functions written in C.

        Whatever interrupts it, and whenever, the modes are back afterwards. What puts them back is one call
        of a function written in C, in a ``finally`` of this very function: the end of a context manager
        written in Python is a function of its own, and an interrupt may keep that from running.
        """
        back: list[Callable[[], object]] = []
        put_back = map(call, back)
        modes = self.from_top()
        left = map(call, map(itemgetter(0), zip(repeat(self.pop), iter(self.depth, 0))))
        steps: list[Callable[[], object]] = [partial(exhaust, left)]
        steps += [*(partial(self.push, mode) for mode in reversed(modes)), after]
        try:
            at_once(partial(back.extend, steps), *[self.pop] * len(modes), before)
            return work()
        finally:
            exhaust(put_back)
            # A traceback keeps this frame, which would keep our mode when the stack has let go of it.
            modes.clear()
            steps.clear()
            back.clear()


DISPATCH_MODES = ModeStack(dispatch_depth, dispatch_mode_at, pop_dispatch_mode, push_dispatch_mode)
FUNCTION_MODES = ModeStack(function_depth, function_mode_at, pop_function_mode, push_function_mode)

#: A context in which reading a tensor's attributes runs nobody's code: no mode, no subclass.
quiet = _private("torch._C.DisableTorchFunction")

#: ``compiler._is_compiling_flag`` is read directly on the hot path: a call of is_compiling() costs 0.1 µs.
compiler = _private("torch.compiler")
_private("torch.compiler._is_compiling_flag")
is_dynamo_compiling = _private("torch.compiler.is_dynamo_compiling")

_eval_frame = _private("torch._C._dynamo.eval_frame")
for _name in ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy", "set_guard_complete_hook"):
    _private(f"torch._C._dynamo.eval_frame.{_name}")
set_guard_complete_hook = _eval_frame.set_guard_complete_hook

is_functorch_wrapped = _private("torch._C._functorch.is_functorch_wrapped_tensor")
functorch_unwrapped = _private("torch._C._functorch.get_unwrapped")

#: The outermost of them: what ``module(x)`` calls.
WRAPPED_CALL = Module._wrapped_call_impl.__code__
#: Python frames torch puts between the caller of a module and its ``forward``.
MODULE_CALL_CODES = frozenset(
    {Module._call_impl.__code__, Module._wrapped_call_impl.__code__}
    | {code for code in Module._call_impl.__code__.co_consts if hasattr(code, "co_code")}
)


def skip_in_dynamo(code: CodeType, below: bool) -> None:
    """Keep Dynamo from compiling a frame of ours, and those ``below`` it, inside compiled code.

    torch would wrap a dispatch handler in a function that does the same at 2 µs a call.
    """
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if below else action.DEFAULT)
    _eval_frame.set_code_exec_strategy(code, strategy)


_OBSERVER = "sightline.recording.native._observer"  # where the native engine is, once it is loaded


def undisturbed(work: Callable[[], T]) -> T:
    """Do our own work with torch: no mode of this thread sees anything of it."""

    def quietly() -> T:
        with quiet():
            return work()

    observer = sys.modules.get(_OBSERVER)
    muted = () if observer is None else (partial(observer.mute, True), partial(observer.mute, False))
    return DISPATCH_MODES.set_aside(quietly, *muted)
