"""Random training programs, each compared with its truth: ``python -m tests.truth --count 2000 --seed 1``.

Prints the seed of every program of which a view says something false, with the statement and the truth.
``--count 1 --seed 17 --show`` prints the program of one seed, and what its first screen says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.truth.audit import examine
from tests.truth.distributed import KINDS as KINDS_OF_JOBS
from tests.truth.distributed import job
from tests.truth.loops import LOOPS
from tests.truth.program import generate
from tests.truth.running import run


def main() -> int:
    """Generate, run, audit; the result is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.truth", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many programs")
    parser.add_argument("--seed", type=int, default=None, help="of the first one; others count up from it")
    parser.add_argument("--loop", choices=sorted(LOOPS), help="only loops of this kind")
    parser.add_argument("--jobs", type=int, default=0, help="how many distributed jobs of two processes")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this long")
    parser.add_argument("--show", action="store_true", help="print each program and its first screen")
    asked = parser.parse_args()
    seed = int(time.time()) if asked.seed is None else asked.seed
    began, statements, done, failed = time.monotonic(), 0, 0, 0
    kinds: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(seed, seed + asked.count):
            program = generate(number, asked.loop)
            if asked.show:
                print(program.source)
                with tempfile.TemporaryDirectory() as own:
                    print(run(program, Path(own)).trace)
            result = examine(program, Path(folder))
            found = result.findings
            statements, done, failed = statements + result.statements, done + 1, failed + bool(found)
            kinds.update({finding.kind for finding in found})
            if found:
                print(f"seed {number}: {program.name} {program.options}", flush=True)
            for finding in found:
                print(f"    {finding}")
            if asked.seconds is not None and time.monotonic() - began > asked.seconds:
                break
        failed += _jobs(asked.jobs, seed, Path(folder))
    print(f"truth: {done} programs with seeds {seed} … {seed + done - 1}, {statements:,} statements, "
          f"{time.monotonic() - began:.0f} s, {failed} programs with false statements")  # fmt: skip
    for kind, count in kinds.most_common():
        print(f"{count:6,}  {kind}")
    return 1 if failed else 0


def _jobs(count: int, seed: int, folder: Path) -> int:
    """Distributed jobs of both kinds; how many had false statements."""
    failed = 0
    for number in range(seed, seed + count):
        own = folder / f"job{number}"
        own.mkdir()
        kind = KINDS_OF_JOBS[number % len(KINDS_OF_JOBS)]
        found = job(number, kind, 2, own)
        failed += bool(found)
        for finding in found:
            print(f"job {number}, {kind}\n    {finding}", flush=True)
    if count:
        print(f"jobs: {count} with seeds {seed} … {seed + count - 1}, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
