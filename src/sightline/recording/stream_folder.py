"""Who has a folder: the first step of a recording that is written while it runs, safe against others.

Whoever makes the file of the journal has the folder. The file gets its name with its first frame, so that a
journal always holds something; until then, and after it, nobody else can begin there.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from sightline.errors import CaptureError, UsageError
from sightline.recording.atomic import at_once, stored
from sightline.trace.bundle.journal import HEAD, JOURNAL
from sightline.trace.bundle.paths import clear_recording, holds_recording, refuse_recording

_FIX: Final = "give path= another name, or overwrite=True to replace it"
BEGUN: Final = f".{JOURNAL}.part"  #: a journal without a frame


def claim(folder: Path, overwrite: bool = False, files: list[int] | None = None) -> int:
    """Make the folder of a recording and the file of its journal, whose number is put into ``files``.

    A recording that is there is refused, or removed if a finished one is to be overwritten.
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
        folder.mkdir(0o700, parents=True, exist_ok=True)
        begun = os.fspath(folder / BEGUN)
        stored(files.append, partial(os.open, begun, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise UsageError(
            f"{folder} is where another recording begins: give path= another name, or remove the folder "
            "if its process was killed."
        ) from None
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        refuse_recording(folder, _FIX)  # one that has begun since we looked
        hold(files[0])
        os.write(files[0], HEAD)
    except OSError as error:
        unclaim(folder, files)
        raise _unwritable(folder, error) from error
    except UsageError:
        unclaim(folder, files)
        raise
    return files[0]


def hold(file: int) -> None:
    """Have a journal locked as long as this process lives, so that nobody repairs it meanwhile."""
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
                if os.path.samestat(own, os.stat(folder / name)):  # not that of somebody who was faster
                    shutil.rmtree(folder / "tensors", ignore_errors=True)
                    os.unlink(folder / name)
        folder.rmdir()
    with suppress(OSError):  # a program may have closed it
        at_once(partial(os.close, files[0]), files.clear)
    files.clear()
