"""``torch.compile``, for both engines: when Dynamo compiles, and the names and inputs of its opaque ops."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from sightline.recording.torchapi import ModuleHooks, Tensor, muted

if TYPE_CHECKING:
    from sightline.recording.session import Session

_CALLBACKS: Final = "torch._dynamo.callback"
_EXPORT: Final = "torch.export._trace"
_CAPTURE: Final = "_export_to_torch_ir"  # its function in which Dynamo reads the program
_WRAPPER: Final = "compile_wrapper"  # the name of the function that torch.compile returns
_WRAPPER_FILE: Final = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py")
COMPILED_BACKWARD: Final = "compiled backward"  # the name of its opaque op
COMPILED_NODE: Final = "CompiledFunctionBackward"  # the autograd node of a compiled region

#: Returns the recordings that are to be notified.
Sessions = Callable[[], "Iterable[Session]"]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module: now if it is imported, else right after its import.

    An error of the function is a fault of the recordings, and does not reach the program's import.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None], sessions: Sessions) -> None:
        self._name, self._then, self._sessions = name, then, sessions

    def install(self) -> None:
        """Call the function, or begin to wait for the import."""
        module = sys.modules.get(self._name)
        if module is not None:
            self._notify(module)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def _notify(self, module: ModuleType) -> None:
        try:
            self._then(module)
        except Exception as error:
            note_faults(self._sessions, error)

    def remove(self) -> None:
        """Stop waiting."""
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
            self._notify(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec


class Compilations:
    """Notifies recordings of every compilation while they run."""

    def __init__(self, sessions: Sessions, begins: Callable[[], None] | None = None) -> None:
        self._sessions, self._begins = sessions, begins
        self._handler: Any = None
        self._since = 0
        self._graphs = 0  #: that were compiled before the compilation that runs
        self._import = AfterImport(_CALLBACKS, self._register, sessions)

    def install(self) -> None:
        """Begin to watch, as soon as Dynamo is imported."""
        self._import.install()

    def remove(self) -> None:
        """Remove the callbacks."""
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
        self._graphs = _graph_count()
        self._since = time.perf_counter_ns()

    def _end(self, *_: Any) -> None:
        if not self._since:  # it began before the callbacks were registered
            return
        duration, self._since = time.perf_counter_ns() - self._since, 0
        for session in self._sessions():
            try:
                session.note_compilation(duration, max(_graph_count() - self._graphs, 0))
            except Exception as error:
                session.note_fault(error)


def _graph_count() -> int:
    """How many graphs Dynamo has compiled.

    It reports a compilation for a backward pass, too, and for a frame in which it finds nothing to compile.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


class ExportPatch:
    """Keeps our module hooks out of the graphs of ``torch.export`` with ``strict=True``.

    There Dynamo reads the program without running it: it would read our hooks too, and refuses to.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._import = AfterImport(_EXPORT, self._patch, sessions)
        self._patched: tuple[Any, Any] | None = None  # the original, ours

    def install(self) -> None:
        """Patch it, as soon as it is imported. Safe to call again."""
        self._import.install()

    def remove(self) -> None:
        """Put torch's function back, unless it was replaced by another since."""
        self._import.remove()
        module = sys.modules.get(_EXPORT)
        if self._patched is not None and getattr(module, _CAPTURE, None) is self._patched[1]:
            setattr(module, _CAPTURE, self._patched[0])
        self._patched = None

    def _patch(self, module: ModuleType) -> None:
        original = getattr(module, _CAPTURE, None)
        if original is None or self._patched is not None:
            return

        @functools.wraps(original)
        def capture(*args: Any, **kwargs: Any) -> Any:
            # Dynamo tries each op on tensors of its own: these are no part of the run either.
            return ModuleHooks.run_without(partial(muted, partial(original, *args, **kwargs)))

        self._patched = original, capture
        setattr(module, _CAPTURE, capture)


def note_faults(sessions: Sessions, error: Exception) -> None:
    """Count a fault in every recording."""
    for session in sessions():
        session.note_fault(error)


def is_wrapper(frame: FrameType) -> bool:
    """Whether a frame is of the function ``torch.compile`` returned."""
    code = frame.f_code
    return code.co_name == _WRAPPER and code.co_filename == _WRAPPER_FILE


def region_name(session: Session, function: Any) -> str:
    """The name of the opaque op of a compiled function, or of a compiled module by its class."""
    name = getattr(function, "__qualname__", type(function).__name__)
    owner = getattr(function, "__self__", None)
    calls = session.context()[0]
    if name.startswith("wrap_inline.") and calls:  # torch.compile(module)
        called = session.modules.all[calls[-1]].ref()
        name = type(getattr(called, "_orig_mod", called)).__name__
    elif owner is not None and name in ("Module._call_impl", "Module._wrapped_call_impl"):
        name = type(owner).__name__
    return f"compiled {name}"


def new_tensors(session: Session, frame: FrameType | None) -> list[Any]:
    """The tensors in a frame's variables that have no value yet.

    They are not outputs of the region that the frame calls now.
    """
    variables = list(frame.f_locals.values()) if frame is not None else []
    return [one for one in variables if isinstance(one, Tensor) and session.values.find(one) is None]
