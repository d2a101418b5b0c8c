"""What a test may leave behind in the process, and how to see that it left nothing.

`state` reads everything that is global and that a recorder could touch; `leftovers` says in sentences
what differs. The fixture ``nothing_left`` in conftest runs both around every test. `same_rng` and
`same_model` are for tests that must not change a generator or a model.

Nothing here imports torch: where torch was never imported, nothing of it can be left.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

#: The state of a process in which torch was just imported, for tests that import it themselves.
CLEAN: Final = {
    "the dispatch mode stack": 0,
    "the function mode stack": 0,
    "_is_in_torch_dispatch_mode": False,
    "_is_in_non_infra_torch_dispatch_mode": False,
    "_is_in_any_mode_without_ignore_compile_internals": False,
    "torch functions being overridable": True,
    "grad mode": True,
    "inference mode": False,
    "anomaly mode": False,
    "the saved-tensor hooks": None,
    "the functorch level": None,
    "the guard-complete hook": None,
    "the profiler": False,
    "deterministic algorithms": False,
    "the default dtype": "torch.float32",
}

_HOOKS: Final = (
    ("torch.nn.modules.module", "_global_forward_pre_hooks"),
    ("torch.nn.modules.module", "_global_forward_hooks"),
    ("torch.nn.modules.module", "_global_forward_hooks_always_called"),
    ("torch.nn.modules.module", "_global_forward_hooks_with_kwargs"),
    ("torch.nn.modules.module", "_global_backward_pre_hooks"),
    ("torch.nn.modules.module", "_global_backward_hooks"),
    ("torch.nn.modules.module", "_global_buffer_registration_hooks"),
    ("torch.nn.modules.module", "_global_module_registration_hooks"),
    ("torch.nn.modules.module", "_global_parameter_registration_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
)


def state() -> dict[str, Any]:
    """Every global thing a recorder could touch, by name. Cheap: it runs twice per test."""
    found: dict[str, Any] = {
        "sys.gettrace": sys.gettrace(),
        "sys.getprofile": sys.getprofile(),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        # Hypothesis times the collector from its first example on.
        "gc.callbacks": [
            call for call in gc.callbacks if "hypothesis" not in getattr(call, "__module__", "")
        ],
        "gc.isenabled": gc.isenabled(),
        "warnings.showwarning": (warnings.showwarning, getattr(warnings, "_showwarnmsg", None)),
        "our finders of modules": [one for one in sys.meta_path if _is_ours(one)],
    }
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12
    if monitoring is not None:
        found["sys.monitoring"] = [(monitoring.get_tool(i), _events(monitoring, i)) for i in range(6)]
    if "torch" in sys.modules:
        found |= _torch_state()
    return found


def _is_ours(one: object) -> bool:
    return (getattr(one, "__module__", None) or "").startswith("sightline")


def _events(monitoring: Any, tool: int) -> int:
    return int(monitoring.get_events(tool)) if monitoring.get_tool(tool) else 0


def _torch_state() -> dict[str, Any]:
    import torch
    import torch.nn.modules.module
    import torch.optim.optimizer
    import torch.utils._python_dispatch as dispatch

    c: Any = torch._C
    found: dict[str, Any] = {
        "the dispatch mode stack": c._len_torch_dispatch_stack(),
        "the function mode stack": c._len_torch_function_stack(),
        "torch functions being overridable": c._is_torch_function_enabled(),
        "the dispatch keys switched on": repr(c._dispatch_tls_local_include_set()),
        "the dispatch keys switched off": repr(c._dispatch_tls_local_exclude_set()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autograd's threads": c._is_multithreading_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "the autocast dtype": str(torch.get_autocast_dtype("cpu")),
        "the autocast cache": torch.is_autocast_cache_enabled(),
        "the saved-tensor hooks": c._autograd._top_saved_tensors_default_hooks(False),
        "the profiler": c._autograd._profiler_enabled(),
        "the functorch level": c._functorch.maybe_current_level(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the default dtype": str(torch.get_default_dtype()),
        "the matmul precision": torch.get_float32_matmul_precision(),
        "the number of threads": torch.get_num_threads(),
        "the guard-complete hook": _guard_complete_hook(),
        "torch.utils.swap_tensors": (torch.utils.swap_tensors, torch.utils.swap_tensors.__code__),
        "our callbacks of Dynamo's": _dynamo_callbacks(),
        "the eval-frame callback": c._dynamo.eval_frame.get_eval_frame_callback(),
    }
    for flag in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode",
                 "_is_in_any_mode_without_ignore_compile_internals"):  # fmt: skip
        found[flag] = getattr(dispatch, flag, False)
    for module, name in _HOOKS:
        found[name] = list(getattr(sys.modules[module], name).items())
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    found["the compiler's stance"] = getattr(stance, "stance", "default")
    return found


def _dynamo_callbacks() -> list[object]:
    """Those of ours that are told when something is compiled; Dynamo may be imported by the test itself."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    every = [] if handler is None else [*handler.start_callbacks, *handler.end_callbacks]
    return [one for one in every if _is_ours(one)]


