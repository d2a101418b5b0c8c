"""Positions of the processes of ``sightline run --nproc N``: each writes its own, the launcher reads them.

A rank samples its main thread once a second, from a thread of its own, into a file of a temporary folder. If
a rank waits for others for long, the launcher prints the positions of all ranks, once for each standstill. It
prints no verdict: a rank that computes for long looks like one that hangs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import click

from sightline.cli.command import printable_text
from sightline.data.file_owners import inside_torch, python_file, torch_file
from sightline.errors import SightlineError
from sightline.process_rank import this_rank
from sightline.ranks.folder import ranks_text
from sightline.store.journal import JOURNAL

_SECONDS: Final = 1.0  #: between two samples
_PATIENCE: Final = 10.0  #: seconds without an op of any rank while one waits; doubled by each message
_LONG: Final = 6.0  #: times that, if others go on, or no rank is known to wait
_SILENT: Final = 5.0  #: seconds after which a rank has stopped writing its position
_MOST_BYTES: Final = 64 << 20  #: of journals that are read to find the ranks that are waited for
_MOST_LINES: Final = 8
#: Files of torch whose functions are collectives and messages, or wait for other ranks in another way.
_COLLECTIVES: Final = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")


# -- in a rank ---------------------------------------------------------------------------------------------


@contextmanager
def position_written(folder: Path | None, recording: Path) -> Iterator[None]:
    """Write the position of the main thread while the block runs, if this is a rank and there is a folder."""
    process = this_rank()
    if folder is None or process is None:
        yield
        return
    file, ended = folder / f"{process.rank}.json", threading.Event()
    thread = threading.Thread(
        target=_write_positions, args=(file, recording, ended), name="sightline-position", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        with suppress(RuntimeError):  # in a forked child there is no such thread
            thread.join(_SECONDS)


def _write_positions(file: Path, recording: Path, ended: threading.Event) -> None:
    main, since = threading.main_thread().ident, time.time()
    before = "", ""
    with suppress(OSError):  # the folder goes when the launcher does
        while not ended.wait(_SECONDS):
            frame = sys._current_frames().get(main or 0)
            line, call = place = _position(frame)
            if place != before:
                before, since = place, time.time()
            _write(file, {"recording": str(recording), "line": line, "call": call, "since": since})
        _write(file, {"recording": str(recording)})


def _write(file: Path, position: dict[str, object]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps({**position, "now": time.time()}))
    os.replace(part, file)


def _position(frame: FrameType | None) -> tuple[str, str]:
    """The innermost line of a stack outside torch, and the collective called there."""
    from sightline.recording import distributed as wait_log

    line = call = ""
    while frame is not None and not line:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if inside_torch(file) in _COLLECTIVES or (file == wait_log.__file__ and name == "wait"):
            call = name
        elif not (torch_file(file) or python_file(file)):
            line = f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        frame = frame.f_back
    return line, call


# -- in the launcher ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Position:
    """The position of a rank, as it wrote it last."""

    rank: int
    recording: Path
    line: str
    call: str  #: the collective it is in
    quiet: float  #: seconds without an op
    idle: float  #: seconds without an op and at one place
    silent: float  #: seconds since it wrote this
    ended: bool

    def text(self, ranks: list[int]) -> str:
        """A sentence about these ranks, all at one position."""
        who, have, run = ranks_text(ranks), "has", "runs"
        if len(ranks) > 1:
            have, run = "have", "run"
        at = f"in {self.call} at {self.line}" if self.call else f"at {self.line}"
        if self.ended:
            return f"{who} {have} ended"
        if self.silent > _SILENT:
            return f"{who} {have} been seen {at} last, {self.silent:.0f} s ago"
        if self.idle < _PATIENCE / 2:
            if self.quiet >= _PATIENCE:
                return f"{who} {have} run no op for {self.quiet:.0f} s, now {at}"
            return f"{who} {run}, {at}"
        return f"{who} {have} been {at} for {self.idle:.0f} s"


class JobWatch:
    """Prints the positions of the ranks when one has waited for long; ``look`` is called every second."""

    def __init__(self, positions: Path, folder: Path, command: str) -> None:
        self._positions, self._folder, self._command = positions, folder, command
        self._patience = _PATIENCE
        self._printed: object = None
        self._read: tuple[object, list[str]] = None, []

    def look(self) -> None:
        """Print one message if ranks have come to a standstill that was not printed yet."""
        ranks = self._ranks()
        running = [each for each in ranks if not each.ended]
        if not running or not all((each.recording / JOURNAL).exists() for each in running):
            return  # without a journal a standstill cannot be seen
        waiting = [each for each in running if each.call and each.idle >= self._patience]
        # While one waits, others may read files or sleep: only their ops show that they go on.
        least = min(each.quiet if waiting else each.idle for each in running)
        place = [(each.rank, each.line, each.call) for each in waiting or running]
        if place == self._printed:
            return
        problems = self._problems(running, place) if least >= self._patience else []
        all_stand = least >= self._patience and bool(waiting or problems)
        longest = max((each.idle for each in waiting), default=least)
        if not all_stand and longest < _LONG * self._patience:
            return
        self._printed, self._patience = place, 2 * self._patience
        stands = f"no rank has run an op for {least:.0f} s" if least >= _PATIENCE else "ranks wait for others"
        by_place: dict[str, list[_Position]] = {}
        for each in ranks:
            by_place.setdefault(each.text([]), []).append(each)
        texts = [same[0].text([each.rank for each in same]) for same in by_place.values()]
        rest = [f"and {len(texts) - _MOST_LINES} more places"] * (len(texts) > _MOST_LINES)
        indented = [f"  {text}" for text in (*texts[:_MOST_LINES], *rest, *problems)]
        newline = "\n" * sys.stderr.isatty()  # behind a progress bar
        text = printable_text("\n".join([f"sightline: {stands}.", *indented, f"  More: {self._command}"]))
        click.echo(newline + text, err=True)

    def _ranks(self) -> list[_Position]:
        """The positions that the ranks have written, in the order of the ranks."""
        positions = []
        with suppress(OSError):
            for file in self._positions.glob("*.json"):
                with suppress(OSError, ValueError, KeyError, TypeError):
                    positions.append(_read(int(file.stem), json.loads(file.read_text())))
        return sorted(positions, key=lambda each: each.rank)

    def _problems(self, ranks: list[_Position], place: object) -> list[str]:
        """The collectives that ranks miss, from the journals, which are read once for each standstill."""
        from sightline.ranks.desync import desync_problems
        from sightline.ranks.folder import rank_folder
        from sightline.ranks.merge import merge
        from sightline.ranks.messages import message_problems

        if self._read[0] == place:
            return self._read[1]
        self._read = place, []
        with suppress(SightlineError, OSError):
            journals = [each.recording / JOURNAL for each in ranks if not each.ended]
            folder = None
            if sum(journal.stat().st_size for journal in journals) < _MOST_BYTES:
                folder = rank_folder(self._folder)
            if folder is not None:
                run = merge(folder)
                problems = [*desync_problems(run), *message_problems(run)][:2]
                self._read = (
                    place,
                    [f"{each.title}{each.place and f', at {each.place}'}" for each in problems],
                )
        return self._read[1]


def _read(rank: int, position: dict[str, object]) -> _Position:
    now = time.time()
    recording = Path(str(position["recording"]))
    ended = not position.get("line")  # then its program has, and its recording is finished
    since = last_op = float(str(position.get("since", now)))
    with suppress(OSError):
        last_op = (recording / JOURNAL).stat().st_mtime
    return _Position(
        rank, recording, str(position.get("line", "")), str(position.get("call", "")),
        max(now - last_op, 0.0), max(now - max(since, last_op), 0.0),
        max(now - float(str(position["now"])), 0.0), ended,
    )  # fmt: skip
