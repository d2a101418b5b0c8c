"""`CallTracer`: the modules that ran, in the order in which they completed.

Torch's own hooks listen from ``register_hooks`` to ``remove_hooks``, and not a recording, for two reasons. A
recording notes the begin, the end, the inputs, the outputs and the caller of a call, which takes three times
as long as a name needs (5 µs a call against 1.7, with ``ops="none"``), and this must not be slower than the
tool it replaces. And it reports from the thread that started it, while the hooks of a module report calls
from any thread, for as long as the tracer lives. A recording has the same names in ``t.call_order()``.

The hooks are attached to the modules that are reported. If that would change the run, since torch fuses no
layer that has hooks, or if a shared module has several names, torch's hooks for all modules listen instead.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Self

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from sightline.compat import FUSED_HINT
from sightline.compat.torchspy.tensor_saver import BaseDebugger, Classes, Names, matching_modules

#: Named as in torchspy, so that the settings of a program for ``torchspy`` hold here.
_log: Final = logging.getLogger("torchspy.tracer")


@dataclass(frozen=True, slots=True)
class Hook:
    """One module that is reported, until it is removed.

    >>> Hook("encoder.0", print).remove()
    encoder.0
    """

    key: str
    forget: Callable[[str], Any]

    def remove(self) -> None:
        """Stop reporting the module."""
        self.forget(self.key)


class CallTracer(BaseDebugger):
    """The order in which modules complete: children before parents, the root last.

    >>> import tempfile, torch
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tracer = CallTracer(folder)
    ...     tracer.register_hooks(model)
    ...     with tracer:
    ...         y = model(torch.ones(1, 3))
    ...     tracer.save_trace().read_text()
    '0\\n1\\nroot'

    ``with tracer:`` enables it, clears the trace, and stops listening with the block; the next such block
    starts again. Calls that raise are not reported.
    """

    def __init__(self, output_dir: str | os.PathLike[str], enabled: bool = True) -> None:
        self._models: list[nn.Module] = []
        self._last_hooked: dict[str, str] = {}  # of the ``with`` block that ended last
        self._enabled_before: list[bool] = []
        self._calls = _CallLog()
        self._stop: Any = None  # removes the hook; also called when the tracer is collected
        self._enabled = enabled
        super().__init__(output_dir, enabled)

    @property
    def enabled(self) -> bool:
        """Whether calls are recorded; may be switched while modules are registered."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        self._sync()

    @property
    def hooks(self) -> list[Hook]:
        """A hook for each reported module; a shared module has one for each of its names."""
        return [Hook(key, self._forget) for key in self._calls.hooked]

    @property
    def call_trace(self) -> list[str]:
        """The paths of the calls so far, in order of completion: the list itself, which grows as they end."""
        return self._calls.done

    @call_trace.setter
    def call_trace(self, paths: list[str]) -> None:
        self._calls.done = paths

    def get_trace(self) -> list[str]:
        """A copy of ``call_trace``."""
        return list(self.call_trace)

    def register_hooks(
        self,
        model: nn.Module,
        target_classes: Classes = (nn.Module,),
        target_names: Names = None,
        exclude_names: Names = None,
    ) -> None:
        """Report the modules that match the filters; one that is registered twice is reported once."""
        self._stop_listening()
        self._last_hooked = {}
        if not any(registered is model for registered in self._models):
            self._models.append(model)
        number = next(i for i, registered in enumerate(self._models) if registered is model)
        for path, module in matching_modules(model, target_classes, target_names, exclude_names):
            key = str(number) if module is model and path == "root" else f"{number}.{path}"
            self._calls.hooked[key] = path
            self._remember(module, path)
            _log.info("Registered hook on: %s", path)
        self._sync()

    def remove_hooks(self) -> None:
        """Stop listening; the calls so far stay in ``call_trace``."""
        self._stop_listening()
        self._calls.hooked, self._last_hooked, self._models = {}, {}, []
        _log.info("Removed all hooks")

    def reset_trace(self) -> None:
        """Forget the calls so far."""
        self._calls.done = []
        self._sync()

    def save_trace(self, filename: str = "call_trace.txt") -> Path:
        """Write one path per line; returns the file."""
        path = self.output_dir / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self.call_trace), "utf-8")
        _log.info("Saved call trace to: %s (%d calls)", path, len(self.call_trace))
        return path

    def __enter__(self) -> Self:
        self._enabled_before.append(self._enabled)
        self._calls.hooked = self._calls.hooked or self._last_hooked
        self._enabled = True
        self.reset_trace()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_listening()
        self._last_hooked, self._calls.hooked = self._calls.hooked, {}
        self._enabled = self._enabled_before.pop()

    def _forget(self, key: str) -> None:
        self._calls.hooked.pop(key, None)
        self._stop_listening()
        self._sync()

    def _sync(self) -> None:
        """Attach the hooks while there are calls to report, and remove them otherwise."""
        if not (self._enabled and self._calls.hooked):
            self._stop_listening()
        elif self._stop is None:
            hooks = ExitStack()
            for handle in _listen(self._models, self._calls):
                hooks.callback(handle.remove)
            self._stop = weakref.finalize(self, hooks.close)

    def _stop_listening(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None


def _listen(models: Sequence[nn.Module], calls: _CallLog) -> list[RemovableHandle]:
    """Hook the modules to report; returns the handles that remove the hooks."""
    names = _ModuleNames.of(nn.ModuleList(models))
    if names.is_plain:
        return [
            module.register_forward_hook(_report(calls, calls.hooked[path]))
            for path, module in names.modules.items()
            if path in calls.hooked
        ]
    observer = _CallObserver(calls, names)
    return [
        register_module_forward_pre_hook(observer.enter),
        register_module_forward_hook(observer.leave, always_call=True),
    ]


def _report(calls: _CallLog, path: str) -> Callable[[nn.Module, Any, Any], None]:
    """A hook of a module: its path is added to the log."""

    def completed(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 — a hook of torch's
        calls.done.append(path)

    return completed


@dataclass(frozen=True, slots=True)
class _ModuleNames:
    """The paths of all modules, of containers, which are never called, and of layers that torch may fuse."""

    modules: dict[str, nn.Module]  #: by path; kept alive, so that their numbers stay theirs
    keys: dict[int, list[str]]  #: of a module's number: its paths, several if it is shared
    containers: AbstractSet[str]
    fusible: AbstractSet[str]

    @classmethod
    def of(cls, models: nn.Module) -> _ModuleNames:
        named = {path: module for path, module in models.named_modules(remove_duplicate=False) if path}
        keys: dict[int, list[str]] = {}
        for path, module in named.items():
            keys.setdefault(id(module), []).append(path)
        containers = {path for path, module in named.items() if type(module).forward is nn.Module.forward}
        fusible = {path for path, module in named.items() if isinstance(module, nn.TransformerEncoderLayer)}
        return cls(named, keys, containers, fusible)

    @property
    def is_plain(self) -> bool:
        """Whether a module alone says its path: none is shared, and none may run without those inside."""
        return not self.fusible and all(len(paths) == 1 for paths in self.keys.values())

    def choose(self, aliases: Sequence[str], caller: str, turn: int) -> str:
        """The name a module was called by: one that its caller can reach, each in turn."""
        inside = [path for path in aliases if not caller or path.startswith(f"{caller}.")] or aliases
        direct = [path for path in inside if self._is_reached(path, caller)] or inside
        return direct[turn % len(direct)]

    def _is_reached(self, path: str, caller: str) -> bool:
        """Whether only containers are between a module and its caller."""
        between = path.rpartition(".")[0]
        while len(between) > len(caller):
            if between not in self.containers:
                return False
            between = between.rpartition(".")[0]
        return True


class _CallLog:
    """The calls so far, shared by a tracer and its hook, and the modules to report."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.hooked: dict[str, str] = {}  # the path in all models -> the path to report


#: A running module call: the module; the exception that was being handled; the name it was called by, "" for
#: a module of no model; the innermost name around the calls inside it; how often it has called each module.
_OpenCall = tuple[nn.Module | None, BaseException | None, str, str, dict[int, int]]


class _CallObserver:
    """Adds the name of each call to the log when it completes: the one the module was called by."""

    def __init__(self, calls: _CallLog, names: _ModuleNames) -> None:
        self._calls = calls
        self._names = names
        self._open: defaultdict[int, list[_OpenCall]] = defaultdict(lambda: [(None, None, "", "", {})])
        self._fusible = names.fusible

    def enter(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002 — a hook of torch's
        """A module call begins."""
        stack, number = self._open[get_ident()], id(module)
        _, _, _, around, turns = stack[-1]
        turn = turns[number] = turns.get(number, -1) + 1
        aliases = self._names.keys.get(number, ())
        own = self._names.choose(aliases, around, turn) if aliases else ""
        stack.append((module, sys.exception(), own, own or around, {}))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002 — a hook of torch's
        """A module call ends; one that raised is not reported."""
        stack = self._open[get_ident()]
        if not any(call[0] is module for call in stack):
            return  # it began before
        while stack[-1][0] is not module:
            stack.pop()
        _, before, own, _, turns = stack.pop()
        if sys.exception() is not before:
            return
        if own in self._fusible and not turns and any(x.startswith(f"{own}.") for x in self._calls.hooked):
            self._fusible = frozenset()  # say only once why these modules are missing
            shown = own.partition(".")[2] or "root"  # without the number of the model
            _log.warning("No calls inside %s: %s.", shown, FUSED_HINT)
        if own in self._calls.hooked:
            self._calls.done.append(self._calls.hooked[own])
