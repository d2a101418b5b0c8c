"""What comparing two long recordings takes, in time and in memory, as they grow.

    python bench/diff/long_recordings.py [--most 1000000]

A training step of the toy transformer is recorded and repeated until there are so many ops, with statistics
that are made up. The second recording has other numbers in its last quarter and another op in every thousand.
``flat`` is the same without module calls, as code without modules has it. Each length runs in its own
process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent)]

LENGTHS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
#: The most that two recordings of 100,000 ops may take.
SECONDS, MEBIBYTES = 5.0, 1024


def recording(ops: int, flat: bool, second: bool) -> Any:
    """A long recording with statistics."""
    from models import toy, workload
    from scale import Repeated

    import sightline as sl
    from sightline.data import trace_data as d

    model, tokens = toy(layers=4)
    work = workload("toy", model, tokens, backward=True)
    with sl.trace(model) as trace:
        work.run()
    pattern = trace.data
    data = Repeated(pattern, max(1, ops // len(pattern.ops))).data()
    count = len(data.values)
    chance = np.random.default_rng(0)
    numbers = [chance.normal(size=count) for _ in range(5)]
    bits = chance.integers(1, 1 << 62, count).astype(np.uint64)
    if second:
        late = np.arange(count) > count * 3 // 4
        numbers = [np.where(late, each * 1.5, each) for each in numbers]
        bits = np.where(late, bits + np.uint64(1), bits)
    nothing = np.zeros(count, dtype=np.int64)
    low, high, mean, std, norm = numbers
    stats = d.StatColumns(
        np.arange(count, dtype=np.int32), -abs(low), abs(high), mean, abs(std), abs(norm) + 1, nothing,
        nothing, nothing, bits,
    )  # fmt: skip
    columns = data.ops
    if second:  # some ops have another name: they are missing, and others are there
        names = columns.name.copy()
        names[500::1000] = names[0]
        columns = replace(columns, name=names)
    if flat:
        columns = replace(columns, call=np.full(len(columns), -1, dtype=np.int32))
        calls = d.CallColumns(**{
            name: np.zeros(1 if name.endswith("_offsets") else 0, dtype=getattr(data.calls, name).dtype)
            for name in d.CallColumns.__dataclass_fields__
        })  # fmt: skip
        data = replace(data, calls=calls)
    return sl.Trace(replace(data, ops=columns, stats=stats))


def measured(ops: int, flat: bool) -> dict[str, float]:
    """Seconds of this process to the verdict, and the memory that was added."""
    import sightline as sl

    first, second = recording(ops, flat, False), recording(ops, flat, True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    diff = sl.diff(first, second)
    text = str(diff)
    spent = time.process_time() - start
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert "they part" in text
    return {"ops": len(first.ops), "seconds": spent, "added": added}


def main() -> int:
    """Print a line for each length; the exit status is 1 if 100,000 ops take too long or too much."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=LENGTHS[-1])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(int(options.one[0]), options.one[1] == "flat")))
        return 0
    failed = False
    for shape in ("modules", "flat"):
        for ops in LENGTHS:
            if ops > options.most:
                continue
            ran = subprocess.run(
                [sys.executable, __file__, "--one", str(ops), shape],
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(ran.stdout.splitlines()[-1])
            each = found["seconds"] / found["ops"] * 1e6
            print(f"{shape:<9}{int(found['ops']):>9,} ops  {found['seconds']:6.2f} s  {each:5.1f} µs an op"
                  f"  +{found['added']:5.0f} MiB", flush=True)  # fmt: skip
            if ops == 100_000:
                failed |= found["seconds"] > SECONDS or found["added"] > MEBIBYTES
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
