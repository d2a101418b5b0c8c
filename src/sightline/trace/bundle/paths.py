"""Where a recording may go on disk: what is in a folder already, a name that is free, and what is removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from sightline.errors import UsageError
from sightline.ranks import path_of_rank
from sightline.trace.bundle import schema
from sightline.trace.bundle.journal import JOURNAL
from sightline.trace.bundle.writer import alone


def holds_recording(folder: Path) -> bool:
    """Whether a recording is there, finished or not."""
    return any((folder / name).exists() for name in (JOURNAL, schema.DATABASE))


def numbered(folder: Path, name: str) -> Iterator[Path]:
    """``name.sight``, ``name-2.sight`` and so on; in a distributed job those of this process."""
    for number in range(1, 10_000):
        yield path_of_rank(folder / (f"{name}.sight" if number == 1 else f"{name}-{number}.sight"))


def free_path(folder: Path, name: str) -> Path:
    """The first of these names that nothing has."""
    for place in numbered(folder, name):
        if not place.exists():
            return place
    raise UsageError(f"{folder / name}.sight and 9,998 more are there already; give another name.")


def refuse_recording(folder: Path, fix: str) -> None:
    """Refuse a folder with a recording in it: none takes the place of another unless that is asked for."""
    if holds_recording(folder):
        raise UsageError(f"{folder} already holds a recording: {fix}.")


def make_room(folder: Path, fix: str) -> None:
    """An empty folder where a finished recording was; of several processes that want it, one gets it."""
    with alone(folder):
        if (folder / JOURNAL).exists():
            raise UsageError(
                f"{folder} is still being recorded, or its process was killed; remove it, or {fix}."
            )
        if not (folder / schema.DATABASE).exists():
            raise UsageError(f"{folder} is no recording and is not replaced; {fix}.")
        shutil.rmtree(folder)
        folder.mkdir(0o700)


def remove_recording(folder: Path) -> None:
    """Remove a recording, finished or not; any other folder stays."""
    if holds_recording(folder):
        shutil.rmtree(folder, ignore_errors=True)
