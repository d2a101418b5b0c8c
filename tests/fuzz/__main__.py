"""``make fuzz``: damaged recordings, each read in many ways; interrupts, kills; screens of random jobs.

Prints the seed of everything that ends in anything but a result or one sentence; the same seed makes the same
file again: ``python -m tests.fuzz --bundles 1 --journals 0 --seed 1234``. Each has limits on memory and time.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path

from sightline.errors import SightlineError
from sightline.recording.engine_choice import resolve_engine
from tests.fuzz.endings import check_endings
from tests.fuzz.interrupting import PHASES, WAYS, at_places, at_random
from tests.fuzz.running import Failure, fuzz
from tests.ranks.job_exam import FAULTS, Job, errors
from tests.recording.streaming.killed import check_kills
from tests.recording.streaming.last_programs import PROGRAMS, wrong_cuts

_TOGETHER = 25  # interrupted recordings in one process


def main() -> int:
    """Fuzz; the result is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--bundles", type=int, default=1000, help="how many damaged bundles")
    parser.add_argument("--journals", type=int, default=1000, help="how many damaged journals")
    parser.add_argument("--interrupts", type=int, default=0, help="how many interrupts at random moments")
    parser.add_argument(
        "--places", type=int, default=0, metavar="N", help="interrupt every N-th place there is; 1 for all"
    )
    parser.add_argument("--kills", type=int, default=0, help="how many recording processes are killed")
    parser.add_argument(
        "--cuts", type=int, default=0, metavar="N", help="cut N of 120 recordings at every op with last="
    )
    parser.add_argument("--jobs", type=int, default=0, help="how many random jobs of some ranks are examined")
    parser.add_argument("--endings", type=int, default=0, help="how many recording processes end in odd ways")
    parser.add_argument("--seed", type=int, default=None, help="of the first one; others count up from it")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this long")
    parser.add_argument("--all", action="store_true", help="read each file in every way, not in some")
    asked = parser.parse_args()
    seed = int(time.time()) if asked.seed is None else asked.seed
    until = None if asked.seconds is None else time.monotonic() + asked.seconds
    failed: list[Failure] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in (("bundle", asked.bundles), ("journal", asked.journals)):
            began = time.monotonic()
            done, found = fuzz(kind, range(seed, seed + count), Path(folder), until, everything=asked.all)
            print(f"{kind}s: {done} with seeds {seed} … {seed + done - 1}, {time.monotonic() - began:.0f} s, "
                  f"{len(found)} failed")  # fmt: skip
            failed += found
        failed += _interrupts(asked.interrupts, seed, Path(folder))
        failed += _places(asked.places, seed, Path(folder))
        failed += _kills(asked.kills, seed, Path(folder) / "kills")
        failed += _endings(asked.endings, seed, Path(folder) / "endings")
        failed += _cuts(asked.cuts, seed, Path(folder) / "cuts")
        failed += _jobs(asked.jobs, seed, Path(folder))
    for failure in failed[:50]:
        print(failure)
    return 1 if failed else 0


def _ways() -> list[tuple[str, str]]:
    return list(
        itertools.product(("native", "python") if resolve_engine("auto") == "native" else ("python",), WAYS)
    )


def _interrupts(count: int, seed: int, folder: Path) -> list[Failure]:
    """Interrupts at random moments of recordings of all kinds, in processes of some each."""
    began, failed, ways = time.monotonic(), [], itertools.cycle(_ways())
    for first in range(seed, seed + count, _TOGETHER):
        engine, kept = next(ways)
        failed += at_random(engine, kept, range(first, min(first + _TOGETHER, seed + count)), folder)
    if count:
        print(f"interrupts: {count} with seeds {seed} … {seed + count - 1}, "
              f"{time.monotonic() - began:.0f} s, {len(failed)} failed")  # fmt: skip
    return failed


def _places(every: int, seed: int, folder: Path) -> list[Failure]:
    """Interrupts at the places where one can come."""
    failed: list[Failure] = []
    began, total = time.monotonic(), 0
    for (engine, kept), phase in itertools.product(_ways(), PHASES) if every else ():
        count, found = at_places(engine, kept, phase, folder, every, seed % every)
        total += count
        failed += found
    if every:
        print(f"places: {total}, {time.monotonic() - began:.0f} s, {len(failed)} failed")
    return failed


def _kills(count: int, seed: int, folder: Path) -> list[Failure]:
    """Kills of processes that record; the first that leaves anything but a valid recording ends it."""
    if not count:
        return []
    folder.mkdir()
    began = time.monotonic()
    try:
        check_kills(folder, count, seed)
    except (AssertionError, SightlineError) as error:
        return [Failure("kill", seed, "load", f"{type(error).__name__}: {error}")]
    print(f"kills: {count} with seed {seed}, {time.monotonic() - began:.0f} s, 0 failed")
    return []


def _endings(count: int, seed: int, folder: Path) -> list[Failure]:
    """Exits, crashes, kills and removed folders, each with its promise."""
    began = time.monotonic()
    failed = check_endings(count, seed, folder)
    if count:
        print(f"endings: {count} with seed {seed}, {time.monotonic() - began:.0f} s, {len(failed)} failed")
    return failed


def _cuts(count: int, seed: int, folder: Path) -> list[Failure]:
    """Cut recordings of programs at every op: another program, level and engine for each seed."""
    began, failed, done = time.monotonic(), [], 0
    engines = sorted({engine for engine, _ in _ways()})
    every = list(itertools.product(("both", "aten", "api"), PROGRAMS, engines))

    def cuts(ops: int) -> range:
        nonlocal done
        done += ops
        return range(1, ops + 1)

    for number in range(seed, seed + min(count, len(every))):
        level, program, engine = every[number % len(every)]
        where = folder / str(number)
        where.mkdir(parents=True)
        try:
            wrong = list(wrong_cuts(program, where, cuts, engine=engine, ops=level))
        except SightlineError as error:
            wrong = [f"{program}: {type(error).__name__}: {error}"]
        failed += [Failure("cut", number, f"{engine} {level}", what) for what in wrong]
        shutil.rmtree(where)
    if count:
        print(f"cuts: {done} of {min(count, len(every))} recordings, {time.monotonic() - began:.0f} s, "
              f"{len(failed)} failed")  # fmt: skip
    return failed


def _jobs(count: int, seed: int, folder: Path) -> list[Failure]:
    """Random jobs, healthy ones and some with a planted fault: what their screens say wrongly."""
    began, failed = time.monotonic(), []
    for number in range(seed, seed + count):
        fault = ("", *FAULTS)[number % (len(FAULTS) + 1)]
        with tempfile.TemporaryDirectory(dir=folder) as own:
            wrong = errors(Job.of(number, fault), Path(own))
        failed += [Failure("job", number, fault or "healthy", each) for each in wrong]
    if count:
        print(f"jobs: {count} with seeds {seed} … {seed + count - 1}, {time.monotonic() - began:.0f} s, "
              f"{len(failed)} failed")  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.exit(main())
