"""Variants of one run, measured side by side on a device: the clocks, the order and the table.

Variants are measured again and again in one process, in an order drawn anew each time, since the clock rate
of a GPU depends on what ran before; the median of each counts. Used by the programs in this folder, which are
started by their path: what they share with those above is found from here.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).resolve().parents[1]))
from engines import Engine, add_option, available
from models import EmptyDispatch, Transformer

__all__ = [
    "EmptyDispatch", "Engine", "Place", "Transformer", "Variant", "add_option", "available", "compare",
    "count_waits", "place", "seconds", "synchronize", "tokens_title", "verdict",
]  # fmt: skip

WAITS: Final = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMalloc",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A way to run something: a block around it, and what the clock covers.

    ``"run"`` — one run in the block, after ``warm`` others; ``"block"`` — with starting and stopping;
    ``"trace"`` — until the Trace can be read.
    """

    name: str
    make: Callable[[], AbstractContextManager[Any]] = nullcontext
    clock: Literal["run", "block", "trace"] = "run"
    warm: int = 0
    targets: Mapping[str, float] = field(default_factory=dict)  #: workload → the most it may take, × plain


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Place:
    """What the models run on, and in which dtype."""

    device: str
    dtype: torch.dtype
    name: str


def place(tiny: bool) -> Place:
    """The GPU; for small sizes also a CPU, which is slow in bf16, and noisy on more than a thread."""
    if torch.cuda.is_available() or not tiny:
        return Place("cuda", torch.bfloat16, torch.cuda.get_device_name())
    torch.set_num_threads(1)
    return Place("cpu", torch.float32, "CPU, one thread")


def tokens_title(shape: tuple[int, int]) -> str:
    """What a workload is called, by which its target is found too."""
    return f"{shape[0]} × {shape[1]} token{'s' if shape[1] > 1 else ''}"


def verdict(value: float, target: float) -> str:
    """A target and a mark a reader can find."""
    return f"≤ {target:g} {'✓' if value <= target else '✗'}"


def seconds(variant: Variant, run: Callable[[], object]) -> float:
    """One run, up to the device's end."""
    synchronize()
    start = time.perf_counter()
    with variant.make() as trace:
        if variant.clock == "run":
            for _ in range(variant.warm):
                run()
            synchronize()
            start = time.perf_counter()
        run()
        if variant.clock == "run":
            synchronize()
            return time.perf_counter() - start
    if variant.clock == "trace":
        len(trace.ops)  # the first access builds it
    synchronize()
    return time.perf_counter() - start


def compare(title: str, variants: Sequence[Variant], run: Callable[[], object], rounds: int) -> None:
    """Measure the variants and print each as a multiple of the first, the plain run."""
    drawn = random.Random(0)
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(2):
        for variant in variants:
            seconds(variant, run)
    for _ in range(rounds):
        for variant in drawn.sample(variants, len(variants)):
            times[variant.name].append(seconds(variant, run))
    plain = statistics.median(times[variants[0].name])
    print(f"\n{title}: plain {plain * 1e3:.2f} ms, medians of {rounds}")
    for variant in variants[1:]:
        ratio = statistics.median(times[variant.name]) / plain
        target = variant.targets.get(title)
        judged = "" if target is None else verdict(ratio, target)
        print(f"  {variant.name:40s} × {ratio:.3f}   {judged}".rstrip(), flush=True)


def count_waits(title: str, variants: Sequence[Variant], run: Callable[[], object]) -> None:
    """Print how often the host waits for the device in one run, as torch's profiler sees it."""
    if not torch.cuda.is_available():
        print("\nwaits for the device are not counted without one")
        return
    print(f"\nwaits for the device in {title}")
    for variant in variants:
        _waits(variant, run)
        print(f"  {variant.name:40s} {_waits(variant, run)}", flush=True)


def _waits(variant: Variant, run: Callable[[], object]) -> int:
    block = variant.make()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        block.__enter__()
        run()
    block.__exit__(None, None, None)  # a check has its last word here, and waits for it
    return sum(event.count for event in profiled.key_averages() if event.key in WAITS)
