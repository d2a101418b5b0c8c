"""What a recording weighs, whether it stays cheap as it grows, and what an import costs.

    python bench/memory.py [--quick]

Four answers: bytes per op of a long recording at both levels, cost per op along the way, growth over
many traces in a row, and the time of ``import sightline`` above a bare interpreter.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from models import EmptyDispatch, toy, workload

import sightline as sl

#: The most a recorded op may weigh, and the most an import may take.
BYTES_PER_OP = 300
IMPORT_MS = 30.0


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def verdict(fine: bool) -> str:
    """A mark a reader can find."""
    return "✓" if fine else "✗"


def weight(ops: int) -> None:
    """Bytes per op of one long recording, buffers and built Trace."""
    work = workload("toy", *toy())
    rounds = ops // work.ops + 1
    with torch.no_grad():
        work.run()
        gc.collect()
        tracemalloc.start()
        rss = resident()
        recorder = sl.trace(work.model, ops="both")
        recorder.start()
        for _ in range(rounds):
            work.run()
        trace = recorder.stop()
    gc.collect()
    recorded, _ = tracemalloc.get_traced_memory()
    recorded_rss = resident() - rss
    rows = len(trace.ops)
    del recorder
    gc.collect()
    built, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    aten = rounds * work.ops
    print(f"weight: {rows:,} ops recorded at both levels, {aten:,} of them aten")
    for label, size in (("while recording", recorded), ("with the Trace built", built)):
        each = size / rows
        print(
            f"  {label:22} {size / 2**20:7.1f} MiB   {each:6.0f} bytes per op"
            f"   {size / aten:6.0f} per aten op   ≤ {BYTES_PER_OP} {verdict(each <= BYTES_PER_OP)}"
        )
    print(f"  {'resident':22} {recorded_rss / 2**20:7.1f} MiB   (with tracemalloc's own tables)")


def flatness(ops: int) -> None:
    """Time per aten op as the recording grows."""
    work = workload("toy", *toy())
    marks = [mark for mark in (1_000, 10_000, 50_000, 100_000, 200_000) if mark <= ops]
    windows: dict[int, float] = {}
    with torch.no_grad():
        recorder = sl.trace(work.model, ops="both")
        recorder.start()
        done, times = 0, []
        for mark in marks:
            while done < mark:
                start = time.perf_counter()
                work.run()
                times.append(time.perf_counter() - start)
                done += work.ops
            windows[mark] = statistics.median(times[-20:]) / work.ops * 1e6
        recorder.stop()
    first = windows[marks[min(1, len(marks) - 1)]]
    print("\ncost along the way, µs per aten op (the model's own time included)")
    for mark, each in windows.items():
        print(f"  at {mark:>7,} ops  {each:6.1f}   × {each / first:.2f}")


def growth(traces: int) -> None:
    """Memory left over by many traces in a row, each dropped; beside the same runs under an empty mode.

    An empty dispatch mode is the measure, since torch itself keeps a few bytes per op under one.
    """
    work = workload("toy", *toy(layers=4))

    def passed() -> None:
        with EmptyDispatch():
            work.run()

    def traced() -> None:
        with sl.trace(work.model) as trace:
            work.run()
        trace.data  # noqa: B018 — the first access builds it

    print(f"\n{traces} traces in a row, each dropped ({work.ops} aten ops)")
    plain = growth_each(passed, traces)
    each = growth_each(traced, traces)
    print(f"  {plain[0]:+.0f} bytes and {plain[1]:+.2f} objects per run under an empty dispatch mode")
    extra = verdict(each[0] - plain[0] <= 100)
    print(f"  {each[0]:+.0f} bytes and {each[1]:+.2f} objects per trace   ≤ 100 more {extra}")


def growth_each(run: Callable[[], object], times: int) -> tuple[float, float]:
    """Bytes and objects that each run leaves behind, once caches are warm."""
    sizes = array("q", [0]) * times  # made beforehand: what is noted must not grow itself
    objects = array("q", [0]) * times
    tracemalloc.start()
    for turn in range(times):
        run()
        gc.collect()
        sizes[turn] = tracemalloc.get_traced_memory()[0]
        objects[turn] = len(gc.get_objects())
    tracemalloc.stop()
    # The first runs fill caches that stay; what counts is whether the rest adds to them.
    warm = times // 2
    return (sizes[-1] - sizes[warm]) / (times - warm), (objects[-1] - objects[warm]) / (times - warm)


def importing(times: int) -> None:
    """Milliseconds of ``import sightline`` in a fresh interpreter."""
    script = (
        "import sys, time; start = time.perf_counter(); import sightline; "
        "took = time.perf_counter() - start; "
        "print(took * 1e3, *(n for n in ('torch', 'numpy', 'networkx', 'rich', 'click') if n in sys.modules))"
    )
    best, heavy = float("inf"), ""
    for _ in range(times):
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        took, _, heavy = run.stdout.strip().partition(" ")
        best = min(best, float(took))
    print(
        f"\nimport sightline: {best:.1f} ms, best of {times}   ≤ {IMPORT_MS:.0f} {verdict(best <= IMPORT_MS)}"
    )
    print(f"  imported along: {heavy or 'nothing heavy'}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a recording weighs.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the length")
    quick = parser.parse_args().quick
    ops = 20_000 if quick else 200_000
    torch.set_num_threads(1)
    weight(ops)
    flatness(ops)
    growth(20 if quick else 100)
    importing(5 if quick else 20)


if __name__ == "__main__":
    main()
