"""What a trace costs while the model runs, beside the floor and the alternatives: one table.

    python bench/overhead.py [--quick] [--seconds S] [--only toy] [--engine native|python|all]

All variants of a workload are measured in turn, again and again, in one process on one thread; the
best time of each counts. *Added* is the time above the plain run, per aten op. The *floor* is what a
dispatch mode that does nothing adds: nobody can see every op from Python for less. Entering is not
counted. Stopping and building the Trace have a column of their own, per run: a block has a few runs, so each
bears its share of what building costs once.

Targets are the native engine's; the plain one is printed beside it.

Tools that patch torch for the rest of the process are measured last, when all else is done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Final, Literal

import torch
from engines import Engine, add_option, available
from models import FRAMES_ABOVE, EmptyDispatch, Workload, workloads
from torch.overrides import TorchFunctionMode

import sightline as sl
from sightline.compat.torch_code_tracing import TracingMode

Level = Literal["none", "api", "aten", "both"]

FLOOR: Final = "empty dispatch mode (the floor)"
PLAIN: Final = "plain"
#: Upper bounds as multiples of the floor: what the native engine adds while the block runs,
TARGETS: Final = {
    ("toy", "none"): 0.20,
    ("toy", "api"): 0.40,
    ("toy", "aten"): 0.40,
    ("toy", "both"): 0.50,
    ("toy, forward + backward", "both"): 0.50,
    ("tiny Llama", "both"): 0.60,
}
#: and, in the same workloads, what stopping and building the Trace add to that.
BUILD_TARGET: Final = 0.30

ADAPTER: Final = "compat TracingMode, quiet"
#: (workload, an alternative, one of ours or a level) → it must add at least so many times what ours adds.
#: A level stands for the native engine, and where there is none for the plain one, which has no bar.
RIVALS: Final = {
    ("toy", "torch DebugMode", "aten"): None,
    ("toy", "torch DebugMode, stacks", "aten"): 50,
    ("toy", "torch-code-tracing, quiet", ADAPTER): None,
    ("toy", "TorchLens record", "aten"): None,
    ("toy", "TorchLens trace", "aten"): None,
    ("tiny Llama", "torch-code-tracing, quiet", ADAPTER): 50,
    (f"tiny Llama, {FRAMES_ABOVE} frames above", "torch-code-tracing, quiet", ADAPTER): 50,
}


class EmptyFunction(TorchFunctionMode):
    """Sees every API call and does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function."""
        return func(*args, **(kwargs or {}))


#: How often a workload runs in one block.
RUNS_IN_A_BLOCK: Final = 3


@dataclass(frozen=True)
class Sample:
    """Seconds of the best run in a block, of its first, and of what came after it, per run."""

    seconds: float
    first: float
    building: float = 0.0


@dataclass
class Variant:
    """A way to run a workload, and the best it did."""

    name: str
    measure: Callable[[Workload], Sample]
    level: Level | None = None  #: of a trace
    engine: Engine | None = None
    theirs: bool = False  #: another tool: its failure is a line of the table, not the end of it
    failure: str = ""
    spent: float = 0.0
    runs: int = 0
    seconds: float = field(default=float("inf"))
    first: float = field(default=float("inf"))
    building: float = field(default=float("inf"))

    @property
    def least(self) -> int:
        """The fewest runs that count: more for what is compared closely."""
        return 3 if self.theirs else 12

    def once(self, workload: Workload) -> None:
        """Measure one more time."""
        try:
            sample = self.measure(workload)
        except Exception as error:
            if not self.theirs:
                raise
            self.failure = f"failed: {type(error).__name__}"
            return
        self.spent += sample.seconds * RUNS_IN_A_BLOCK
        self.runs += 1
        self.seconds = min(self.seconds, sample.seconds)
        self.first = min(self.first, sample.first)
        self.building = min(self.building, sample.building)


def timed(run: Callable[[], Any]) -> Sample:
    """Seconds of a few runs in one block; each result lives until its clock has stopped.

    The first run in a block also meets every op, line and shape for the first time; what a longer block
    costs per run is what the others take. Both are told.
    """
    times = []
    for _ in range(RUNS_IN_A_BLOCK):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
        del result
    return Sample(min(times), times[0])


def plain(workload: Workload) -> Sample:
    """Nothing installed."""
    return timed(workload.run)


def inside(make: Callable[[], Any]) -> Callable[[Workload], Sample]:
    """Run inside a context manager that is entered before the clock starts."""

    def measure(workload: Workload) -> Sample:
        with make():
            return timed(workload.run)

    return measure


def traced(level: Level, engine: Engine) -> Variant:
    """Run inside a trace, then stop and build it."""

    def measure(workload: Workload) -> Sample:
        recorder = sl.trace(workload.model, ops=level, engine=engine)
        recorder.start()
        try:
            sample = timed(workload.run)
        finally:
            start = time.perf_counter()
            trace = recorder.stop()
        trace.data  # noqa: B018 — the first access builds it
        building = (time.perf_counter() - start) / RUNS_IN_A_BLOCK
        trace.validate()
        assert not trace.info["faults"], trace.info["faults"]
        return replace(sample, building=building)

    return Variant(f"sl.trace {level} ({engine})", measure, level, engine)


def variants(workload: Workload, engines: tuple[Engine, ...]) -> list[Variant]:
    """What can share a process: nothing of it outlives its block."""
    found = [
        Variant(PLAIN, plain),
        Variant(FLOOR, inside(EmptyDispatch)),
        Variant("empty function mode", inside(EmptyFunction)),
    ]
    levels: tuple[Level, ...] = ("none", "api", "aten", "both")
    if workload.backward:
        levels = ("aten", "both")
    found += [traced(level, engine) for engine in engines for level in levels]
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:
        pass  # a private name of torch: the table does without it
    else:
        found.append(Variant("torch DebugMode", inside(DebugMode), theirs=True))
        found.append(
            Variant(
                "torch DebugMode, stacks", inside(lambda: DebugMode(record_stack_trace=True)), theirs=True
            )
        )
    found.append(Variant(ADAPTER, inside(lambda: TracingMode(quiet=True))))
    if find_spec("torch_code_tracing"):
        from torch_code_tracing import TracingMode as Original

        found.append(Variant("torch-code-tracing, quiet", inside(lambda: Original(quiet=True)), theirs=True))
    return found


def patching_variants(workload: Workload) -> list[Variant]:
    """What leaves torch patched behind."""
    if workload.backward or not find_spec("torchlens"):
        return []
    import torchlens

    def call(function: Any, **options: Any) -> Callable[[Workload], Sample]:
        return lambda work: timed(lambda: function(work.model, *work.inputs, **options))

    return [
        Variant("TorchLens record", call(torchlens.record, default_op=True), theirs=True),
        Variant("TorchLens trace", call(torchlens.trace), theirs=True),
    ]


def interleave(workload: Workload, contenders: list[Variant], seconds: float) -> None:
    """Measure all in turn until each has had its time, and a few runs however slow it is."""
    waiting = list(contenders)
    while waiting:
        for variant in waiting:
            variant.once(workload)
        waiting = [
            one
            for one in waiting
            if not one.failure and (one.runs < one.least or (one.spent < seconds and one.runs < 2000))
        ]


def judged(ratio: float, sign: str, target: float | None) -> str:
    """A target and a mark a reader can find, or nothing."""
    if target is None:
        return ""
    return f"{sign} {target:g} {'✓' if (ratio <= target if sign == '≤' else ratio >= target) else '✗'}"


HEADER: Final = (
    "", "ms", "added µs/op", "× floor", "target", "first run ×", "build × floor", "target", "blocks",
)  # fmt: skip


def rows(workload: Workload, measured: list[Variant]) -> list[tuple[str, ...]]:
    """The lines of the table for one workload."""
    times = {variant.name: variant.seconds for variant in measured}
    plain = times[PLAIN]
    floor = times[FLOOR] - plain
    lines: list[tuple[str, ...]] = []
    for variant in measured:
        if variant.failure:
            lines.append((variant.name, variant.failure, *[""] * (len(HEADER) - 2)))
            continue
        added = variant.seconds - plain
        cells = [f"{added / workload.ops * 1e6:.1f}", f"{added / floor:.2f}"]
        if variant.name == PLAIN:
            cells = [""] * 2
        target = None
        if variant.engine == "native" and variant.level is not None:
            target = TARGETS.get((workload.name, variant.level))
        first = f"{(variant.first - plain) / floor:.2f}" if variant.name != PLAIN else ""
        built, built_judged = "", ""
        if variant.level is not None:
            building = variant.building / floor
            built = f"{building:.2f}"
            built_judged = judged(building, "≤", None if target is None else BUILD_TARGET)
        cells += [judged(added / floor, "≤", target), first, built, built_judged, str(variant.runs)]
        lines.append((variant.name, f"{variant.seconds * 1e3:.2f}", *cells))
    return lines


def table(results: list[tuple[Workload, list[Variant]]]) -> str:
    """One table, a section per workload."""
    sections = [(f"{work.name}: {work.ops} aten ops", rows(work, measured)) for work, measured in results]
    every = [HEADER, *(line for _, lines in sections for line in lines)]
    widths = [max(len(line[column]) for line in every) for column in range(len(HEADER))]
    widths[0] += 2  # the lines of a section are indented

    def layout(line: tuple[str, ...]) -> str:
        cells = (cell.rjust(size) for cell, size in zip(line[1:], widths[1:], strict=True))
        return "  ".join([line[0].ljust(widths[0]), *cells])

    total = sum(widths) + 2 * (len(widths) - 1)
    out = [layout(HEADER), "─" * total]
    for title, lines in sections:
        out += [title, *(layout((f"  {line[0]}", *line[1:])) for line in lines), ""]
    return "\n".join(out + comparisons(results))


def comparisons(results: list[tuple[Workload, list[Variant]]]) -> list[str]:
    """What the alternatives add, as a multiple of what ours adds."""
    added = {
        (work.name, variant.name): variant.seconds - measured[0].seconds
        for work, measured in results
        for variant in measured
        if not variant.failure
    }
    lines = []
    for (work, theirs, ours), wanted in RIVALS.items():
        names = (ours, f"sl.trace {ours} (native)", f"sl.trace {ours} (python)")
        name = next((name for name in names if (work, name) in added), None)
        if name is None or (work, theirs) not in added:
            continue
        ratio = added[work, theirs] / added[work, name]
        mark = judged(ratio, "≥", None if name.endswith("(python)") else wanted)
        lines.append(f"{work}: {theirs} adds {ratio:.1f} times what {name} adds   {mark}".rstrip())
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a trace costs, beside the floor and the alternatives.")
    parser.add_argument("--quick", action="store_true", help="a rough answer in about two minutes")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each variant of each workload")
    parser.add_argument("--only", default="", help="only workloads whose name contains this")
    add_option(parser)
    options = parser.parse_args()
    seconds = 0.5 if options.quick else options.seconds
    torch.set_num_threads(1)

    engines = available(options.engine)
    chosen = [work for work in workloads() if options.only in work.name]
    results = [(work, variants(work, engines)) for work in chosen]
    for work, measured in results:
        interleave(work, measured, seconds)
    for work, measured in results:
        last = patching_variants(work)
        interleave(work, last, seconds)
        measured += last
    print(f"torch {torch.__version__}, one thread; sightline {sl.__version__}\n")
    print(table(results))


if __name__ == "__main__":
    main()
