"""The journal of a recording that is written while it runs: its folder is claimed, its file appended to.

The process that creates the journal's file owns the folder. The file gets its final name with its first
frame, so that a journal is never empty; before and after that, no other recording can begin in the folder.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from sightline.errors import CaptureError, UsageError
from sightline.recording.atomic import run_atomically, store_atomically
from sightline.store.journal import HEAD, JOURNAL, Journal
from sightline.store.paths import (
    clear_recording,
    holds_recording,
    make_job_folder,
    refuse_recording,
)

_FIX: Final = "give path= another name, or path=sl.Bundle(…, overwrite=True) to replace it"
_BEGUN: Final = f".{JOURNAL}.part"  #: a journal without a frame
_REWRITTEN: Final = f".{JOURNAL}.anew"  #: a journal that is about to replace a longer one


def claim(folder: Path, overwrite: bool = False, files: list[int] | None = None) -> int:
    """Make the folder of a recording and the file of its journal, whose descriptor is put into ``files``.

    A folder with a recording is refused; with ``overwrite`` a finished one is removed.
    """
    files = [] if files is None else files
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"path={str(folder)!r} is a file; a recording is written to a folder, such as run.sight."
        )
    if overwrite and holds_recording(folder):
        clear_recording(folder, "give path= another name")
    refuse_recording(folder, _FIX)
    others = [name for name in (os.listdir(folder) if folder.is_dir() else ()) if not name.startswith(".")]
    if others:
        raise UsageError(
            f"{folder} is a folder with other things in it, such as {min(others)!r}; "
            f"give path= a new one, such as {folder / 'run.sight'}."
        )
    try:
        make_job_folder(folder)
        folder.mkdir(0o700, parents=True, exist_ok=True)
        begun = os.fspath(folder / _BEGUN)
        store_atomically(files.append, partial(os.open, begun, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise UsageError(
            f"{folder} is where another recording begins: give path= another name, or remove the folder "
            "if its process was killed."
        ) from None
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        refuse_recording(folder, _FIX)  # one that has begun meanwhile
        _lock(files[0])
        os.write(files[0], HEAD)
    except OSError as error:
        unclaim(folder, files)
        raise _unwritable(folder, error) from error
    except UsageError:
        unclaim(folder, files)
        raise
    return files[0]


def _lock(file: int) -> None:
    """Lock a journal as long as this process lives, so that no other process repairs it meanwhile."""
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unwritable(folder: Path, error: OSError) -> CaptureError:
    return CaptureError(
        f"No recording can be written to {folder}: {error.strerror or error}; give path= another folder."
    )


def unclaim(folder: Path, files: list[int]) -> None:
    """Leave the folder as if it had never been claimed; safe to call again."""
    if not files:
        return
    with suppress(OSError):
        own = os.fstat(files[0])
        for name in (_BEGUN, JOURNAL):
            with suppress(FileNotFoundError):
                if os.path.samestat(own, os.stat(folder / name)):  # not the file of another process
                    shutil.rmtree(folder / "tensors", ignore_errors=True)
                    os.unlink(folder / name)
        folder.rmdir()
    with suppress(OSError):  # the program may have closed it
        run_atomically(partial(os.close, files[0]), files.clear)
    files.clear()


class JournalFile:
    """The file of a journal: frames are appended, or it is replaced by a shorter one.

    If the disk fails, frames wait in memory, ``error`` says why, and the next `append` tries again.
    """

    def __init__(self, folder: Path, file: int) -> None:
        self.folder = folder
        self.error: str | None = None  #: the first failure
        self._file = file
        self._identity = _identity(file)
        self._pending: list[bytes] = []  # frames the disk did not take
        self._size = len(HEAD)

    @property
    def exists(self) -> bool:
        """Whether the program has not removed it."""
        return (self.folder / JOURNAL).exists()

    @property
    def is_complete(self) -> bool:
        """Whether every frame is on disk."""
        return not self._pending

    def publish(self) -> None:
        """Give it its name, once its first frame is in it."""
        if self.error is not None:
            raise CaptureError(self.error)
        os.replace(self.folder / _BEGUN, self.folder / JOURNAL)

    def append(self, frame: bytes) -> None:
        """Write a frame, after those that wait."""
        self._pending.append(frame)
        try:
            while self._pending:
                self._reopen_if_closed()
                _write_all(self._file, self._pending[0], self._size)
                self._size += len(self._pending.pop(0))
        except OSError as error:
            self._note_failure(error)

    def replace(self, frames: list[bytes]) -> bool:
        """Replace the file by one of these frames; False if the disk failed."""
        part, file = self.folder / _REWRITTEN, -1
        try:
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            data = b"".join([HEAD, *frames])
            _write_all(file, data, 0)
            _lock(file)
            os.replace(part, self.folder / JOURNAL)
        except OSError as error:
            if file >= 0:
                os.close(file)
            self._note_failure(error)
            return False
        self.close()
        self._file, self._identity, self._size = file, _identity(file), len(data)
        self._pending.clear()
        return True

    def read(self) -> Journal:
        """All frames, those that wait included; the caller closes it."""
        with suppress(OSError):
            self._reopen_if_closed()
        return Journal(self.folder / JOURNAL, self._pending, self._file)

    def close(self) -> None:
        """Close the file. Safe to call again."""
        if self._file >= 0 and _identity(self._file) == self._identity:
            with suppress(OSError):
                os.close(self._file)
        self._file = -1

    def _note_failure(self, error: OSError) -> None:
        """Note the first failure, and cut off the written part of the frame."""
        with suppress(OSError):
            self._reopen_if_closed()
            os.ftruncate(self._file, self._size)
        if self.error is None:
            self.error = (
                f"{self.folder} could not be written: {error.strerror or error}; "
                "what was recorded since is in memory only."
            )

    def _reopen_if_closed(self) -> None:
        """Open our file again if the program has closed its descriptor, as some close all of them."""
        if _identity(self._file) == self._identity:
            return
        self._file = -1
        file = os.open(self.folder / JOURNAL, os.O_RDWR)
        if _identity(file) != self._identity:
            os.close(file)
            raise OSError(errno.EBADF, "its file was closed by the program")
        self._file = file
        _lock(file)


def _identity(file: int) -> tuple[int, int] | None:
    """The identity of the file behind a descriptor; None for one that is closed."""
    try:
        status = os.fstat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _write_all(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done
