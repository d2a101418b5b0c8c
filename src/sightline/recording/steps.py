"""The recorder's ear for `sightline.spy` and `sightline.step`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from sightline import spying
from sightline.recording.observing import Spied
from sightline.recording.thread_state import active
from sightline.trace.assembly.raw import StepMark

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


class RecorderEar:
    """Passes on what a program says to the recordings of its thread."""

    def spied(self, name: str, value: Any, module: Any) -> None:
        """A value was named."""
        states = active.get(get_ident(), ())
        native = native_sessions()
        if not states and not native:
            return
        spying.check_name("spy", name)
        for state in states:
            plain = state.session
            try:
                if not state.off:
                    plain.name_spied(name, value)
                    if plain.observer is not None:
                        plain.observer.spied(plain, state, Spied(name, value, module))
            except Exception as error:
                plain.fault(error)
        for session in native:
            try:
                session.name_spied(name, value)
            except Exception as error:
                session.note_fault(error)

    def stepped(self, begins: bool) -> None:
        """A step has begun, or is about to end."""
        for state in active.get(get_ident()) or ():
            note_step(state.session, begins)
        for session in native_sessions():
            note_step(session, begins)


def native_sessions() -> Sequence[SessionBase]:
    """The recordings of this thread that the native engine makes."""
    native = sys.modules.get("sightline.recording.native.installation")
    return () if native is None else tuple(native.sessions.get(get_ident(), ()))


def note_step(session: SessionBase, begins: bool) -> None:
    """Write the current step into a recording."""
    mark = StepMark(spying.current_step(), session.next_id(), time.perf_counter_ns(), begins)
    session.steps.append(mark)
    try:
        if session.observer is not None:
            session.observer.step(session)
    except Exception as error:
        session.fault(error)


spying.ears.append(RecorderEar())
