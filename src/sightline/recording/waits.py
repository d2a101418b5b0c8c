"""Where a process of a distributed job waits for the others: ``Work.wait``, seen while it is recorded.

``Work.wait`` runs no op, so that no engine sees it. While a process of a job records, it is a Python function
that notes the line, and how long it took; afterwards it is torch's own again. What is kept is bounded by the
number of source lines that wait, and by the threads that wait now.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch

from sightline.process_rank import this_rank

#: Where torch, this recorder and Python's own modules are.
_PACKAGES: Final = tuple(f"{Path(file).parent}/" for file in (torch.__file__, __file__, threading.__file__))
_lock: Final = threading.RLock()
_logs: Final[list[WaitLog]] = []
_original: Any = None
_is_library: Final[dict[CodeType, bool]] = {}

Place = tuple[str, int, str]


class WaitLog:
    """The waits of one recording."""

    def __init__(self) -> None:
        self._lines: dict[Place, list[int]] = {}  # how often, how long together, how long at most
        self._open: dict[int, tuple[Place, int]] = {}  # the threads that wait now, and since when

    def enter(self, place: Place, now: int) -> None:
        """This thread begins to wait."""
        self._open[threading.get_ident()] = place, now

    def leave(self, place: Place, now: int) -> None:
        """It has waited."""
        began = self._open.pop(threading.get_ident(), (place, now))[1]
        row = self._lines.setdefault(place, [0, 0, 0])
        row[:] = row[0] + 1, row[1] + now - began, max(row[2], now - began)

    def summary(self) -> dict[str, Any]:
        """Lines with count, total and longest wait in ns; lines that wait now, with how long so far."""
        now = time.perf_counter_ns()
        lines = [[*place, *row] for place, row in list(self._lines.items())]
        return {"lines": lines, "now": [[*place, now - since] for place, since in list(self._open.values())]}


def install(log: WaitLog) -> None:
    """Have a log note the waits of this process, if it is one of several."""
    global _original  # noqa: PLW0603 — torch's own function is one per process
    work = _work_class()
    if this_rank() is None or work is None:
        return
    with _lock:
        if log not in _logs:
            _logs.append(log)
        if _original is None:
            _original = work.__dict__["wait"]
            work.wait = wait


def remove(log: WaitLog) -> None:
    """Undo it; the last one leaves torch as it was. Safe to call again."""
    global _original  # noqa: PLW0603 — the same
    with _lock:
        if log in _logs:
            _logs.remove(log)
        work = _work_class()
        if _original is not None and not _logs and work is not None:
            if work.__dict__.get("wait") is wait:
                work.wait = _original
            _original = None


def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Work.wait``, noted."""
    original, logs = _original, tuple(_logs)
    if original is None:  # removed meanwhile
        return type(self).wait(self, *args, **kwargs)
    place = _place(sys._getframe(1))
    for log in logs:
        log.enter(place, time.perf_counter_ns())
    try:
        return original.__get__(self)(*args, **kwargs)
    finally:
        for log in logs:
            log.leave(place, time.perf_counter_ns())


def _work_class() -> Any:
    c10d = getattr(torch._C, "_distributed_c10d", None)
    work = getattr(c10d, "Work", None)
    return work if work is not None and "wait" in vars(work) else None


def _place(frame: FrameType | None) -> Place:
    """The innermost line that is not torch's own."""
    first = frame
    while frame is not None:
        code = frame.f_code
        library = _is_library.get(code)
        if library is None:
            own = "site-packages" in code.co_filename.removeprefix(_PACKAGES[2])  # below Python's modules
            library = code.co_filename.startswith(_PACKAGES[:2] if own else _PACKAGES)
            _is_library[code] = library = library or code.co_filename.endswith("/typing_extensions.py")
        if not library:
            break
        frame = frame.f_back
    found = frame or first
    assert found is not None
    return found.f_code.co_filename, found.f_lineno or 0, found.f_code.co_qualname
