"""The count of events that threads are handling."""

from __future__ import annotations

import pytest

from sightline.recording.event_gate import EventGate
from tests.interrupts import interrupted, places


def nested(gate: EventGate) -> None:
    """An event inside an event, as an observer's is inside that of a module."""
    gate.enter()
    try:
        gate.enter()
        try:
            pass
        finally:
            gate.leave()
    finally:
        gate.leave()


def test_an_interrupt_between_two_events_raises_nothing_else() -> None:
    found = [place for place in places(lambda: nested(EventGate())) if place.code is EventGate.leave.__code__]
    assert found
    for place in found:
        assert interrupted(lambda: nested(EventGate()), place)


def test_a_thread_that_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = EventGate()
    nested(gate)
    monkeypatch.setattr("sightline.recording.event_gate.get_ident", lambda: -1)  # as another thread
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    gate.close()
    assert gate.enter()