def _guard_complete_hook() -> object:
    """Dynamo's hook, which can only be read by taking it off and putting it back."""
    from torch._C._dynamo.eval_frame import set_guard_complete_hook

    hook = set_guard_complete_hook(None)
    if hook is not None:
        set_guard_complete_hook(hook)
    return hook


class Namespaces:
    """The attributes of torch's own classes and modules, to see that none was patched.

    The objects are kept, so that an id cannot be taken over by another one.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[list[int], dict[str, Any]]] = {}

    def look(self) -> list[str]:
        """What was patched since the last look, which becomes the new state of things."""
        changes: list[str] = []
        for name, namespace in self._namespaces():
            now = vars(namespace)
            ids = list(map(id, now.values()))
            before = self._seen.get(name)
            if before is not None and before[0] == ids:
                continue
            if before is not None:
                changes += _patches(name, before[1], now)
            self._seen[name] = (ids, dict(now))
        return changes

    @staticmethod
    def _namespaces() -> list[tuple[str, Any]]:
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return []
        return [
            ("torch", torch),
            ("torch.Tensor", torch.Tensor),
            ("torch._C.TensorBase", torch._C.TensorBase),
            ("torch.nn.Module", torch.nn.Module),
            ("torch.nn.functional", torch.nn.functional),
            ("torch.autograd", torch.autograd),
            ("torch.autograd.Function", torch.autograd.Function),
            ("torch.optim.Optimizer", torch.optim.Optimizer),
            ("torch.optim.lr_scheduler", torch.optim.lr_scheduler),
            ("torch.optim.lr_scheduler._enable_get_lr_call", torch.optim.lr_scheduler._enable_get_lr_call),
            ("torch.utils", torch.utils),
            *((name, sys.modules[name]) for name in ("torch.export._trace",) if name in sys.modules),
        ]


#: What Dynamo marks a class with when it compiles a module of it, and Python when it pickles an instance.
#: transformers leaves a function of its own on `torch.nn.Module`.
_NOT_OURS: Final = frozenset(
    {"___has_generation_tag_patch", "___needs_generation_tag_patch", "__slotnames__", "smart_apply"}
)


def _patches(name: str, before: dict[str, Any], now: Any) -> list[str]:
    found = [f"{name}.{key} is gone." for key in before.keys() - now.keys()]
    for key, value in list(now.items()):
        if key in before and (value is before[key] or _equal_plain(value, before[key])):
            continue
        if not _is_torchs_own(value) and key not in _NOT_OURS:
            found.append(f"{name}.{key} {'was replaced' if key in before else 'is new'}: {value!r}.")
    return found


def _equal_plain(one: object, other: object) -> bool:
    plain = (int, float, str, bool, type(None))
    return isinstance(one, plain) and type(one) is type(other) and one == other


def _is_torchs_own(value: object) -> bool:
    """Whether torch made the change itself: a submodule imported late, a function it wraps later."""
    if isinstance(value, ModuleType):
        return True
    code = getattr(value, "__code__", None)
    root = Path(str(sys.modules["torch"].__file__)).parent
    return code is not None and Path(code.co_filename).is_relative_to(root)


def leftovers(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs, one sentence each. What only ``after`` knows is compared with a clean process."""
    found = []
    for name, now in after.items():
        if name in _HOOK_NAMES and name not in before:
            was: Any = []
        elif name in before or name in CLEAN:
            was = before.get(name, CLEAN.get(name))
        else:
            continue
        if not _same(was, now):
            found.append(f"{name} was {was!r}, is {now!r}.")
    return found


_HOOK_NAMES: Final = frozenset(name for _, name in _HOOKS)


def _same(was: Any, now: Any) -> bool:
    return was is now or (type(was) is type(now) and bool(was == now))


@contextmanager
def same_rng() -> Iterator[None]:
    """Check that the block draws no random number: torch, numpy and the standard library."""
    before = _generators()
    yield
    after = _generators()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"the block drew random numbers: {', '.join(changed)}"


def _generators() -> dict[str, Any]:
    found: dict[str, Any] = {"random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    if torch is not None:
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


@contextmanager
def same_model(model: nn.Module) -> Iterator[None]:
    """Check that the block leaves the model as it is: modes, hooks, attributes, parameters, buffers.

    Values of parameters and buffers may change, as training does; their identity may not.
    """
    before = _model_state(model)
    yield
    after = _model_state(model)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    assert not changed, f"the block changed the model: {', '.join(sorted(changed))}"


def _model_state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        label = path or type(module).__name__
        found[f"{label}.training"] = module.training
        found[f"the class of {label}"] = type(module)
        found[f"the attributes of {label}"] = sorted(vars(module))
        for name, value in vars(module).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                found[f"{label}.{name}"] = [] if value is None else list(value)
        for name, parameter in module._parameters.items():
            known = None if parameter is None else (id(parameter), parameter.requires_grad)
            found[f"{label}.{name}"] = known
            hooks = getattr(parameter, "_backward_hooks", None)
            found[f"the hooks of {label}.{name}"] = list(hooks or ())
    return found
