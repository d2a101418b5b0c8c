"""An interrupt while a thread is started is that interrupt, and the thread runs."""

from __future__ import annotations

import threading

import pytest

from sightline.threads import start_thread


class InterruptedInItsEvent(threading.Thread):
    """A thread whose ``start`` is interrupted at the only place where `threading.Event` cannot stand it."""

    def start(self) -> None:
        super().start()
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")


class Refused(threading.Thread):
    """A thread that the system has no room for."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_an_interrupt_is_raised_as_it_is_and_the_thread_runs() -> None:
    ran = threading.Event()
    with pytest.raises(KeyboardInterrupt) as caught:
        start_thread(InterruptedInItsEvent(target=ran.set))
    assert ran.wait(10)
    assert caught.value.__cause__ is None


def test_a_thread_that_cannot_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(Refused())
