"""``make fuzz``: many damaged recordings, each read in every way, with limits on memory and time.

Prints the seed of everything that ends in anything but a result or one sentence; the same seed makes the same
file again: ``python -m tests.fuzz --bundles 1 --seed 1234``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.running import Failure, fuzz


def main() -> int:
    """Fuzz; the result is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--bundles", type=int, default=1000, help="how many damaged bundles")
    parser.add_argument("--journals", type=int, default=1000, help="how many damaged journals")
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
    for failure in failed[:50]:
        print(failure)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
