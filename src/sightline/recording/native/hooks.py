"""Putting a native recording in place: hooks of modules and optimizers, which are the process's.

Nothing of ours stands between the program and its ops. Module calls are seen by global hooks, and Dynamo
guards on those: they are taken off while compiled code runs, so that it finds what it was compiled with.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import ModuleType
from typing import Any, Final

from torch.utils.hooks import RemovableHandle

from sightline.recording.native.compiled_regions import CompiledRegions
from sightline.recording.native.session import NativeSession
from sightline.recording.stacks import hide_own_frames
from sightline.recording.step_marks import install_optimizer_hooks, release_optimizer_hooks
from sightline.recording.torchapi import module_hooks

_KEY: Final = RemovableHandle(OrderedDict()).id  # a number no other hook will have
_lock: Final = threading.RLock()
#: The recordings of each thread on which one was started, in order of starting.
sessions: Final[dict[int, list[NativeSession]]] = {}


class Hooks:
    """The process's one set of hooks while anything records natively."""

    def __init__(self) -> None:
        self._observer: ModuleType | None = None
        self._had_any: Any = None

    def install(self, observer: ModuleType) -> None:
        """Put the hooks in place."""
        self._observer = observer
        self.show()
        install_optimizer_hooks(self)
        # torch warns whoever calls a compiled module of global hooks; of ours nobody needs a warning.
        if module_hooks._has_any_global_hook != self._has_any_other:
            self._had_any = module_hooks._has_any_global_hook
            module_hooks._has_any_global_hook = self._has_any_other

    def remove(self) -> None:
        """Take them out again."""
        self.hide()
        release_optimizer_hooks(self)
        if module_hooks._has_any_global_hook == self._has_any_other:
            module_hooks._has_any_global_hook = self._had_any
        self._observer = None

    def show(self) -> None:
        """Have module calls seen."""
        if self._observer is not None:
            module_hooks._global_forward_pre_hooks[_KEY] = self._observer.enter_module
            module_hooks._global_forward_hooks[_KEY] = self._observer.leave_module
            module_hooks._global_forward_hooks_with_kwargs[_KEY] = True
            module_hooks._global_forward_hooks_always_called[_KEY] = True

    def hide(self) -> None:
        """Have no hook of ours in torch's tables."""
        for table in _MODULE_TABLES:
            table.pop(_KEY, None)

    def _has_any_other(self) -> bool:
        found = self._had_any()
        if found and all(not (table.keys() - {_KEY}) for table in _MODULE_TABLES):
            backward = module_hooks._global_backward_pre_hooks or module_hooks._global_backward_hooks
            return bool(backward)
        return bool(found)


_MODULE_TABLES: Final = (
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    module_hooks._global_forward_hooks_with_kwargs,
    module_hooks._global_forward_hooks_always_called,
)
hide_own_frames()  # those of this package too
_hooks: Final = Hooks()
_regions: Final = CompiledRegions(sessions, _hooks.hide, _hooks.show)


def install(session: NativeSession) -> None:
    """Begin to record on this thread."""
    with _lock:
        sessions.setdefault(session.ident, []).append(session)
        _settle(session.native)
    session.start()


def uninstall(session: NativeSession) -> None:
    """Stop recording. Safe to call again, from any thread, and in any order with other recordings."""
    with _lock:
        session.halt()
        here = sessions.get(session.ident, [])
        if session in here:
            here.remove(session)
        if not here:
            sessions.pop(session.ident, None)
        _settle(session.native)


def _settle(observer: ModuleType) -> None:
    """Have everything in place exactly while anything records.

    Everything here can be said again: whoever was interrupted says it again, and it comes to the same.
    """
    if sessions:
        _regions.install()
        _hooks.install(observer)
    else:
        _hooks.remove()
        _regions.remove()


def after_fork() -> None:
    """A forked worker records nothing: it works for nobody who could read it."""
    found = [session for here in sessions.values() for session in here]
    if not found:
        return
    found[0].native.after_fork()
    for session in found:
        session.halt()
        if session.stream_writer is not None:
            session.stream_writer.abandon()
    sessions.clear()
    _hooks.remove()
    _regions.remove()
