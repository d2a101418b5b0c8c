"""`EventGate`: a recording that another thread stops is finished after the events that are being handled."""

from __future__ import annotations

import time
from threading import get_ident

_PATIENCE = 2.0  #: seconds to wait for the events of other threads; one may wait for the thread that stops
_POLL = 0.0005


class EventGate:
    """Counts the events that each thread is handling. Every method may be called from any thread.

    A thread notes that it is inside before it checks that the gate is open, and the gate is closed before
    it checks which threads are inside: no event is missed.

    >>> gate = EventGate()
    >>> gate.enter(), gate.leave(), gate.close(), gate.enter()
    (True, None, None, True)
    """

    def __init__(self) -> None:
        self._closer: int | None = None  # the thread that stops the recording
        self._inside: dict[int, int] = {}  # thread -> events, one inside the other; each writes its own

    def enter(self) -> bool:
        """An event begins; False, and nothing to leave, if another thread has stopped the recording."""
        thread = get_ident()
        count = self._inside.get(thread, 0)
        self._inside[thread] = count + 1
        if self._closer is not None and self._closer != thread:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        """An event has ended."""
        thread = get_ident()
        count = self._inside.get(thread, 0) - 1  # none if an interrupt came in between
        if count > 0:
            self._inside[thread] = count
        else:
            self._inside.pop(thread, None)

    def close(self) -> None:
        """Let no more events of other threads in, and wait for those they are in. Safe to call again.

        This thread may still deliver events: the end of the last call becomes known when all is read.
        """
        self._closer = get_ident()
        deadline = time.monotonic() + _PATIENCE
        while set(self._inside) - {get_ident()} and time.monotonic() < deadline:
            time.sleep(_POLL)
