"""Compiled code under the native engine: one opaque op for each call of a compiled function.

The function that ``torch.compile`` returns switches Dynamo on before it calls the compiled code and off
after it. Both go through functions in ``torch._dynamo.eval_frame``, which are patched while something
records: there a region begins and ends. Inside it nothing is recorded and no hook of ours is in torch's
tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from sightline.recording.compilations import AfterImport, Compilations, is_wrapper, new_tensors, region_name
from sightline.recording.observers import notify_region
from sightline.recording.operations import OPAQUE, add_info, opaque_traits
from sightline.recording.torchapi import no_torch_function

if TYPE_CHECKING:
    from sightline.recording.native.session import NativeSession
    from sightline.recording.session import Session

_EVAL_FRAME: Final = "torch._dynamo.eval_frame"
_NAMES: Final = ("set_eval_frame", "_maybe_set_eval_frame")


class CompiledRegions:
    """Notices when compiled code begins and ends, on every thread, while anything records natively."""

    def __init__(
        self, sessions: dict[int, list[NativeSession]], hide: Callable[[], None], show: Callable[[], None]
    ) -> None:
        self._sessions, self._hide, self._show = sessions, hide, show
        self._patched: dict[str, tuple[Any, Any]] = {}  # name -> original, ours
        self._inside: dict[int, FrameType] = {}  # thread -> the frame of the outermost compiled function
        self._import = AfterImport(_EVAL_FRAME, self._patch, self._all)
        self._compilations = Compilations(self._all)

    def install(self) -> None:
        """Patch Dynamo, as soon as it is imported."""
        self._import.install()
        self._compilations.install()

    def remove(self) -> None:
        """Restore the originals."""
        self._import.remove()
        self._compilations.remove()
        module = sys.modules.get(_EVAL_FRAME)
        for name, (original, ours) in self._patched.items():
            if getattr(module, name, None) is ours:
                setattr(module, name, original)
        self._patched.clear()
        self._inside.clear()

    def _all(self) -> list[NativeSession]:
        return [session for each in list(self._sessions.values()) for session in each]

    def _patch(self, module: ModuleType) -> None:
        native = next((session.native for session in self._all()), None)
        for name in _NAMES:
            if native is None or getattr(module, name) is self._patched.get(name, (None, self))[1]:
                continue
            original = getattr(module, name)
            ours = native.watch_eval_frame(original, self._begins, self._ends)
            self._patched[name] = original, ours
            setattr(module, name, ours)

    def _begins(self) -> None:
        """Dynamo is about to be switched on: if a compiled function does it, its region begins."""
        wrapper = sys._getframe(1)
        sessions = self._sessions.get(get_ident())
        if not sessions or get_ident() in self._inside or not is_wrapper(wrapper):
            return
        self._inside[get_ident()] = wrapper
        self._hide()
        for session in sessions:
            try:
                enter_region(session, wrapper)
            except Exception as error:
                session.note_fault(error)

    def _ends(self) -> None:
        """Dynamo was switched off: if the outermost compiled function did it, its region ends."""
        if self._inside.get(get_ident()) is sys._getframe(1):
            self._leave()

    def _leave(self) -> None:
        del self._inside[get_ident()]
        for session in self._sessions.get(get_ident(), ()):
            try:
                number = session.recording.leave_region()
                if number >= 0:
                    session.regions.append(number)
            except Exception as error:
                session.note_fault(error)
        if not self._inside:
            self._show()


def has_compiled_code() -> bool:
    """Whether anything with a backward pass was compiled so far: each makes a class of its own."""
    return any(one.__name__ == "CompiledFunction" for one in torch.autograd.Function.__subclasses__())


def enter_region(session: NativeSession, wrapper: FrameType) -> None:
    """Open one opaque op for compiled code that begins."""
    local = wrapper.f_locals
    with no_torch_function():
        for tensor in new_tensors(session, wrapper.f_back):
            session.values.value(tensor)
        info = opaque_info(session, region_name(session, local.get("fn")))
        args, kwargs = local.get("args", ()), local.get("kwargs")
        form, inputs = session.read(args, kwargs)
    begun = session.recording.enter_region(info, form, inputs, wrapper.f_back)
    if begun is not None:
        number, stack = begun
        notify_region(session, session.infos[info], number, stack, inputs, args, kwargs, form)


def opaque_info(session: Session, name: str) -> int:
    """The number of an opaque operation."""
    for info in session.infos:
        if info.flavour == OPAQUE and info.name == name:
            return info.number
    return add_info(session.infos, opaque_traits((name, None))).number
