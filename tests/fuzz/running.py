"""Damaged recordings one after the other, each read with limits on memory and time, in forked processes."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.api import Trace, load
from sightline.errors import SightlineError
from sightline.store.journal import JOURNAL
from tests.fuzz.consumers import consumers
from tests.fuzz.mutations import alter_bundle, alter_journal
from tests.store.bundles import captured, measured, on_a_device, saved

MEMORY = 4 << 30  # bytes of address space: torch and the process itself have some of it
GROWTH = 1 << 30  # bytes that reading a file of a few KB may add to what is resident
SECONDS = 20  # of processor time that reading a file in one way may take
_TOGETHER = 50  # files in one process
_WAYS = 5  # ways in which a file is read, besides being opened


@dataclass(frozen=True)
class Failure:
    """What went wrong with which file."""

    kind: str
    seed: int
    way: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.seed}, {self.way}: {self.what}"


class TooSlow(BaseException):
    """A file took longer than it may."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TooSlow` in the block after so many seconds of processor time, or 15 times as many on the clock.

    Processor time, because a busy machine is no fault of a file; the clock, because a deadlock takes none.
    """

    def ring(*_: Any) -> None:
        raise TooSlow

    before = [(number, signal.signal(number, ring)) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(15 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in before:
            signal.signal(number, handler)


def originals(kind: str, folder: Path) -> list[Path]:
    """Whole recordings to damage."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "journal":
        return [recorded_journal(folder / "journal")]
    found = []
    for name, made in (("captured", captured), ("measured", measured), ("device", on_a_device)):
        (folder / name).mkdir(exist_ok=True)
        found.append(saved(made(), folder / name))
    return [*found, recorded_bundle(folder / "recorded")]


def recorded_bundle(folder: Path) -> Path:
    """A small training step, with statistics, captured tensors and steps."""
    import sightline as sl

    _train(sl.trace(stats=True, capture=True, path=folder, name="run"))
    return folder


def recorded_journal(folder: Path) -> Path:
    """The journal of the same, as a killed process leaves it, in several frames."""
    import sightline as sl
    from sightline.recording.streaming.journal_file import JournalFile

    kept: list[bytes] = []
    whole = JournalFile.append

    def noted(self: JournalFile, frame: bytes) -> None:
        kept.append(frame)
        whole(self, frame)

    JournalFile.append = noted  # type: ignore[method-assign]
    try:
        _train(sl.trace(stats=True, path=folder.with_name("whole"), name="run"), flush=True)
    finally:
        JournalFile.append = whole  # type: ignore[method-assign]
    from sightline.store.journal import HEAD

    folder.mkdir(exist_ok=True)
    (folder / JOURNAL).write_bytes(HEAD + b"".join(kept))
    return folder


def _train(tracing: Any, flush: bool = False) -> None:
    import torch

    import sightline as sl

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    t = tracing.start()
    for number in range(3):
        with sl.step(f"step{number}"):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        if flush:
            len(t.ops)
    tracing.stop()


def attempt(kind: str, seed: int, original: Path, folder: Path, everything: bool) -> list[Failure]:
    """Damage a copy of a recording and read it; what went wrong."""
    chance = random.Random(seed)
    path = folder / "case.sight"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original, path)
    (alter_bundle if kind == "bundle" else alter_journal)(path, chance)
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    failed: list[Failure] = []

    def read(way: str, do: Any) -> Any:
        try:
            with time_limit(SECONDS):
                return do()
        except SightlineError:
            return None
        except TooSlow:
            failed.append(Failure(kind, seed, way, f"took more than {SECONDS} s"))
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is what is looked for
            where = [
                f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]
            ]
            failed.append(
                Failure(kind, seed, way, f"{type(error).__name__}: {str(error)[:100]} ({' '.join(where)})")
            )
        return None

    trace = read("load", lambda: load(path))
    if isinstance(trace, Trace):
        ways = consumers(trace, path, out)
        for way in ways if everything else chance.sample(sorted(ways), _WAYS):
            read(way, ways[way])
    left = [name for name in os.listdir(out) if name.startswith(".") or (out / name).stat().st_size == 0]
    if left:
        failed.append(Failure(kind, seed, "files", f"left behind {left}"))
    return failed


def fuzz(
    kind: str, seeds: Sequence[int], folder: Path, until: float | None = None, *, everything: bool = False
) -> tuple[int, list[Failure]]:
    """Read damaged files of some seeds; returns how many were read, and what went wrong."""
    whole = originals(kind, folder / f"{kind}s")
    failed: list[Failure] = []
    done = 0
    for first in range(0, len(seeds), _TOGETHER):
        if until is not None and time.monotonic() > until:
            break
        part = seeds[first : first + _TOGETHER]
        failed += _in_child(kind, part, whole, folder, everything)
        done += len(part)
    return done, failed


def _in_child(
    kind: str, seeds: Sequence[int], whole: list[Path], folder: Path, everything: bool
) -> list[Failure]:
    """The same in a process of its own, which may die of it."""
    report = folder / "report.txt"
    report.write_text("")
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with report.open("a", buffering=1) as file:
                for seed in seeds:
                    file.write(f"begin\t{seed}\n")
                    for one in attempt(kind, seed, whole[seed % len(whole)], folder, everything):
                        file.write(
                            f"failed\t{one.seed}\t{one.way}\t{one.what.encode('ascii', 'replace').decode()}\n"
                        )
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                    if (peak - before) * 1024 > GROWTH:
                        file.write(f"failed\t{seed}\tmemory\ttook {(peak - before) // 1024} MB\n")
                        before = peak
            ended = 0
        finally:
            os._exit(ended)
    _, status = os.waitpid(child, 0)
    lines = [line.split("\t") for line in report.read_text().split("\n") if line]
    failed = [Failure(kind, int(parts[1]), parts[2], parts[3]) for parts in lines if parts[0] == "failed"]
    if status:
        seed = next((int(parts[1]) for parts in reversed(lines) if parts[0] == "begin"), -1)
        failed.append(Failure(kind, seed, "process", f"ended with status {status}"))
    return failed
