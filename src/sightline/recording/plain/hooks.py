"""Installs a session of the plain engine and removes it again, exactly, in any order and from any thread.

A session installs at most one dispatch mode and one function mode on the thread's stacks. While anything
records, the module and optimizer hooks and the compile watch are installed for the whole process.
"""

from __future__ import annotations

import os
import threading

from sightline.recording.plain.compiled_regions import CompileWatch
from sightline.recording.plain.modes import DispatchMode, FunctionMode, StackMode
from sightline.recording.plain.module_calls import enter_module, leave_module, module_hooks
from sightline.recording.plain.session import PlainSession
from sightline.recording.plain.thread_state import active, all_states
from sightline.recording.step_marks import (
    install_optimizer_hooks,
    release_optimizer_hooks,
    remove_optimizer_hooks,
)
from sightline.recording.torchapi import DISPATCH_MODES, FUNCTION_MODES

_lock = threading.RLock()
_compile_watch = CompileWatch()


def _update_hooks() -> None:
    """Install the hooks of the process if anything records, else remove them.

    Every step may be repeated: after an interrupt the whole function is called again.
    """
    if active:
        _compile_watch.install()
        module_hooks.install(enter_module, leave_module)
        install_optimizer_hooks(_compile_watch)
    else:
        module_hooks.remove()
        _compile_watch.remove()
        release_optimizer_hooks(_compile_watch)


def install(session: PlainSession) -> None:
    """Begin to record on this thread."""
    with _lock:
        _remove_stopped_modes()
        active.setdefault(session.ident, []).append(session.state)
        _update_hooks()
    if session.level in ("aten", "both"):
        DispatchMode(session).put_on()
    if session.level in ("api", "both"):
        FunctionMode(session).put_on()


def uninstall(session: PlainSession) -> None:
    """Stop recording. Safe to call again, from any thread, and in any order with other recordings."""
    with _lock:
        session.halt()
        states = active.get(session.ident, [])
        if session.state in states:
            states.remove(session.state)
        if not states:
            active.pop(session.ident, None)
        _remove_stopped_modes()
        _update_hooks()


def _remove_stopped_modes() -> None:
    """Take the modes of stopped sessions off this thread's stacks.

    When a session is stopped from inside its own handler, or inside a backward pass, torch puts its mode back
    when that ends. The mode then records nothing, and is removed here when the next recording on the thread
    begins or stops.
    """
    for stack in (DISPATCH_MODES, FUNCTION_MODES):
        for mode in stack.from_top():
            if isinstance(mode, StackMode) and not mode.session.running:
                mode.take_off()


def _after_fork() -> None:
    """Stop all recordings in a forked process: nothing there will read them."""
    for state in all_states():
        state.session.stop_in_fork()
    active.clear()
    remove_optimizer_hooks()
    _remove_stopped_modes()
    _update_hooks()


# At import, since a fork handler cannot be removed and must be registered once.
os.register_at_fork(after_in_child=_after_fork)
