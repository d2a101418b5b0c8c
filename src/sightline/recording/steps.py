"""The recorder's ear for `sightline.spy` and `sightline.step`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from sightline import spying
from sightline.recording.observing import Spied
from sightline.recording.registry import active
from sightline.trace.assembly.raw import StepMark

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


class RecorderEar:
    """Passes on what a program says to the recordings of its thread."""

    def spied(self, name: str, value: Any, module: Any) -> None:
        """A value was named."""
        lanes = active.get(get_ident(), ())
        native = native_sessions()
        if not lanes and not native:
            return
        spying.check_name("spy", name)
        for lane in lanes:
            session = lane.session
            try:
                if not lane.off:
                    session.name_spied(name, value)
                    if session.observer is not None:
                        modules = [call.module for call in lane.calls()]
                        session.observer.spied(Spied(name, value, module, modules, lane.phase))
            except Exception as error:
                session.fault(error)

        for session in native:
            try:
                session.name_spied(name, value)
                if session.observer is not None:
                    session.observer.spied(Spied(name, value, module, *session.where()))
            except Exception as error:
                session.fault(error)

    def stepped(self, begins: bool) -> None:
        """A step has begun, or is about to end."""
        for lane in active.get(get_ident()) or ():
            note_step(lane.session, begins)
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
            session.observer.step()
    except Exception as error:
        session.fault(error)


spying.ears.append(RecorderEar())
