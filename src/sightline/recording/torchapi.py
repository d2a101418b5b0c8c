"""Every private torch name that the recorder uses.

A name that a torch version lacks raises one clear sentence here, and nowhere else.
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
from sightline.recording.atomic import exhaust, run_atomically

try:
    import torch
except ImportError as error:  # viewing works without torch
    raise TorchMissing(
        "Recording needs torch, which is not installed here (looking at a saved trace does not): "
        "install torch and try again."
    ) from error


def _private(path: str) -> Any:
    """A private torch name; raises one sentence if this torch lacks it."""
    item: Any = torch
    for part in path.split(".")[1:]:
        try:
            item = getattr(item, part)
        except AttributeError:
            raise UnsupportedTorch(
                f"torch {torch.__version__} has no {path}, which sightline records with; "
                "use torch 2.11 to 2.13, or a newer sightline."
            ) from None
    return item


module_hooks: Any = import_module("torch.nn.modules.module")
optimizer_hooks: Any = import_module("torch.optim.optimizer")  # torch.optim hides it
DeviceContext: Any = import_module("torch.utils._device").DeviceContext
#: A reference that does not keep a storage, and its memory, alive.
StorageWeakRef: Any = import_module("torch.multiprocessing.reductions").StorageWeakRef
#: Whether the storage of such a reference is freed; called with the ``cdata`` of the reference.
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
#: A context whose ops no dispatch mode sees, and one whose ops make no autograd nodes.
no_dispatch = _private("torch._C._DisableTorchDispatch")
below_autograd = _private("torch._C._AutoDispatchBelowAutograd")
#: Set while ``torch.jit.trace`` runs; reading a shape would then add to the traced graph.
jit_tracing = _private("torch._C._get_tracing_state")

#: Torch's own profiler: whether it runs; end it and get its events.
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
        """The modes, from the top of the stack down: the first one sees an op first."""
        return [self.at(position) for position in reversed(range(self.depth()))]

    def take(self, mode: Any, *then: Callable[[], object]) -> bool:
        """Remove a mode, wherever it is on the stack; the others keep their order. False if it is not on it.

        It is one step, in which ``then`` is called too: an interrupt comes before or after all of it.
        """
        modes = self.from_top()
        at = next((position for position, one in enumerate(modes) if one is mode), None)
        if at is None:
            return False
        run_atomically(
            *[self.pop] * (at + 1), *(partial(self.push, one) for one in reversed(modes[:at])), *then
        )
        return True

    def run_without(
        self, work: Callable[[], T], before: Callable[[], object] = int, after: Callable[[], object] = int
    ) -> T:
        """Run ``work`` without any mode on the stack; ``before`` and ``after`` are functions written in C.

        The modes are restored whenever an interrupt comes. One call of a function written in C restores them,
        in a ``finally`` of this very function: the end of a context manager written in Python would be a
        function of its own, and an interrupt may keep that from running.
        """
        restoring: list[Callable[[], object]] = []
        restore = map(call, restoring)
        modes = self.from_top()
        left = map(call, map(itemgetter(0), zip(repeat(self.pop), iter(self.depth, 0))))
        steps: list[Callable[[], object]] = [partial(exhaust, left)]
        steps += [*(partial(self.push, mode) for mode in reversed(modes)), after]
        try:
            run_atomically(partial(restoring.extend, steps), *[self.pop] * len(modes), before)
            return work()
        finally:
            exhaust(restore)
            # A traceback holds this frame, which would hold our mode after the stack has dropped it.
            modes.clear()
            steps.clear()
            restoring.clear()


DISPATCH_MODES = ModeStack(dispatch_depth, dispatch_mode_at, pop_dispatch_mode, push_dispatch_mode)
FUNCTION_MODES = ModeStack(function_depth, function_mode_at, pop_function_mode, push_function_mode)

#: A context in which reading a tensor's attributes runs no code of a function mode or a subclass.
no_torch_function = _private("torch._C.DisableTorchFunction")

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


def without_modes(work: Callable[[], T]) -> T:
    """Run our own code that uses torch: no mode of this thread sees its ops."""

    def run() -> T:
        with no_torch_function():
            return work()

    observer = sys.modules.get(_OBSERVER)
    muted = () if observer is None else (partial(observer.mute, True), partial(observer.mute, False))
    return DISPATCH_MODES.run_without(run, *muted)
