"""Recordings that are interrupted: at every place of start and stop, inside the recorder's work, at random.

After each the process must be as it was, the recording must not contradict itself, saying ``stop()`` again
must finish it, and the next recording must be whole.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sightline as sl
from sightline.errors import SightlineError, UsageError
from tests import leftovers
from tests.fuzz.running import Failure
from tests.interrupts import Place, interrupted, places

PHASES = ("start", "stop", "leave", "run")
WAYS = {
    "memory": {}, "path": {"capture": True, "stats": True}, "last": {"last": 500},
}  # fmt: skip
ROOT = Path(__file__).parents[2]
SECONDS = 120  # that some interrupted recordings may take together


class Trials:
    """A small training step, recorded in one way and interrupted."""

    def __init__(self, engine: str, kept: str, folder: Path) -> None:
        self._engine, self._kept, self._place = engine, kept, folder / "run.sight"
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        self._x = torch.ones(2, 3)
        self._expected = len(self._whole().ops)
        self._before = leftovers.state()

    def tracer(self) -> sl.trace:
        """A recording that is about to begin, in a folder that is empty."""
        shutil.rmtree(self._place, ignore_errors=True)
        path = {"path": self._place} if self._kept == "path" else {}
        return sl.trace(self._model, engine=self._engine, **WAYS[self._kept], **path)  # type: ignore[arg-type]

    def work(self) -> None:
        """Forward and backward."""
        self._model(self._x).sum().backward()

    def _whole(self) -> Any:
        with self.tracer() as t:
            self.work()
        t.validate()
        return t

    def places(self, phase: str) -> list[Place]:
        """Where a phase can be interrupted."""
        tracer = self.tracer()
        if phase == "start":
            found = places(tracer.start)
            tracer.stop()
            return found
        tracer.__enter__() if phase == "leave" else tracer.start()
        if phase == "run":
            self.work()
            found = places(self.work)
            tracer.stop()
            return found
        self.work()
        return places(tracer.stop if phase == "stop" else partial(tracer.__exit__, None, None, None))

    def wrong(self, phase: str, place: Place) -> list[str]:
        """What is wrong after an interrupt at a place; nothing, if all is well."""
        try:
            return [*getattr(self, phase)(place), *self.left()]
        except SightlineError as error:
            return [f"{type(error).__name__}: {error}"]

    def left(self) -> list[str]:
        """What is left in the process."""
        found = leftovers.leftovers(self._before, leftovers.state())
        for one in threading.enumerate():
            if one.name.startswith("sightline") and one.is_alive():
                one.join(10)  # what was stopped a moment ago is about to end
                found += [f"the thread {one.name} is left"] if one.is_alive() else []
        return found

    def start(self, place: Place) -> Iterator[str]:
        """Interrupted while it starts: it has not, or `stop` ends it; the folder can be used again."""
        tracer = self.tracer()
        if interrupted(tracer.start, place) and "not recording" in repr(tracer):
            yield from self.left()
            if self._place.exists():
                yield f"{sorted(os.listdir(self._place))} are left in the folder"
        with suppress(UsageError):  # it was never started
            tracer.stop()

    def stop(self, place: Place) -> Iterator[str]:
        """Interrupted while it stops: nothing records any more, and stopping again finishes it."""
        tracer = self.tracer()
        tracer.start()
        self.work()
        interrupted(tracer.stop, place)
        yield from self._is_whole(tracer.stop())

    def leave(self, place: Place) -> Iterator[str]:
        """The same for a block, which nobody can leave again."""
        yield from self._is_whole(self._left_at(place))

    def _left_at(self, place: Place) -> Any:
        """The recording of a block; what held its tracer is gone when this returns."""
        tracer = self.tracer()
        t = tracer.__enter__()
        self.work()
        interrupted(partial(tracer.__exit__, None, None, None), place)
        return t

    def _is_whole(self, t: Any) -> Iterator[str]:
        t.validate()
        if t.info["faults"]:
            yield f"a fault: {t.info['faults'][0]}"
        if len(t.ops) != self._expected:
            yield f"{len(t.ops)} ops, not {self._expected}"
        if self._kept == "path":
            loaded = sl.load(self._place)
            loaded.validate()
            if len(loaded.ops) != self._expected or loaded.info.get("unfinished"):
                yield f"{len(loaded.ops)} ops in an unfinished file"

    def run(self, place: Place) -> Iterator[str]:
        """Interrupted in the recorder while the model runs: what runs later is recorded whole."""
        tracer = self.tracer()
        t = tracer.start()
        interrupted(self.work, place)
        before = len(t.ops)
        self.work()
        t = tracer.stop()
        t.validate()
        if len(t.ops) != before + self._expected:
            yield f"{len(t.ops) - before} later ops, not {self._expected}"

    def at_random(self, seed: int) -> list[str]:
        """Interrupted by a signal, at some moment from start to stop."""
        chance, tracer = random.Random(seed), self.tracer()
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.choice([0.003, 0.02, 0.08]) * chance.random() + 1e-6)
            tracer.start()
            for _ in range(3):
                self.work()
            tracer.stop()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        torch.set_grad_enabled(True)  # which torch's own code may lose
        try:
            tracer.stop().validate()
        except UsageError:
            pass  # it was never started
        except SightlineError as error:
            return [str(error)]
        found = self.left()
        if seed % 10 == 0 and len(self._whole().ops) != self._expected:
            found.append("the next recording is not whole")
        return found


def at_places(
    engine: str, kept: str, phase: str, folder: Path, every: int = 1, first: int = 0
) -> tuple[int, list[Failure]]:
    """Interrupt a phase at every place, or at every so-many-th; how many there were, and what went wrong."""
    trials = Trials(engine, kept, folder)
    chosen = trials.places(phase)[first::every]
    kind = f"{phase} {engine} {kept}"
    failed = [
        Failure(kind, number, str(place), what)
        for number, place in enumerate(chosen)
        for what in _wrong(trials, phase, place)
    ]
    return len(chosen), failed


def _wrong(trials: Trials, phase: str, place: Place) -> list[str]:
    try:
        return trials.wrong(phase, place)
    except Exception as error:  # noqa: BLE001 — of the recorder, in the program that it records
        return [f"{type(error).__name__}: {error}"]


def at_random(engine: str, kept: str, seeds: range, folder: Path) -> list[Failure]:
    """Interrupt recordings at random moments, in a new process, which is killed if it hangs."""
    report = folder / "interrupts.txt"
    report.write_text("")
    given = engine, kept, str(seeds.start), str(seeds.stop), str(folder)
    command = [sys.executable, "-m", "tests.fuzz.interrupting", *given]
    try:
        done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, check=False, cwd=ROOT)
        ended = done.stderr[-500:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        ended = f"it took more than {SECONDS} s"
    lines = [line.split("\t") for line in report.read_text().split("\n") if line]
    failed = [Failure("interrupt", int(line[1]), f"{engine} {kept}", line[2]) for line in lines if line[2:]]
    if ended:
        seed = next((int(line[1]) for line in reversed(lines)), -1)
        failed.append(Failure("interrupt", seed, f"{engine} {kept}", ended))
    return failed


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(engine: str, kept: str, begin: str, end: str, folder: str) -> None:
    """What the new process does."""
    trials = Trials(engine, kept, Path(folder))
    signal.signal(signal.SIGALRM, _interrupt)
    with (Path(folder) / "interrupts.txt").open("a", buffering=1) as file:
        for seed in range(int(begin), int(end)):
            file.write(f"begin\t{seed}\n")
            for what in trials.at_random(seed):
                file.write(f"failed\t{seed}\t{what[:300]!r}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
