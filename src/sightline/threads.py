"""Threads beside the run, so that an interrupt of the run is neither lost nor replaced.

`threading.Event` and `Condition` are written in Python: an interrupt that arrives between the moment they
release their lock and the ``try`` that takes it again leaves them with "release unlocked lock". The run's
thread therefore waits on queues, which are written in C; only `threading.Thread.start` waits on an event.
"""

from __future__ import annotations

import threading


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; an interrupt meanwhile is raised as it is, and the thread runs all the same."""
    try:
        thread.start()
    except RuntimeError as error:
        interrupt = error.__context__
        if interrupt is None or thread.ident is None:  # it could not be started
            raise
        raise interrupt from None
