"""``repair``: make a bundle of the journal of a killed process, and remove its temporary files."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

from sightline.errors import UsageError
from sightline.store import bundle_schema as schema
from sightline.store.journal import JOURNAL
from sightline.store.reader import load
from sightline.store.shards.shard_file import UNFINISHED
from sightline.store.writer import WholeColumns, save_columns

#: Prefixes of temporary files.
_TEMPORARY: Final = (".spool-", ".saving-", f".{JOURNAL}.", f".{schema.DATABASE}.")


def repair(path: str | os.PathLike[str]) -> list[str]:
    """Finish the journal of a recording and remove temporary files; returns a sentence for each.

    A recording that is still being written is refused. Complete files are never touched.

    >>> repair("missing.sight")
    Traceback (most recent call last):
    sightline.errors.UsageError: There is no recording missing.sight.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"There is no recording {folder}.")
    journal, database = folder / JOURNAL, folder / schema.DATABASE
    done: list[str] = []
    if is_being_recorded(folder):
        raise UsageError(f"{folder} is still being recorded: stop the run first.")
    if database.exists():
        load(folder).close()  # raises if it cannot be opened: then the journal stays
        if journal.exists():
            journal.unlink()
            done.append(f"{JOURNAL} was of no more use, and is removed.")
    elif journal.exists():
        data = load(folder)  # its sound part
        done.append(f"Finished {save_columns(data, WholeColumns(data), folder, sweep=(JOURNAL,))}.")
    left = [item for item in folder.iterdir() if item.name.startswith(_TEMPORARY)]
    tensors = folder / schema.TENSORS
    if tensors.is_dir() and not tensors.is_symlink():
        hidden = [item for item in tensors.iterdir() if item.name.startswith(".")]
        left += [one for one in hidden if one.name.startswith(_TEMPORARY) or one.name.endswith(UNFINISHED)]
    for item in left:
        with contextlib.suppress(OSError):
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    if left:
        done.append(f"Removed {len(left)} unfinished file{'s' if len(left) > 1 else ''}.")
    return done


def is_being_recorded(folder: Path) -> bool:
    """Whether a process records into a folder: it holds a lock on its journal, where the system has locks."""
    try:
        import fcntl

        number = os.open(folder / JOURNAL, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(number)
    return False
