"""Putting a session in place and taking it out again, exactly, in any order and from any thread.

What is installed: at most one dispatch mode and one function mode on the thread's stacks, and for the
whole process, while anything records, the module and optimizer hooks and the compile watch.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from sightline.recording.compiled_code import CompileWatch
from sightline.recording.modes import DispatchMode, FunctionMode, StackMode
from sightline.recording.module_calls import install_hooks, remove_hooks
from sightline.recording.session import Session
from sightline.recording.session_base import SessionBase
from sightline.recording.step_marks import forget_optimizers, leave_optimizers, watch_optimizers
from sightline.recording.thread_state import active
from sightline.recording.torchapi import DISPATCH_MODES, FUNCTION_MODES

_lock = threading.RLock()
_watch = CompileWatch()


def _settle() -> None:
    """Have the hooks of the process in place exactly while anything records.

    Everything here can be said again: whoever was interrupted says it again, and it comes to the same.
    """
    if active:
        _watch.install()
        install_hooks()
        watch_optimizers(_watch)
    else:
        remove_hooks()
        _watch.remove()
        leave_optimizers(_watch)


def _native() -> Any:
    """The native engine's own, which is imported where it is used."""
    from sightline.recording.native import hooks

    return hooks


def install(session: SessionBase) -> None:
    """Begin to record on this thread."""
    if not isinstance(session, Session):
        _native().install(session)
        return
    with _lock:
        _sweep()
        active.setdefault(session.ident, []).append(session.state)
        _settle()
    if session.level in ("aten", "both"):
        DispatchMode(session).put_on()
    if session.level in ("api", "both"):
        FunctionMode(session).put_on()


def uninstall(session: SessionBase) -> None:
    """Stop recording. Safe to call again, from any thread, and in any order with other recordings."""
    if not isinstance(session, Session):
        _native().uninstall(session)
        return
    with _lock:
        session.halt()
        here = active.get(session.ident, [])
        if session.state in here:
            here.remove(session.state)
        if not here:
            active.pop(session.ident, None)
        _sweep()
        _settle()


def _sweep() -> None:
    """Take the modes of stopped sessions off this thread's stacks.

    One that is stopped from inside its own handler, or inside a backward pass, is put back by torch when
    that ends. It then passes everything through unseen, until the next recording on the thread begins or
    stops and it is taken off here.
    """
    for stack in (DISPATCH_MODES, FUNCTION_MODES):
        for mode in stack.from_top():
            if isinstance(mode, StackMode) and not mode.session.running:
                mode.take_off()


def _after_fork() -> None:
    """A forked worker records nothing: it works for nobody who could read it."""
    native = sys.modules.get("sightline.recording.native.hooks")
    if native is not None:
        native.after_fork()
    for state in [state for states in active.values() for state in states]:
        state.session.halt()
        if state.session.keeper is not None:
            state.session.keeper.abandon()
    active.clear()
    forget_optimizers()
    _sweep()
    _settle()


os.register_at_fork(after_in_child=_after_fork)
