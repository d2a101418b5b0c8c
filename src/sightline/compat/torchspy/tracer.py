"""`CallTracer`: which modules ran, in the order they were done.

It is a recording of module calls only, open from ``register_hooks`` to ``remove_hooks``: nothing is attached
to the model. A module that is shared is reported under the name it was called by.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from sightline.api import Trace
from sightline.compat.torchspy.saver import BaseDebugger, Classes, Names, chosen_modules
from sightline.trace.data import RAISED, UNFINISHED, TraceData
from sightline.tracing import trace


@dataclass(frozen=True, slots=True)
class Hook:
    """One module that is reported, until it is removed.

    >>> Hook("encoder.0", print).remove()
    encoder.0
    """

    key: str
    forget: Callable[[str], Any]

    def remove(self) -> None:
        """Report the module no more."""
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

    ``with tracer:`` enables it, begins anew, and ends the recording with the block; the next such block takes
    it up again. Calls that raise are not reported. A recording sees the thread that began it.
    """

    def __init__(self, output_dir: str | os.PathLike[str], enabled: bool = True) -> None:
        self._models: list[nn.Module] = []
        self._hooked: dict[str, str] = {}  # the path in all models -> the path that is reported
        self._shelf: dict[str, str] = {}  # what a block that has ended had hooked
        self._before: list[bool] = []
        self._done: list[str] = []
        self._recording: trace | None = None
        self._running: Trace | None = None
        self._end: Any = None
        self._names: _Names | None = None
        self._enabled = enabled
        super().__init__(output_dir, enabled)

    @property
    def enabled(self) -> bool:
        """Whether calls are recorded; may be switched while modules are registered."""
        return self._enabled

    @enabled.setter
    def enabled(self, wanted: bool) -> None:
        self._enabled = wanted
        self._sync()

    @property
    def hooks(self) -> list[Hook]:
        """One for each module that is reported; a shared one has one for each of its names."""
        return [Hook(key, self._forget) for key in self._hooked]

    @property
    def call_trace(self) -> list[str]:
        """The paths of the calls so far, in order of completion."""
        if self._running is None or self._names is None:
            return list(self._done)
        return self._done + completed(self._running.data, self._hooked, self._names)

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
        """Report the modules that the filters mean; one that is registered twice is reported once."""
        self._harvest()
        self._shelf = {}
        if not any(known is model for known in self._models):
            self._models.append(model)
        number = next(i for i, known in enumerate(self._models) if known is model)
        for path, module in chosen_modules(model, target_classes, target_names, exclude_names):
            key = str(number) if module is model and path == "root" else f"{number}.{path}"
            self._hooked[key] = path
            self._remember(module, path)
        self._sync()

    def remove_hooks(self) -> None:
        """End the recording; what it saw stays in ``call_trace``."""
        self._harvest()
        self._hooked, self._shelf, self._models = {}, {}, []

    def reset_trace(self) -> None:
        """Forget the calls so far."""
        self._harvest()
        self._done = []
        self._sync()

    def save_trace(self, filename: str = "call_trace.txt") -> Path:
        """Write one path per line; returns the file."""
        path = self.output_dir / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self.call_trace), "utf-8")
        return path

    def __enter__(self) -> Self:
        self._before.append(self._enabled)
        self._hooked = self._hooked or self._shelf
        self._enabled = True
        self.reset_trace()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._harvest()
        self._shelf, self._hooked = self._hooked, {}
        self._enabled = self._before.pop()

    def _forget(self, key: str) -> None:
        self._harvest()
        self._hooked.pop(key, None)
        self._sync()

    def _sync(self) -> None:
        """Record if there is something to report, and only then."""
        wanted = self._enabled and bool(self._hooked)
        if not wanted:
            self._harvest()
        elif self._recording is None:
            models = nn.ModuleList(self._models)
            self._names = _Names.of(models)
            self._recording = trace(models, ops="none", name="calls")
            self._end = weakref.finalize(self, self._recording.stop)
            self._running = self._recording.start()

    def _harvest(self) -> None:
        """Stop recording, and keep what was seen."""
        if self._recording is not None and self._names is not None:
            self._end.detach()
            seen = self._recording.stop()
            self._done += completed(seen.data, self._hooked, self._names)
            self._recording = self._running = self._end = None


@dataclass(frozen=True, slots=True)
class _Names:
    """The modules of all models: every path there is, and those of lists, which nobody calls."""

    paths: AbstractSet[str]
    silent: AbstractSet[str]

    @classmethod
    def of(cls, models: nn.Module) -> _Names:
        named = dict(models.named_modules(remove_duplicate=False))
        silent = {path for path, module in named.items() if type(module).forward is nn.Module.forward}
        return cls(frozenset(named), silent)

    def choose(self, aliases: Sequence[str], caller: str, turn: int) -> str:
        """The name a module was called by: one its caller can reach, each in its turn."""
        known = [path for path in aliases if path in self.paths]
        inside = [path for path in known if not caller or path.startswith(f"{caller}.")] or known
        if not inside:
            return ""
        direct = [path for path in inside if self._is_reached(path, caller)] or inside
        return direct[turn % len(direct)]

    def _is_reached(self, path: str, caller: str) -> bool:
        """Whether only lists are between a module and its caller."""
        between = path.rpartition(".")[0]
        while len(between) > len(caller):
            if between not in self.silent:
                return False
            between = between.rpartition(".")[0]
        return True


def completed(data: TraceData, wanted: Mapping[str, str], names: _Names) -> list[str]:
    """The wanted calls of a recording in the order they were done, without recursion."""
    parents, modules, flags = (
        column.tolist() for column in (data.calls.parent, data.calls.module, data.calls.flags)
    )
    children: defaultdict[int, list[int]] = defaultdict(list)
    own: list[str] = []  # the name each call was made by; none for a module of no model
    within = {-1: ""}  # the innermost name around what a call calls
    turns: defaultdict[tuple[int, int], int] = defaultdict(int)
    for call, (parent, module) in enumerate(zip(parents, modules, strict=True)):  # a parent comes first
        children[parent].append(call)
        own.append(names.choose(data.modules[module].aliases, within[parent], turns[parent, module]))
        turns[parent, module] += 1
        within[call] = own[call] or within[parent]
    found: list[str] = []
    stack = [(call, False) for call in reversed(children[-1])]
    while stack:
        call, done = stack.pop()
        if not done:
            stack.append((call, True))
            stack += [(inner, False) for inner in reversed(children[call])]
        elif not flags[call] & (RAISED | UNFINISHED) and own[call] in wanted:
            found.append(wanted[own[call]])
    return found
