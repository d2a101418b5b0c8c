"""Installs a native recording: the hooks of modules and optimizers, one set for the process.

Nothing of ours runs between the program and its ops. Module calls are intercepted by global hooks, and Dynamo
guards on those: they are removed while compiled code runs, so that its guards hold.
"""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import Any, Final

from sightline.recording.native.compiled_regions import CompiledRegions
from sightline.recording.native.session import NativeSession
from sightline.recording.stacks import hide_own_frames
from sightline.recording.step_marks import install_optimizer_hooks, release_optimizer_hooks
from sightline.recording.torchapi import ModuleHooks, module_hooks

_module_hooks: Final = ModuleHooks()
_lock: Final = threading.RLock()
#: The recordings of each thread on which one was started, in order of starting.
sessions: Final[dict[int, list[NativeSession]]] = {}


class Hooks:
    """The hooks of the process while anything records natively; there is one set of them."""

    def __init__(self) -> None:
        self._observer: ModuleType | None = None
        self._original_check: Any = None

    def install(self, observer: ModuleType) -> None:
        """Install the hooks."""
        self._observer = observer
        self.show()
        install_optimizer_hooks(self)
        # torch warns when a compiled module is called while there are global hooks; not because of ours.
        if module_hooks._has_any_global_hook != self._has_other_hooks:
            self._original_check = module_hooks._has_any_global_hook
            module_hooks._has_any_global_hook = self._has_other_hooks

    def remove(self) -> None:
        """Remove the hooks."""
        self.hide()
        release_optimizer_hooks(self)
        if module_hooks._has_any_global_hook == self._has_other_hooks:
            module_hooks._has_any_global_hook = self._original_check
        self._observer = None

    def show(self) -> None:
        """Add our hooks to torch's tables."""
        if self._observer is not None:
            _module_hooks.install(self._observer.enter_module, self._observer.leave_module)

    def hide(self) -> None:
        """Remove our hooks from torch's tables."""
        _module_hooks.remove()

    def _has_other_hooks(self) -> bool:
        return bool(self._original_check()) and not _module_hooks.are_alone()


# At import, as in `recorder`: this engine's modules are imported later than that.
hide_own_frames()
_hooks: Final = Hooks()
_regions: Final = CompiledRegions(sessions, _hooks.hide, _hooks.show)


def install(session: NativeSession) -> None:
    """Begin to record on this thread."""
    with _lock:
        sessions.setdefault(session.ident, []).append(session)
        _update_hooks(session.native)
    session.start()


def uninstall(session: NativeSession) -> None:
    """Stop recording. Safe to call again, from any thread, and in any order with other recordings."""
    with _lock:
        session.halt()
        running = sessions.get(session.ident, [])
        if session in running:
            running.remove(session)
        if not running:
            sessions.pop(session.ident, None)
        _update_hooks(session.native)


def _update_hooks(observer: ModuleType) -> None:
    """Install the hooks if anything records, else remove them.

    Every step may be repeated: after an interrupt the whole function is called again.
    """
    if sessions:
        _regions.install()
        _hooks.install(observer)
    else:
        _hooks.remove()
        _regions.remove()


def _after_fork() -> None:
    """Stop all recordings in a forked process: nothing there will read them."""
    running = [session for each in sessions.values() for session in each]
    if not running:
        return
    running[0].native.after_fork()
    for session in running:
        session.stop_in_fork()
    sessions.clear()
    _hooks.remove()
    _regions.remove()


# At import, since a fork handler cannot be removed and must be registered once.
os.register_at_fork(after_in_child=_after_fork)
