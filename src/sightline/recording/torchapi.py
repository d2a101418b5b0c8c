"""The private torch names that most of the recorder relies on; one that is missing raises a clear sentence.

A name that a single file needs stands in that file, as in `tensor_memory` and `native/compiled_regions`.
`graph/exported` has a file for its own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import repeat
from operator import call, itemgetter
from threading import local
from types import CodeType
from typing import Any, ClassVar, TypeVar

from sightline.errors import TorchMissing, UnsupportedTorch
from sightline.recording.atomic import exhaust, run_atomically

try:
    import torch
    from torch.utils.hooks import RemovableHandle
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
                "it knows torch 2.8 to 2.15: use one of these, or a newer sightline."
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
_graph_task = _private("torch._C._current_graph_task_id")
#: The number the next autograd node of this thread will get.
sequence_number = _private("torch.autograd._get_sequence_nr")
#: Identity of a tensor's storage, without making a Python storage object.
storage_address = _private("torch._C._storage_address")
#: Whether a tensor shares its memory with others until one of them is written to.
is_copied_on_write = _private("torch._C._is_cow_tensor")
#: int8 matrices to an int32 one, exactly.
int_mm = _private("torch._int_mm")
#: Set while ``torch.jit.trace`` runs; reading a shape would then add to the traced graph.
jit_tracing = _private("torch._C._get_tracing_state")
set_jit_tracing = _private("torch._C._set_tracing_state")

#: Torch's own profiler: whether it runs; switch its callbacks on or off; end it and get its events.
profiler_enabled = _private("torch._C._autograd._profiler_enabled")
enable_record_function = _private("torch._C._autograd._enable_record_function")
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


#: Whether an operator has a kernel for a dispatch key, and the key of those that are made of other ops.
has_kernel = _private("torch._C._dispatch_has_kernel_for_dispatch_key")
COMPOSITE: Any = _private("torch._C.DispatchKey").CompositeImplicitAutograd
#: The functions of ``torch`` itself, as their C++ bindings know them.
VARIABLE_FUNCTIONS: Any = _private("torch._C._VariableFunctions")
#: The norm of each tensor of a list, in one call.
foreach_norm = _private("torch._foreach_norm")


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

#: The code of ``Function.apply`` of autograd, whose C++ calls methods of tensors, such as ``view_as`` where a
#: function returns its input. None where all of it is written in C, as from torch 2.15 on.
FUNCTION_APPLY_CODE: CodeType | None = getattr(
    getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None
)


class ModuleHooks:
    """Our hooks in torch's tables of global module hooks, as its ``register_…`` functions would add them.

    Dynamo guards on the keys and functions of these tables, so both are the same in every recording.
    """

    _all: ClassVar[list[ModuleHooks]] = []  # one for each engine

    def __init__(self) -> None:
        self.key = RemovableHandle(OrderedDict()).id  # torch gives each number to one handle only
        self._installed: tuple[Any, Any] | None = None
        self._all.append(self)

    def install(self, before: Any, after: Any) -> None:
        """Have ``before`` and ``after`` called around every module call. Safe to call again."""
        self._installed = before, after
        module_hooks._global_forward_pre_hooks[self.key] = before
        module_hooks._global_forward_hooks[self.key] = after
        module_hooks._global_forward_hooks_with_kwargs[self.key] = True
        module_hooks._global_forward_hooks_always_called[self.key] = True

    def remove(self) -> None:
        """Remove them. Safe to call again."""
        self._installed = None
        self._take_out()

    def _take_out(self) -> None:
        for table in _FORWARD_HOOK_TABLES:
            table.pop(self.key, None)

    @classmethod
    def run_without(cls, work: Callable[[], T]) -> T:
        """Run ``work`` while none of our hooks is in torch's tables."""
        for hooks in cls._all:
            hooks._take_out()
        try:
            return work()
        finally:
            for hooks in cls._all:
                if hooks._installed is not None:  # another thread may have removed them
                    hooks.install(*hooks._installed)

    def are_alone(self) -> bool:
        """Whether there are no other global module hooks."""
        if any(table.keys() - {self.key} for table in _FORWARD_HOOK_TABLES):
            return False
        return not (module_hooks._global_backward_pre_hooks or module_hooks._global_backward_hooks)


