"""The folder of a distributed job: the recording of each rank, opened on first use."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from sightline.argument_checks import argument_text
from sightline.data.validate import Report, validate
from sightline.errors import DamagedFile, InvalidTrace, SightlineError, UsageError
from sightline.store import load, save
from sightline.store.paths import (
    STACKS,
    holds_recording,
    make_job_folder,
    refuse_as_job,
    remove_recording,
)

T = TypeVar("T")

#: ``rank3.sight``, ``run.rank3.sight``, ``rank3.restart1.sight``.
_NAME: Final = re.compile(
    r"(?:(?P<stem>.*)\.)?rank(?P<rank>0|[1-9][0-9]{0,6})(?:\.restart(?P<restart>[0-9]{1,7}))?\.sight"
)
#: The same with any number, ``rank01.sight``: such a recording is known by its content.
_ANY_NUMBER: Final = re.compile(r"(?:.*\.)?rank[0-9]+(?:\.restart[0-9]+)?\.sight")


@dataclass(frozen=True)
class RankFolder:
    """The recordings of the ranks of one run."""

    path: Path  #: that was opened
    #: of each rank, ascending; its last attempt where it was restarted. Something that has the name of a rank
    #: and is no recording is among them, and an error when it is opened.
    paths: dict[int, Path]
    notes: list[str] = field(default_factory=list)  #: a sentence on each recording that is left out
    unread: list[str] = field(default_factory=list)  #: names of those that may belong to the run

    @property
    def lowest(self) -> int:
        """The rank that stands for all where one is shown."""
        return next(iter(self.paths))


def rank_folder(path: Path) -> RankFolder | None:
    """The recordings in a folder that is not one itself; None if there are none."""
    if not path.is_dir() or holds_recording(path):
        return None
    children = sorted(path.iterdir())
    recordings = {child for child in children if child.is_dir() and holds_recording(child)}
    if not recordings:
        return None
    return _assigned(path, [one for one in children if one in recordings or _ANY_NUMBER.fullmatch(one.name)])


def siblings(path: Path) -> RankFolder | None:
    """The recordings beside that of one rank: in the folder of its job, or ``x.rank*.sight``; else None."""
    match = _NAME.fullmatch(path.name)
    if match is None or not path.parent.is_dir():
        return None
    named = [(child, _NAME.fullmatch(child.name)) for child in sorted(path.parent.iterdir())]
    same = [child for child, other in named if other is not None and other["stem"] == match["stem"]]
    return _assigned(path, same) if any(map(holds_recording, same)) else None


def _assigned(path: Path, children: list[Path]) -> RankFolder:
    """Each recording under its rank, by its name or else by its content."""
    attempts: dict[int, tuple[int, Path]] = {}  # the last restart of each rank
    result = RankFolder(path, {})
    is_restarted = False
    for child in sorted(children, key=lambda one: _NAME.fullmatch(one.name) is None):  # names come first
        match = _NAME.fullmatch(child.name)
        rank, restart = (
            (int(match["rank"]), int(match["restart"] or 0)) if match else _rank_inside(child, result)
        )
        if rank < 0:
            continue
        other = attempts.get(rank)
        if other is not None and other[0] == restart:
            result.notes.append(
                f"{other[1].name} and {child.name} are both of rank {rank}: the first is taken."
            )
            result.unread.append(child.name)
        elif other is None or other[0] < restart:
            attempts[rank] = restart, child
        is_restarted |= other is not None and other[0] != restart
    if is_restarted:
        result.notes.append("The job was restarted: the recordings of earlier attempts are left out.")
    result.paths.update((rank, attempts[rank][1]) for rank in sorted(attempts))
    return result


def _rank_inside(child: Path, result: RankFolder) -> tuple[int, int]:
    """Rank and restart from the content of a recording; -1 and a note where it has none."""
    try:
        info = load(child).info
    except SightlineError as error:
        result.notes.append(f"{child.name} is left out: {error}")
        result.unread.append(child.name)
        return -1, 0
    if not isinstance(info.get("rank"), int):
        result.notes.append(f"{child.name} is left out: it is not of a distributed job.")
        return -1, 0
    return int(info["rank"]), int(info.get("restart") or 0)


def save_ranks(
    folder: RankFolder, path: Path, *, source: bool, environment: bool, overwrite: bool
) -> str:  # fmt: skip
    """Write all ranks of a run into a folder, one after the other; returns a line about its content.

    One that cannot be read is left out, and the line says so. With ``overwrite`` other recordings of ranks in
    that folder are removed: they would be of another run.
    """
    path = path.with_name(f"{path.name.removesuffix('.sight')}.sight")
    there = rank_folder(path)
    targets = {rank: path / f"rank{rank}.sight" for rank in folder.paths}
    if there is not None and not overwrite:
        fix = "save under another name, or give overwrite=True to replace it"
        raise UsageError(f"{path} already holds a recording: {fix}.")
    refuse_as_job(path)
    make_job_folder(targets[folder.lowest])
    lines: dict[int, str] = {}
    for rank, target in targets.items():
        data = None
        with suppress(SightlineError):
            data = load(folder.paths[rank])
        if data is None:
            continue
        with suppress(DamagedFile):
            lines[rank] = save(data, target, source=source, environment=environment).partition(": ")[2]
            data.close()
            if (stacks := folder.paths[rank] / STACKS).is_file() and folder.paths[rank] != target:
                shutil.copyfile(stacks, target / STACKS)
    for stale in set(there.paths.values() if there is not None else ()) - set(targets.values()):
        remove_recording(stale)
    if not lines:
        raise UsageError(f"None of {ranks_text(targets)} can be read: nothing was saved.")
    lost = [rank for rank in targets if rank not in lines]
    rest = (
        f"; {ranks_text(lost)} cannot be read and {'is' if len(lost) == 1 else 'are'} not in it"
        if lost
        else ""
    )
    return f"{path}: {ranks_text(lines)}{rest}; rank {min(lines)}: {lines[min(lines)]}"


def validate_ranks(folder: RankFolder) -> Report:
    """Validate every rank; the error of the first that is not sound begins with its number.

    A recording that may be of the run and was not read is an error too.
    """
    reports = []
    for rank, path in folder.paths.items():
        try:
            data = load(path)
            reports.append(validate(data))
        except SightlineError as error:
            raise type(error)(f"Rank {rank}: {error}") from error
        data.close()
    if folder.unread:
        raise InvalidTrace(f"{unread_text(folder)}.")
    return Report(*(sum(column) for column in zip(*map(astuple, reports), strict=True)))


def unread_text(folder: RankFolder) -> str:
    """Names the recordings in a folder that may belong to the run and were not read."""
    verbs = ("is", "was") if len(folder.unread) == 1 else ("are", "were")
    return f"{', '.join(folder.unread)} {verbs[0]} beside the ranks, and {verbs[1]} not read"


class Ranks(Mapping[int, T], Generic[T]):
    """The recordings of a run by rank, each opened on first use.

    >>> ranks = Ranks({0: Path("rank0.sight"), 1: Path("rank1.sight")}, str)
    >>> list(ranks), ranks[1]
    ([0, 1], 'rank1.sight')
    """

    def __init__(self, paths: Mapping[int, Path], opener: Callable[[Path], T]) -> None:
        self._paths, self._opener = dict(paths), opener
        self._open: dict[int, T] = {}

    def __getitem__(self, rank: int) -> T:
        if rank not in self._paths:
            known = ranks_text(self._paths)
            raise UsageError(f"There is no recording of rank {argument_text(rank)}; there is one of {known}.")
        if rank not in self._open:
            self._open[rank] = self._opener(self._paths[rank])
        return self._open[rank]

    def get(self, rank: object, default: object = None) -> T | Any:
        """The recording of a rank, or a default."""
        return self[rank] if isinstance(rank, int) and rank in self else default

    def __contains__(self, rank: object) -> bool:
        return rank in self._paths

    def __iter__(self) -> Iterator[int]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        return f"<Ranks: {ranks_text(self._paths)}>"


def ranks_text(ranks: Mapping[int, object] | list[int] | set[int]) -> str:
    """Ranks in words, neighbours together.

    >>> ranks_text([0, 1, 2, 5]), ranks_text([3]), ranks_text([0, 1])
    ('ranks 0–2 and 5', 'rank 3', 'ranks 0 and 1')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else list(map(str, run))
    if len(parts) > 8:
        parts = [*parts[:6], f"{sum(map(len, runs)) - sum(map(len, runs[:6]))} more"]
    text = " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)
    return f"rank{'s' if len(ranks) != 1 else ''} {text or 'none'}"
