"""Putting a session in place and taking it out again, exactly, in any order and from any thread.

Validate first, install second, restore always. What is installed: at most one dispatch mode and one
function mode on the thread's stacks, and for the whole process, while anything records, one pair of
module hooks, one pair of optimizer hooks and the compile watch.
"""

from __future__ import annotations

import os
import threading
from threading import get_ident
from typing import Any

from sightline.recording import torchapi as api
from sightline.recording.compiled import CompileWatch
from sightline.recording.hooks import Hooks
from sightline.recording.lanes import Lane
from sightline.recording.session import Session

_lock = threading.RLock()
_active: dict[int, list[Lane]] = {}
_process_wide: list[Any] = []  # handles of what is installed for the process
_left_behind: list[Any] = []  # modes of stopped sessions that torch will put back (see `_take`)


def lanes_here() -> list[Lane]:
    """The recordings of this thread; an autograd worker has those of the thread it works for."""
    found = _active.get(get_ident())
    if found is not None:
        return found
    modes = (api.dispatch_mode_at(i) for i in range(api.dispatch_depth()))
    sessions = (getattr(mode, "session", None) for mode in modes)
    return [one.lane_here() for one in sessions if isinstance(one, Session) and one.running]


def install(session: Session) -> None:
    """Begin to record on this thread."""
    from sightline.recording.interception import DispatchMode, FunctionMode

    with _lock:
        _sweep()
        if not _process_wide:
            _install_process_wide()
        _active.setdefault(session.lane.ident, []).append(session.lane)
    if session.level in ("aten", "both"):
        session.dispatch_mode = DispatchMode(session)
        api.push_dispatch_mode(session.dispatch_mode)
    if session.level in ("api", "both"):
        session.function_mode = FunctionMode(session)
        api.push_function_mode(session.function_mode)


def uninstall(session: Session) -> None:
    """Stop recording. Safe to call twice, from any thread, and in any order with other recordings."""
    with _lock:
        if not session.running:
            return
        session.halt()
        here = _active.get(session.lane.ident, [])
        if session.lane in here:
            here.remove(session.lane)
        if not here:
            _active.pop(session.lane.ident, None)
        _take_modes(session)
        _sweep()
        if not _active:
            _remove_process_wide()


def _take_modes(session: Session) -> None:
    for mode, take in (
        (session.function_mode, take_function_mode),
        (session.dispatch_mode, _take_dispatch),
    ):
        if mode is not None and not take(mode):
            _left_behind.append(mode)


def take_function_mode(mode: Any) -> bool:
    """Take a function mode off this thread's stack; False if it is not on it."""
    return _take(mode, api.function_depth, api.pop_function_mode, api.push_function_mode)


def _take_dispatch(mode: Any) -> bool:
    return _take(mode, api.dispatch_depth, api.pop_dispatch_mode, api.push_dispatch_mode)


def _take(mode: Any, depth: Any, pop: Any, push: Any) -> bool:
    """Take a mode out of this thread's stack, wherever it is in it; the others keep their order.

    False if it is not there: the stop came from inside one of its own handlers, where torch has set the
    mode aside and will put it back; or from another thread. It then passes everything through unseen and
    is taken out at the next chance (`_sweep`).
    """
    above = []
    found = False
    while not found and depth():
        top = pop()
        if top is mode:
            found = True
        else:
            above.append(top)
    for other in reversed(above):
        push(other)
    return found


def _sweep() -> None:
    """Take out modes of stopped sessions that torch has put back since."""
    _left_behind[:] = [
        mode for mode in _left_behind if not (take_function_mode(mode) or _take_dispatch(mode))
    ]


def _install_process_wide() -> None:
    watch = CompileWatch(lanes_here)
    watch.install()
    _process_wide.append(watch)
    _process_wide.append(Hooks(lanes_here))


def _remove_process_wide() -> None:
    while _process_wide:
        _process_wide.pop().remove()


def _after_fork() -> None:
    """A forked worker records nothing: it works for nobody who could read it."""
    for lanes in list(_active.values()):
        for lane in lanes:
            lane.session.halt()
            _take_modes(lane.session)
    _active.clear()
    _remove_process_wide()


os.register_at_fork(after_in_child=_after_fork)