_FORWARD_HOOK_TABLES = (
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    module_hooks._global_forward_hooks_with_kwargs,
    module_hooks._global_forward_hooks_always_called,
)


def skip_in_dynamo(code: CodeType, below: bool) -> None:
    """Keep Dynamo from compiling a frame of ours, and those ``below`` it, inside compiled code.

    torch would wrap a dispatch handler in a function that does the same at 2 µs a call.
    """
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if below else action.DEFAULT)
    _eval_frame.set_code_exec_strategy(code, strategy)


def in_backward() -> bool:
    """Whether this thread runs a part of a backward pass. Callbacks queued for its end run in no node."""
    return current_node() is not None or _graph_task() >= 0


_OBSERVER = "sightline.recording.native._observer"  # where the native engine is, once it is loaded

_Key = _private("torch._C.DispatchKey")
_KeySet = _private("torch._C.DispatchKeySet")
_set_dispatch_keys = _private("torch._C._ForceDispatchKeyGuard")
#: Part of every dispatch where nothing is switched on.
_ALWAYS = _KeySet(_Key.BackendSelect)
_ALWAYS_WITH_GRADIENTS = _ALWAYS | _KeySet(_Key.ADInplaceOrView)
#: Autograd and the transforms, modes and subclasses that see an op before its kernel does.
_TRANSFORMS = _KeySet(_Key.Functionalize)
for _name in dir(_Key):
    if _name.startswith(("FuncTorch", "Autocast")):
        _TRANSFORMS |= _KeySet(getattr(_Key, _name))
_UNSEEN = _TRANSFORMS
for _name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView",
              "Python", "PythonTLSSnapshot"):  # fmt: skip
    _UNSEEN |= _KeySet(getattr(_Key, _name))
_quiet = local()


def unobserved(work: Callable[[], T]) -> T:
    """Run our own work on the program's tensors: nothing that is active on this thread sees it.

    That is autograd, autocast, modes of functions and of the dispatcher, subclasses, the transforms of
    ``torch.func``, ``torch.jit.trace`` and profilers. The C++ class ``Unobserved`` does the same.
    """
    with no_torch_function(), _set_dispatch_keys(_ALWAYS, _UNSEEN):
        return _untraced(work)


def _untraced(work: Callable[[], T]) -> T:
    """Run ``work`` while ``torch.jit.trace`` and profilers pause, with the keys of the dispatcher set."""
    observer = sys.modules.get(_OBSERVER)
    if observer is not None:
        try:
            observer.pause_profilers(True)
            return work() if jit_tracing() is None else _without_jit_tracing(work)
        finally:
            observer.pause_profilers(False)
    if getattr(_quiet, "on", False):
        return _without_jit_tracing(work)
    try:  # restored by one call of a function written in C, which no interrupt can prevent
        _quiet.on = True
        enable_record_function(False)
        return _without_jit_tracing(work)
    finally:
        run_atomically(partial(enable_record_function, True), partial(setattr, _quiet, "on", False))


def _without_jit_tracing(work: Callable[[], T]) -> T:
    tracing = jit_tracing()
    try:
        set_jit_tracing(None)
        return work()
    finally:
        set_jit_tracing(tracing)


def without_modes(work: Callable[[], T]) -> T:
    """Run our own code that uses torch, and modes of its own: no mode of this thread sees its ops."""

    def run() -> T:
        # As where nothing is switched on: autograd and modes are, so that work may use some of its own.
        always = _ALWAYS if torch.is_inference_mode_enabled() else _ALWAYS_WITH_GRADIENTS
        with no_torch_function(), _set_dispatch_keys(always, _TRANSFORMS):
            return _untraced(work)

    return DISPATCH_MODES.run_without(run, *_mute_steps())


def muted(work: Callable[[], T]) -> T:
    """Run ``work`` as the program would; only the native engine records nothing of it."""
    steps = _mute_steps()
    if not steps:
        return work()
    try:
        steps[0]()
        return work()
    finally:
        steps[1]()


def _mute_steps() -> tuple[Callable[[], object], ...]:
    """How the native engine is muted on this thread, and unmuted; empty if it is not loaded."""
    observer = sys.modules.get(_OBSERVER)
    return () if observer is None else (partial(observer.mute, True), partial(observer.mute, False))
