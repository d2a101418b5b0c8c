"""Folders of recordings: whether one is taken, the next free name, removing a recording."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from sightline.errors import UsageError
from sightline.process_rank import folder_of_job, path_of_rank
from sightline.store import bundle_schema as schema
from sightline.store.journal import JOURNAL
from sightline.store.writer import exclusive_lock

STACKS: Final = "stacks.txt"  #: where the main thread of a process was, written on SIGUSR1


def holds_recording(folder: Path) -> bool:
    """Whether a folder has a recording in it, finished or not."""
    return any((folder / name).exists() for name in (JOURNAL, schema.DATABASE))


def numbered_paths(folder: Path, name: str) -> Iterator[Path]:
    """``name.sight``, ``name-2.sight`` and so on; in a distributed job the path of this process in each."""
    for number in range(1, 10_000):
        yield path_of_rank(folder / (f"{name}.sight" if number == 1 else f"{name}-{number}.sight"))


def free_path(folder: Path, name: str) -> Path:
    """The first of the numbered paths that does not exist."""
    for path in numbered_paths(folder, name):
        if not path.exists():
            return path
    raise UsageError(f"{folder / name}.sight and 9,998 more exist already; give another name.")


def refuse_recording(folder: Path, fix: str) -> None:
    """Refuse a folder with a recording in it: one is replaced only on request."""
    job = folder_of_job(folder)
    if job is not None:
        refuse_as_job(job)
    if (folder / JOURNAL).exists() and not (folder / schema.DATABASE).exists():
        raise UsageError(
            f"{folder} holds a recording that is running or was cut off: use another name, finish it with "
            "`sightline repair`, or remove it."
        )
    if holds_recording(folder):
        raise UsageError(f"{folder} already holds a recording: {fix}.")


def refuse_as_job(folder: Path) -> None:
    """Refuse the folder of one process as that of all ranks."""
    if holds_recording(folder):
        raise UsageError(
            f"{folder} already holds a recording of one process, and cannot be the folder of all ranks: "
            "use another name, or remove it."
        )


def make_job_folder(folder: Path) -> None:
    """Make the folder that the recordings of all ranks go into, if this is the path of a rank."""
    job = folder_of_job(folder)
    if job is not None:
        job.parent.mkdir(parents=True, exist_ok=True)
        job.mkdir(0o700, exist_ok=True)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that nothing was written to, and that of its job if it is empty now."""
    for each in (folder, folder_of_job(folder)):
        with suppress(OSError):  # not empty, or never made
            if each is not None:
                each.rmdir()


def clear_recording(folder: Path, fix: str) -> None:
    """Empty the folder of a finished recording; of several processes that try, one succeeds."""
    with exclusive_lock(folder):
        if (folder / JOURNAL).exists():
            raise UsageError(
                f"{folder} is still being recorded, or its process was killed; remove it, or {fix}."
            )
        if not (folder / schema.DATABASE).exists():
            raise UsageError(f"{folder} is no recording and is not replaced; {fix}.")
        shutil.rmtree(folder)
        folder.mkdir(0o700)


def remove_recording(folder: Path) -> None:
    """Remove the folder of a recording, finished or not; any other folder is left alone."""
    if holds_recording(folder):
        shutil.rmtree(folder, ignore_errors=True)
        job = folder_of_job(folder)
        with suppress(OSError):  # not empty: it has other ranks
            if job is not None:
                job.rmdir()
