"""`CallTracer`: which modules ran, in the order in which they completed.

It is a recording of module calls only, from ``register_hooks`` to ``remove_hooks``: nothing is attached to
the model. A shared module is reported under the name it was called by.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Self

from torch import nn

from sightline.compat import FUSED_HINT
from sightline.compat.torchspy.tensor_saver import BaseDebugger, Classes, Names, matching_modules
from sightline.recording.observers import ObservedCall, Observer
from sightline.recording.recorder import Recorder, RecordingOptions

#: Named as in torchspy, so that what a program sets for ``torchspy`` holds here.
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

    ``with tracer:`` enables it, clears the trace, and ends the recording with the block; the next such block
    starts one again. Calls that raise are not reported. A recording sees the thread that started it, and
    nothing inside compiled code.
    """

    def __init__(self, output_dir: str | os.PathLike[str], enabled: bool = True) -> None:
        self._models: list[nn.Module] = []
        self._last_hooked: dict[str, str] = {}  # of the ``with`` block that ended last
        self._enabled_before: list[bool] = []
        self._calls = _CallLog()
        self._recording: Recorder | None = None
        self._end: Any = None
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
        self._end_recording()
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
        """End the recording; its calls stay in ``call_trace``."""
        self._end_recording()
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
        self._end_recording()
        self._last_hooked, self._calls.hooked = self._calls.hooked, {}
        self._enabled = self._enabled_before.pop()

    def _forget(self, key: str) -> None:
        self._calls.hooked.pop(key, None)
        self._sync()

    def _sync(self) -> None:
        """Start or end the recording: it runs while there is something to report."""
        if not (self._enabled and self._calls.hooked):
            self._end_recording()
        elif self._recording is None:
            models = nn.ModuleList(self._models)
            observer = partial(_CallObserver, calls=self._calls, names=_ModuleNames.of(models))
            self._recording = Recorder(models, "none", "calls", options=RecordingOptions(observer=observer))
            self._end = weakref.finalize(self, self._recording.stop)
            self._recording.start(sys._getframe(1))

    def _end_recording(self) -> None:
        if self._recording is not None:
            self._end.detach()
            self._recording.stop()
            self._recording = self._end = None


@dataclass(frozen=True, slots=True)
class _ModuleNames:
    """The paths of all modules, of containers, which are never called, and of layers that torch may fuse."""

    paths: AbstractSet[str]
    containers: AbstractSet[str]
    fusible: AbstractSet[str]

    @classmethod
    def of(cls, models: nn.Module) -> _ModuleNames:
        named = dict(models.named_modules(remove_duplicate=False))
        containers = {path for path, module in named.items() if type(module).forward is nn.Module.forward}
        fusible = {path for path, module in named.items() if isinstance(module, nn.TransformerEncoderLayer)}
        return cls(frozenset(named), containers, fusible)

    def choose(self, aliases: Sequence[str], caller: str, turn: int) -> str:
        """The name a module was called by: one that its caller can reach, each in turn."""
        existing = [path for path in aliases if path in self.paths]
        inside = [path for path in existing if not caller or path.startswith(f"{caller}.")] or existing
        if not inside:
            return ""
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
    """The calls so far, shared by a tracer and its recording, and the modules to report."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.hooked: dict[str, str] = {}  # the path in all models -> the path to report


#: A running module call: its number; the name it was called by, "" for a module of no model; the innermost
#: name around the calls inside it; and how often it has called each module. A tuple, as one is made per call.
_OpenCall = tuple[int, str, str, dict[int, int]]


class _CallObserver(Observer):
    """Adds the name of each call to the log when it completes."""

    silent = False
    ops = False
    api = False

    def __init__(self, session: Any, calls: _CallLog, names: _ModuleNames) -> None:
        self._modules = session.modules.all
        self._calls = calls
        self._names = names
        self._open: defaultdict[int, list[_OpenCall]] = defaultdict(lambda: [(-1, "", "", {})])  # by thread
        self._name_cache: dict[tuple[int, str, int], str] = {}
        self._fusible = names.fusible

    def enter(self, call: ObservedCall) -> None:
        """A module call begins."""
        stack, module = self._open[get_ident()], call.module
        _, _, around, turns = stack[-1]
        turn = turns[module] = turns.get(module, -1) + 1
        own = self._name_cache.get((module, around, turn))
        if own is None:
            own = self._names.choose(self._modules[module].aliases, around, turn)
            self._name_cache[module, around, turn] = own
        stack.append((call.number, own, own or around, {}))

    def leave(self, call: ObservedCall) -> None:
        """A module call ends; one that raised is not reported."""
        stack = self._open[get_ident()]
        while stack[-1][0] > call.number:  # calls that an exception went through
            stack.pop()
        if stack[-1][0] != call.number:
            return  # it began before the recording
        _, own, _, turns = stack.pop()
        if own in self._fusible and not turns and not call.raised:
            self._warn_of_fusion(own)
        if not call.raised and own in self._calls.hooked:
            self._calls.done.append(self._calls.hooked[own])

    def _warn_of_fusion(self, path: str) -> None:
        """Say once why modules that were asked for are missing."""
        hooked = self._calls.hooked
        if any(other.startswith(f"{path}.") for other in hooked):
            self._fusible = frozenset()
            shown = path.partition(".")[2] or "root"  # without the number of the model
            _log.warning("No calls inside %s: %s.", shown, FUSED_HINT)
