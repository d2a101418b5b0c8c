"""The folder of a recording that is written while it runs: claimed for one process, or given up.

The process that creates the journal's file owns the folder. The file gets its final name with its first
frame, so that a journal is never empty; before and after that, no other recording can begin in the folder.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from sightline.errors import CaptureError, UsageError
from sightline.recording.atomic import run_atomically, store_atomically
from sightline.trace.bundle.journal import HEAD, JOURNAL
from sightline.trace.bundle.paths import (
    clear_recording,
    holds_recording,
    make_job_folder,
    refuse_recording,
)

_FIX: Final = "give path= another name, or overwrite=True to replace it"
BEGUN: Final = f".{JOURNAL}.part"  #: a journal without a frame


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
        begun = os.fspath(folder / BEGUN)
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
        lock(files[0])
        os.write(files[0], HEAD)
    except OSError as error:
        unclaim(folder, files)
        raise _unwritable(folder, error) from error
    except UsageError:
        unclaim(folder, files)
        raise
    return files[0]


def lock(file: int) -> None:
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
        for name in (BEGUN, JOURNAL):
            with suppress(FileNotFoundError):
                if os.path.samestat(own, os.stat(folder / name)):  # not the file of another process
                    shutil.rmtree(folder / "tensors", ignore_errors=True)
                    os.unlink(folder / name)
        folder.rmdir()
    with suppress(OSError):  # the program may have closed it
        run_atomically(partial(os.close, files[0]), files.clear)
    files.clear()
