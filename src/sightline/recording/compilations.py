"""When Dynamo compiles, on whatever thread: how often, and how long it took.

Compiling is no part of what a model computes: its time is left out of the op and the calls it happens in,
and told by itself. Dynamo is imported by the first program that compiles something, which takes seconds and
is not ours to ask for; a recording that is running then begins to watch at that moment.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

_CALLBACKS: Final = "torch._dynamo.callback"


#: The recordings that are to hear of something.
Sessions = Callable[[], "Iterable[SessionBase]"]


class AfterImport(importlib.abc.MetaPathFinder):
    """Has a function called with a module: now if it is imported, else when it will have been.

    What the function raises is a fault of the recordings, and not of the program that imports the module.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None], sessions: Sessions) -> None:
        self._name, self._then, self._sessions = name, then, sessions

    def install(self) -> None:
        """Begin to wait."""
        found = sys.modules.get(self._name)
        if found is not None:
            self._tell(found)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def _tell(self, module: ModuleType) -> None:
        try:
            self._then(module)
        except Exception as error:
            note_faults(self._sessions, error)

    def remove(self) -> None:
        """Wait no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec, with a loader that calls back."""
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._tell(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec


class Compilations:
    """Tells recordings of every compilation while they run."""

    def __init__(self, sessions: Sessions, begins: Callable[[], None] | None = None) -> None:
        self._sessions, self._begins = sessions, begins
        self._handler: Any = None
        self._since = 0
        self._import = AfterImport(_CALLBACKS, self._register, sessions)

    def install(self) -> None:
        """Begin to watch, as soon as Dynamo is there."""
        self._import.install()

    def remove(self) -> None:
        """Put everything back."""
        self._import.remove()
        if self._handler is not None:
            with suppress(ValueError):  # the program has cleared them
                self._handler.remove_start_callback(self._start)
            with suppress(ValueError):
                self._handler.remove_end_callback(self._end)
            self._handler = None

    def _register(self, module: ModuleType) -> None:
        self._handler = handler = module.callback_handler
        if self._start not in handler.start_callbacks:
            handler.register_start_callback(self._start)
        if self._end not in handler.end_callbacks:
            handler.register_end_callback(self._end)

    def _start(self, *_: Any) -> None:
        try:
            if self._begins is not None:
                self._begins()
        except Exception as error:
            note_faults(self._sessions, error)
        self._since = time.perf_counter_ns()

    def _end(self, *_: Any) -> None:
        if not self._since:  # it began before we watched
            return
        taken, self._since = time.perf_counter_ns() - self._since, 0
        for session in self._sessions():
            try:
                session.note_compilation(taken)
            except Exception as error:
                session.note_fault(error)


def note_faults(sessions: Sessions, error: Exception) -> None:
    """Count a fault in every recording: the program has no part in it."""
    for session in sessions():
        session.note_fault(error)
