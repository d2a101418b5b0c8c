"""Steps: what `sightline.spy` and `sightline.step` say, and when an optimizer steps.

The hooks of optimizers are one pair for the whole process and both engines, under a key of their own. torch
walks over its tables while it calls them, so a recording that begins or stops in such a hook must find them
in place: see `standing_by`.
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
from sightline.recording.observers import SpiedTensor
from sightline.recording.thread_state import states_here
from sightline.recording.torchapi import optimizer_hooks, quiet
from sightline.recording.training_log import SchedulerWatch
from sightline.recording.values import SwapWatch
from sightline.trace.assembly.batch import StepMark
from sightline.trace.data import OPTIMIZER_STEP

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

_KEY: Final = RemovableHandle(OrderedDict()).id  # a number no other hook will have
_lock = threading.RLock()
_swaps = SwapWatch()
_schedulers = SchedulerWatch()
_users: list[object] = []  # engines that record, and whoever stands by


def sessions_here() -> list[SessionBase]:
    """The recordings of this thread, of either engine."""
    plain = [state.session for state in states_here() if not state.off]
    native = sys.modules.get("sightline.recording.native.hooks")
    return [*plain, *(() if native is None else native.sessions.get(get_ident(), ()))]


class RecorderListener:
    """Passes on what a program says to the recordings of its thread."""

    def spied(self, name: str, value: Any, module: Any) -> None:
        """A value was named."""
        sessions = sessions_here()
        if sessions:
            markers.check_name("spy", name)
        for session in sessions:
            try:
                session.name_spied(name, value)
                if session.observer is not None:
                    session.observer.spied(SpiedTensor(name, value, module, *session.where()))
            except Exception as error:
                session.fault(error)

    def stepped(self, begins: bool) -> None:
        """A step has begun, or is about to end."""
        for session in sessions_here():
            note_step(session, begins)


markers.listeners.append(RecorderListener())


def note_step(session: SessionBase, begins: bool) -> None:
    """Write the current step into a recording."""
    _mark(session, markers.current_step(), begins)
    try:
        if session.observer is not None:
            session.observer.step()
    except Exception as error:
        session.fault(error)


def _mark(session: SessionBase, name: str, begins: bool) -> None:
    session.steps.append(StepMark(name, session.next_id(), time.perf_counter_ns(), begins))


# -- optimizers ----------------------------------------------------------------------------------------------


def watch_optimizers(user: object) -> None:
    """Have the hooks of optimizers in place, until ``user`` wants them no more."""
    with _lock:
        if user not in _users:
            _users.append(user)
        optimizer_hooks._global_optimizer_pre_hooks[_KEY] = before_step
        optimizer_hooks._global_optimizer_post_hooks[_KEY] = after_step
        _swaps.install()
        _schedulers.install(before_schedule)


def leave_optimizers(user: object) -> None:
    """``user`` wants them no more."""
    with _lock:
        if user in _users:  # not in a forked worker
            _users.remove(user)
        if not _users:
            forget_optimizers()


def forget_optimizers() -> None:
    """Take the hooks out, whoever wants them."""
    _users.clear()
    optimizer_hooks._global_optimizer_pre_hooks.pop(_KEY, None)
    optimizer_hooks._global_optimizer_post_hooks.pop(_KEY, None)
    _swaps.remove()
    _schedulers.remove()


@contextmanager
def standing_by() -> Iterator[None]:
    """A stretch in which recordings may begin and stop inside a hook of an optimizer."""
    token = object()
    watch_optimizers(token)
    try:
        yield
    finally:
        leave_optimizers(token)


def code_of_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CodeType | None:
    """The code of the function ``optimizer.step`` was given to compute the loss, if it was given one."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    while isinstance(given, partial):
        given = given.func
    if callable(given) and not hasattr(given, "__code__"):  # an object of a class with ``__call__``
        given = type(given).__call__
    code = getattr(given, "__code__", None)
    return code if isinstance(code, CodeType) else None


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before an optimizer's step: its phase begins."""
    for session in sessions_here():
        try:
            with quiet():
                session.label_gradients()
                session.label_state(optimizer)
                session.training.stepping(
                    optimizer,
                    session.modules,
                    sys._getframe(1),
                    session.elapsed(),
                    closure=code_of_closure(args, kwargs) is not None,
                )
                session.training.link(optimizer)
            _mark(session, OPTIMIZER_STEP, begins=True)
            session.begin_optimizer_step(sys._getframe(1), code_of_closure(args, kwargs))
        except Exception as error:
            session.fault(error)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """After it: the state it has made by now gets its names."""
    for session in sessions_here():
        try:
            session.end_optimizer_step()
            _mark(session, OPTIMIZER_STEP, begins=False)
            with quiet():
                if code_of_closure(args, kwargs) is not None:  # which has computed the gradients
                    session.label_gradients()
                session.label_state(optimizer)
        except Exception as error:
            session.fault(error)


def before_schedule(scheduler: Any, frame: FrameType) -> None:
    """Before a scheduler sets the rates of its optimizer."""
    for session in sessions_here():
        try:
            session.training.scheduled(scheduler, frame)
        except Exception as error:
            session.fault(error)
