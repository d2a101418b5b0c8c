"""Steps: the calls of `sightline.spy` and `sightline.step`, the steps of optimizers; and warnings.

One listener for the first two and one pair of optimizer hooks serve the whole process and both engines, while
anything records. torch iterates over its hook tables while it calls them, so they must not change while a
recording begins or stops inside such a hook: see `hold_optimizer_hooks`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

from torch.utils.hooks import RemovableHandle

from sightline import markers
from sightline.assemble.batch import StepMark
from sightline.data.trace_data import OPTIMIZER_STEP
from sightline.recording.compilations import ExportPatch
from sightline.recording.observers import SpiedTensor
from sightline.recording.plain.thread_state import all_states, current_states
from sightline.recording.program_warnings import WarningPatch
from sightline.recording.tensor_registry import SwapPatch
from sightline.recording.torchapi import no_torch_function, optimizer_hooks
from sightline.recording.training_log import SchedulerPatch

if TYPE_CHECKING:
    from sightline.recording.session import Session

_KEY: Final = RemovableHandle(OrderedDict()).id  # torch gives each number to one handle only
_lock = threading.RLock()
_users: list[object] = []  # engines that record, and `hold_optimizer_hooks` blocks


def current_sessions() -> list[Session]:
    """The recordings of this thread, of either engine."""
    plain = [state.session for state in current_states() if not state.off]
    hooks = sys.modules.get("sightline.recording.native.hooks")
    return [*plain, *(() if hooks is None else hooks.sessions.get(get_ident(), ()))]


def all_sessions() -> list[Session]:
    """The recordings of every thread, of either engine."""
    plain = [state.session for state in all_states()]
    hooks = sys.modules.get("sightline.recording.native.hooks")
    native = [] if hooks is None else [one for each in list(hooks.sessions.values()) for one in each]
    return [*plain, *native]


class RecorderListener:
    """Passes calls of `sl.spy` and `sl.step` on to the recordings of their thread."""

    def spied(self, name: str, value: Any, module: Any) -> None:
        """``sl.spy`` was called."""
        sessions = current_sessions()
        if sessions:
            markers.check_name("spy", name)
        for session in sessions:
            try:
                session.name_spied(name, value)
                if session.observer is not None:
                    session.observer.spied(SpiedTensor(name, value, module, *session.context()))
            except Exception as error:
                session.fault(error)

    def stepped(self, begins: bool) -> None:
        """A step of ``sl.step`` has begun, or is about to end."""
        for session in current_sessions():
            note_step(session, begins)


def _swap_tensors(t1: Any, t2: Any) -> None:
    """The code of ``torch.utils.swap_tensors`` while anything records; its globals are those of torch."""
    from sightline.recording.step_marks import swaps

    swaps.swap(t1, t2)


_listener: Final = RecorderListener()
swaps: Final = SwapPatch(all_sessions, _swap_tensors.__code__)
_schedulers: Final = SchedulerPatch()
_warnings: Final = WarningPatch()
_exports: Final = ExportPatch(all_sessions)


def note_step(session: Session, begins: bool) -> None:
    """Write the current step into a recording."""
    _mark(session, markers.current_step(), begins)
    try:
        if session.observer is not None:
            session.observer.step()
    except Exception as error:
        session.fault(error)


def _mark(session: Session, name: str, begins: bool) -> None:
    session.steps.append(StepMark(name, session.next_id(), time.perf_counter_ns(), begins))


# -- optimizers ----------------------------------------------------------------------------------------------


def install_optimizer_hooks(user: object) -> None:
    """Install the listener and the hooks, until the last ``user`` has released them."""
    with _lock:
        if user not in _users:
            _users.append(user)
        if _listener not in markers.listeners:
            markers.listeners.append(_listener)
        optimizer_hooks._global_optimizer_pre_hooks[_KEY] = before_step
        optimizer_hooks._global_optimizer_post_hooks[_KEY] = after_step
        swaps.install()
        _schedulers.install(before_schedule)
        _warnings.install(before_warning)
        _exports.install()


def release_optimizer_hooks(user: object) -> None:
    """A user of the hooks is done; with the last one they are removed."""
    with _lock:
        if user in _users:  # not in a forked worker
            _users.remove(user)
        if not _users:
            remove_optimizer_hooks()


def remove_optimizer_hooks() -> None:
    """Remove the listener and the hooks, even if they have users."""
    _users.clear()
    if _listener in markers.listeners:
        markers.listeners.remove(_listener)
    optimizer_hooks._global_optimizer_pre_hooks.pop(_KEY, None)
    optimizer_hooks._global_optimizer_post_hooks.pop(_KEY, None)
    swaps.remove()
    _schedulers.remove()
    _warnings.remove()
    _exports.remove()


@contextmanager
def hold_optimizer_hooks() -> Iterator[None]:
    """A block in which recordings may begin and stop inside a hook of an optimizer."""
    token = object()
    install_optimizer_hooks(token)
    try:
        yield
    finally:
        release_optimizer_hooks(token)


def closure_code(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CodeType | None:
    """The code of the closure that ``optimizer.step`` was called with, if there is one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    while isinstance(closure, partial):
        closure = closure.func
    if callable(closure) and not hasattr(closure, "__code__"):  # an object of a class with ``__call__``
        closure = type(closure).__call__
    code = getattr(closure, "__code__", None)
    return code if isinstance(code, CodeType) else None


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The hook before an optimizer's step."""
    for session in current_sessions():
        try:
            with no_torch_function():
                session.label_gradients(optimizer=optimizer)
                session.label_state(optimizer)
                session.training.note_step(
                    optimizer,
                    session.modules,
                    sys._getframe(1),
                    session.elapsed(),
                    closure=closure_code(args, kwargs) is not None,
                )
                session.training.link(optimizer)
            _mark(session, OPTIMIZER_STEP, begins=True)
            session.begin_optimizer_step(sys._getframe(1), closure_code(args, kwargs))
        except Exception as error:
            session.fault(error)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The hook after it: name the optimizer state that exists by now."""
    for session in current_sessions():
        try:
            session.end_optimizer_step()
            _mark(session, OPTIMIZER_STEP, begins=False)
            with no_torch_function():
                if closure_code(args, kwargs) is not None:  # which has computed the gradients
                    session.label_gradients(optimizer=optimizer)
                session.label_state(optimizer)
        except Exception as error:
            session.fault(error)


def before_schedule(scheduler: Any, frame: FrameType) -> None:
    """Called before a scheduler sets the rates of its optimizer."""
    for session in current_sessions():
        try:
            session.training.note_schedule(scheduler, frame)
        except Exception as error:
            session.fault(error)


def before_warning(message: Any, frame: FrameType) -> None:
    """Called before a warning is shown, on the thread that shows it."""
    for session in current_sessions():
        try:
            session.warnings.note(message, frame, session.elapsed())
        except Exception as error:
            session.note_fault(error)
