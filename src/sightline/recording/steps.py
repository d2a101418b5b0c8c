"""The recorder's ear for `sightline.spy` and `sightline.step`."""

from __future__ import annotations

import time
from threading import get_ident
from typing import TYPE_CHECKING, Any

from sightline import spying
from sightline.recording.observing import Spied
from sightline.recording.registry import active
from sightline.trace.assembly.raw import StepMark

if TYPE_CHECKING:
    from sightline.recording.session import Session


class RecorderEar:
    """Passes on what a program says to the recordings of its thread."""

    def spied(self, name: str, value: Any, module: Any) -> None:
        """A value was named."""
        lanes = active.get(get_ident())
        if not lanes:
            return
        spying.check_name("spy", name)
        for lane in lanes:
            session = lane.session
            try:
                if not lane.off:
                    session.name_spied(name, value)
                    if session.observer is not None:
                        session.observer.spied(session, lane, Spied(name, value, module))
            except Exception as error:
                session.fault(error)

    def stepped(self, begins: bool) -> None:
        """A step has begun, or is about to end."""
        for lane in active.get(get_ident()) or ():
            note_step(lane.session, begins)


def note_step(session: Session, begins: bool) -> None:
    """Write the current step into a recording."""
    mark = StepMark(spying.current_step(), next(session.op_ids), time.perf_counter_ns(), begins)
    session.steps.append(mark)
    try:
        if session.observer is not None:
            session.observer.step(session)
    except Exception as error:
        session.fault(error)


spying.ears.append(RecorderEar())
