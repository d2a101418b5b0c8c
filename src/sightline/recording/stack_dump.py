"""SIGUSR1: a process of a distributed job writes where its main thread is, into its recording's folder.

A handler in Python would wait until the main thread comes back from C, which one that hangs in a collective
never does; `faulthandler` writes from the signal itself. A program with a handler of its own keeps it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from sightline.process_rank import this_rank
from sightline.trace.bundle.paths import STACKS

_lock: Final = threading.Lock()
_dump: StackDump | None = None  # one per process: there is one signal


class StackDump:
    """The file that the signal writes to."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STACKS
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 — it is open until `close`
        self._pid = os.getpid()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Close the file, and remove it if nothing was written."""
        with suppress(OSError):
            self._file.close()
            if self._pid == os.getpid() and not self._path.stat().st_size:
                self._path.unlink()


def install(folder: Path | None) -> StackDump | None:
    """Have SIGUSR1 write to a recording's folder, if this process is one of several and has no handler."""
    global _dump  # noqa: PLW0603 — there is one signal
    number = getattr(signal, "SIGUSR1", None)
    if folder is None or number is None or this_rank() is None:
        return None
    with _lock:
        if _dump is not None or signal.getsignal(number) is not signal.SIG_DFL:
            return None
        try:
            dump = StackDump(folder)
            # Not of all threads: one that runs meanwhile changes its frames under the reader, and it crashes.
            faulthandler.register(number, file=dump.fileno(), all_threads=False)
        except (OSError, RuntimeError, ValueError):  # the run goes on without it
            return None
        _dump = dump
        return dump


def remove(dump: StackDump | None) -> None:
    """Undo it. Safe to call again."""
    global _dump  # noqa: PLW0603 — the same
    with _lock:
        if dump is None or _dump is not dump:
            return
        faulthandler.unregister(signal.SIGUSR1)
        dump.close()
        _dump = None
