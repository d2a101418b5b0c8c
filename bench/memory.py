"""What a recording weighs, whether it stays cheap as it grows, and what an import costs.

    python bench/memory.py [--quick] [--engine native|python|all]

Four answers: bytes per op of a long recording at both levels, cost per op along the way to a million, growth
over many traces in a row, and the time of ``import sightline`` above a bare interpreter.

Memory is what the process has resident, since C++ allocates where Python does not look; what was freed is
given back to the system before each reading. Each measurement has a process of its own: in an older one,
freed memory is used again and hides what is new. Targets are the native engine's; the plain one is printed
beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar

import torch
from engines import Engine, add_option, available
from models import EmptyDispatch, Workload, toy, workload

import sightline as sl

P = ParamSpec("P")
T = TypeVar("T")
Way = Literal["memory", "last", "path"]

#: The most an op may weigh while it is recorded, a late op may take of an early one, a trace may leave behind
#: (what the allocator's own pieces amount to), and an import may take.
BYTES_PER_OP: Final = 160
FLAT: Final = 1.1
LEFT_KIB: Final = 1.0
IMPORT_MS: Final = 30.0

MARKS: Final = (0, 10_000, 100_000, 1_000_000)
#: How a long recording is kept: all of it, its end, or on disk.
WAYS: Final[tuple[Way, ...]] = ("memory", "last", "path")


def resident() -> int:
    """Bytes of this process in memory, less what is free; 0 where the system does not tell."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def judged(value: float, target: float, engine: str = "native") -> str:
    """A target and a mark a reader can find; the plain engine has none."""
    return f"   ≤ {target:g} {'✓' if value <= target else '✗'}" if engine == "native" else ""


def alone(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()


def prepared(layers: int, engine: Engine) -> Workload:
    """The toy, once everything has been loaded and met that one recording needs."""
    torch.set_num_threads(1)
    work = workload("toy", *toy(layers))
    for _ in range(2):
        with sl.trace(work.model, engine=engine) as trace:
            work.run()
        assert len(trace.ops)
    return work


@dataclass(frozen=True)
class Weight:
    """Bytes above what the process had before, and the rows they are spread over."""

    rows: int
    recording: int
    built: int
    peak: int


def weigh(engine: Engine, ops: int) -> Weight:
    """One long recording: its memory before the stop, with the Trace built, and at the most."""
    work = prepared(24, engine)
    with torch.no_grad():
        work.run()
        before = resident()
        recorder = sl.trace(work.model, engine=engine)
        recorder.start()
        done = 0
        while done < ops:
            work.run()
            done += work.ops
        recording = resident() - before
        trace = recorder.stop()
    rows = len(trace.ops)
    del recorder
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return Weight(rows, recording, resident() - before, peak)


def weight(engine: Engine, ops: int) -> None:
    """Print bytes per op."""
    found = alone(weigh, engine, ops)
    print(f"weight ({engine}): {found.rows:,} ops recorded at both levels")
    lines = (("while recording", found.recording), ("with the Trace built", found.built))
    for label, size in (*lines, ("at the most, building it", found.peak)):
        each = size / found.rows
        mark = judged(each, BYTES_PER_OP, engine) if label == "while recording" else ""
        print(f"  {label:24} {size / 2**20:7.1f} MiB   {each:6.0f} bytes per op{mark}")


def run_times(engine: Engine, way: Way, ops: int) -> tuple[list[float], int]:
    """Processor time of every run in one long recording, and the ops of a run."""
    work = prepared(24, engine)
    times = array("d")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        options: dict[Way, dict[str, Any]] = {
            "memory": {},
            "last": {"last": 10_000},
            "path": {"path": f"{folder}/run.sight"},
        }
        with sl.trace(work.model, engine=engine) as once:
            work.run()
        each = len(once.ops)
        recorder = sl.trace(work.model, engine=engine, **options[way])
        recorder.start()
        while len(times) * each < ops:
            start = time.process_time()
            work.run()
            times.append(time.process_time() - start)
        recorder.stop()
    return list(times), each


def flatness(engine: Engine, way: Way, ops: int) -> None:
    """Print the time per op as the recording grows, the model's own included."""
    times, each = alone(run_times, engine, way, ops)
    cells, quickest = [], []
    for start, stop in pairwise(mark for mark in MARKS if mark <= ops):
        stretch = sorted(times[start // each : stop // each + 1])
        quickest.append(stretch[len(stretch) // 10] / each * 1e6)
        cells.append(f"{quickest[-1]:6.2f} (mean {statistics.fmean(stretch) / each * 1e6:6.2f})")
    ratio = quickest[-1] / quickest[0]
    print(f"  {engine}, {way:8} {'   '.join(cells)}   × {ratio:.2f}{judged(ratio, FLAT, engine)}")


def left_behind(kind: Literal["floor", "native", "python"], traces: int) -> tuple[float, float]:
    """KiB and objects that one more trace leaves behind, each of them dropped.

    As many come first, for caches to fill and free pieces to settle. Memory is read ten times on the way, and
    the median counts: the allocator takes a large piece now and then; what leaks is there every time.
    """
    work = prepared(4, "python" if kind == "floor" else kind)

    def run() -> None:
        if kind == "floor":
            with EmptyDispatch():
                work.run()
            return
        with sl.trace(work.model, engine=kind) as trace:
            work.run()
        trace.data  # noqa: B018 — the first access builds it

    for _ in range(traces):
        run()
    each = traces // 10
    memory, objects = array("q", [0]) * 11, array("q", [0]) * 11  # what is noted must not grow itself
    for turn in range(11):
        memory[turn], objects[turn] = resident(), len(gc.get_objects())
        for _ in range(each):
            run()
    grown = [statistics.median(b - a for a, b in pairwise(read)) / each for read in (memory, objects)]
    return grown[0] / 1024, grown[1]


def growth(engines: tuple[Engine, ...], traces: int) -> None:
    """Print what traces leave behind; an empty mode is the measure."""
    print(f"\n{traces} traces in a row, each dropped: what one more leaves behind")
    memory, objects = alone(left_behind, "floor", traces)
    print(f"  {'empty dispatch mode':20} {memory:+8.2f} KiB   {objects:+.2f} objects")
    for engine in engines:
        memory, objects = alone(left_behind, engine, traces)
        mark = judged(memory, LEFT_KIB)
        print(f"  {f'sl.trace ({engine})':20} {memory:+8.2f} KiB   {objects:+.2f} objects{mark}")


def importing(times: int) -> None:
    """Print the milliseconds of ``import sightline`` in a fresh interpreter."""
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
    print(f"\nimport sightline: {best:.1f} ms, best of {times}{judged(best, IMPORT_MS)}")
    print(f"  imported along: {heavy or 'nothing heavy'}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a recording weighs.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the length")
    add_option(parser)
    options = parser.parse_args()
    engines = available(options.engine)
    for engine in engines:
        weight(engine, 50_000 if options.quick else 200_000)
    # A busy machine only ever slows a run down, so that the quickest tell whether the cost grows.
    print("\nµs per op, the quickest tenth of runs, the model's own included: to 10,000, 100,000, 1,000,000")
    for engine in engines:
        for way in WAYS:
            # The plain engine would take minutes for a million.
            flatness(engine, way, 100_000 if options.quick or engine == "python" else 1_000_000)
    growth(engines, 50 if options.quick else 100)
    importing(5 if options.quick else 20)


if __name__ == "__main__":
    main()
