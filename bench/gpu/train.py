"""What recording a training step costs on a GPU: GPT-2 of 350 million parameters in bf16; a compiled step.

    PYTHONPATH=src python bench/gpu/train.py [--rounds N] [--engine native|python|all]
                                             [--numbers] [--device-time] [--compiled] [--tiny]

A step is a forward pass, a backward pass and AdamW, on 8 × 1024 tokens, where the device is the bottleneck,
and on 1 × 128, where the host is. While the block runs the clock covers the step alone: the first of a block,
in which every line and shape is new, or a later one. With the Trace built it runs from before the start until
the Trace has been read. Memory is the peak that torch's allocator saw in a step.

``--numbers`` measures what is switched on beside the recording instead: the check, statistics;
``--device-time`` the time of the device, with steps after it, and sets it beside torch's profiler.

``--compiled`` measures a small transformer under ``torch.compile`` instead: steps before any trace, twenty
steps in a trace, steps after it, and what Dynamo counts meanwhile, which must be nothing. ``--tiny`` runs
small sizes on whatever there is, to try the program.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch._dynamo
import torch.nn.functional as F
from side_by_side import (
    EmptyDispatch,
    Engine,
    Place,
    Transformer,
    Variant,
    add_option,
    available,
    compare,
    count_waits,
    place,
    synchronize,
    tokens_title,
    verdict,
)
from torch.profiler import ProfilerActivity, profile

import sightline as sl

LONG, SHORT = (8, 1024), (1, 128)
#: The most a step may take under the native engine, × plain: while the block runs, and with the Trace built.
RUNNING: Final = {tokens_title(LONG): 1.04, tokens_title(SHORT): 1.6}
BUILT: Final = {tokens_title(LONG): 1.20}
#: The same with what is switched on beside the recording, of a later step of a block.
NUMBERS: Final[dict[str, tuple[dict[str, Any], float]]] = {
    'check="nonfinite"': ({"check": sl.Check(on="report")}, 1.15),
    "stats without fingerprints": ({"stats": sl.Stats(fingerprint=False)}, 1.25),
    "stats and check": ({"stats": True, "check": sl.Check(on="report")}, 1.40),
}
#: And with the time of the device.
DEVICE_TIME: Final = 1.15
#: The same of a compiled step in a trace, and of one after it.
COMPILED, AFTERWARDS = 1.10, 1.02
STEPS_IN_A_TRACE: Final = 20

Step = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    vocabulary: int = 50_257
    long: tuple[int, int] = LONG
    short: tuple[int, int] = SHORT
    compiled_width: int = 1024
    compiled_tokens: tuple[int, int] = (16, 512)


TINY: Final = Sizes(2, 64, 4, 512, (2, 32), (1, 8), 64, (4, 32))


# -- eager steps ---------------------------------------------------------------------------------------------


def gpt2(sizes: Sizes, where: Place) -> Any:
    """The shape of GPT-2 350M with random weights, ready to be trained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes.vocabulary, n_embd=sizes.width, n_layer=sizes.layers, n_head=sizes.heads,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(where.device):
        return GPT2LMHeadModel(config).to(where.dtype).train()


def training_step(model: Any, shape: tuple[int, int], vocabulary: int, device: str) -> Step:
    """Forward, backward and optimizer on one batch."""
    tokens = torch.randint(0, vocabulary, shape, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


def variants(model: Any, engines: tuple[Engine, ...]) -> list[Variant]:
    """How a step is run."""
    found = [Variant("plain"), Variant("empty dispatch mode", EmptyDispatch)]
    for engine in engines:
        running, built = (RUNNING, BUILT) if engine == "native" else ({}, {})

        def make(engine: Engine = engine) -> AbstractContextManager[Any]:
            return sl.trace(model, engine=engine)

        found += [
            Variant(f"traced ({engine}), first step", make, targets=running),
            Variant(f"traced ({engine}), later step", make, warm=1, targets=running),
            Variant(f"traced ({engine}), Trace built", make, "trace", targets=built),
        ]
    return found


def number_variants(model: Any) -> list[Variant]:
    """How a step is run with what costs more than a recording."""
    found = [Variant("plain")]
    for name, (options, most) in NUMBERS.items():

        def make(options: dict[str, Any] = options) -> AbstractContextManager[Any]:
            return sl.trace(model, **options)

        found.append(Variant(name, make, warm=1, targets={tokens_title(LONG): most}))
    return found


def steps_with_numbers(sizes: Sizes, where: Place, rounds: int) -> None:
    """Print what the check and statistics cost in an eager training step."""
    model = gpt2(sizes, where)
    found = number_variants(model)
    compare(
        tokens_title(sizes.long),
        found,
        training_step(model, sizes.long, sizes.vocabulary, where.device),
        rounds,
    )
    step = training_step(model, sizes.short, sizes.vocabulary, where.device)
    compare(tokens_title(sizes.short), found, step, 2 * rounds)
    for options, _ in NUMBERS.values():
        with sl.trace(model, **options) as trace:
            step()
        measured = sum(value.stats is not None for value in trace.values)
        faults = trace.info["faults"] or "none"
        print(f"  {measured:,} tensors measured in a step; faults of the recorder: {faults}")
    count_waits(f"a step of {tokens_title(sizes.short)}", found, step)


def steps_with_device_time(sizes: Sizes, where: Place, rounds: int) -> None:
    """Print what ``time="device"`` costs, and how true it is."""
    model = gpt2(sizes, where)
    step = training_step(model, sizes.long, sizes.vocabulary, where.device)
    timed_steps(step, 3)
    plain = statistics.median(timed_steps(step, rounds)[0])
    expected, every = profiled_times(step)
    times, trace = timed_steps(step, rounds + 1, lambda: sl.trace(model, time="device"))
    after = statistics.median(timed_steps(step, rounds)[0])
    compiled_line("plain", plain, plain)
    compiled_line("a later step of a block", statistics.median(times[1:]), plain, DEVICE_TIME)
    compiled_line("plain, after it", after, plain)
    found: Counter[str] = Counter()
    for op in trace.ops.where(level="aten"):
        found[op.name.partition(".")[0]] += (op.device_duration or 0) // (rounds + 1)
    print(f"  {'device time of a step, µs':36s} {'profiler':>12s} {'sightline':>12s}")
    rows = [(name, expected[name], spent) for name, spent in found.most_common(12)]
    for name, theirs, ours in [*rows, ("all ops", every, found.total())]:
        print(f"  {name:36s} {theirs:12,.0f} {ours / 1e3:12,.0f}   × {ours / 1e3 / theirs:.3f}")
    report("faults of the recorder", trace.info["faults"])


def profiled_times(step: Step) -> tuple[Counter[str], float]:
    """What a plain step took on the device, in µs, as the profiler says: each operator, and all of them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        synchronize()
    ran = [event for event in found.key_averages() if event.key.startswith("aten::")]
    totals = Counter({event.key.removeprefix("aten::"): event.device_time_total for event in ran})
    return totals, sum(event.self_device_time_total for event in ran)


def steps(sizes: Sizes, where: Place, engines: tuple[Engine, ...], rounds: int) -> None:
    """Print what recording an eager training step costs."""
    model = gpt2(sizes, where)
    found = variants(model, engines)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"GPT-2 of {millions:.1f} million parameters: forward, backward, AdamW")
    for shape, times in ((sizes.long, rounds), (sizes.short, 2 * rounds)):
        step = training_step(model, shape, sizes.vocabulary, where.device)
        compare(tokens_title(shape), found, step, times)
        if shape == sizes.long:
            peaks(found, step)
        else:
            with sl.trace(model, engine=engines[0]) as trace:
                step()
            faults = trace.info["faults"] or "none"
            print(f"  {len(trace.ops):,} ops recorded in a step; faults of the recorder: {faults}")
            count_waits(f"a step of {tokens_title(shape)}", [one for one in found if not one.warm], step)


def peaks(found: list[Variant], step: Step) -> None:
    """Print the most memory that was allocated on the device in a step."""
    if not torch.cuda.is_available():
        print("  peak memory is not measured on a CPU")
        return
    plain = 0
    for variant in found:
        if variant.warm or variant.clock == "trace":
            continue
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        with variant.make():
            step()
        synchronize()
        peak = torch.cuda.max_memory_allocated()
        plain = plain or peak
        mark = "" if not variant.name.startswith("traced") else "= plain ✓" if peak == plain else "≠ plain ✗"
        print(f"  peak memory, {variant.name:34s} {peak:,} bytes   {mark}".rstrip())


# -- a compiled step -----------------------------------------------------------------------------------------


class CompiledStep:
    """A training step of a small transformer whose forward and backward pass inductor has compiled."""

    def __init__(self, sizes: Sizes, where: Place) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        vocabulary = min(8192, sizes.vocabulary)
        self.model = Transformer(4, sizes.compiled_width, 8, vocabulary).to(where.device, where.dtype)
        self._compiled = torch.compile(self.model)
        self._tokens = torch.randint(0, vocabulary, sizes.compiled_tokens, device=where.device)
        # As on a GPU also on a CPU, where the default is a loop over hundreds of small ops.
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=True)

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        logits = self._compiled(self._tokens)
        F.cross_entropy(logits.flatten(0, 1), self._tokens.flatten()).backward()
        self._optimizer.step()


def timed_steps(step: Step, number: int, make: Callable[[], Any] = nullcontext) -> tuple[list[float], Any]:
    """Seconds of each step in a block, and what the block gave."""
    times = []
    synchronize()
    with make() as made:
        for _ in range(number):
            start = time.perf_counter()
            step()
            synchronize()
            times.append(time.perf_counter() - start)
    return times, made


def dynamo_counts() -> dict[str, int]:
    """Everything Dynamo and inductor count: frames, graphs, recompilations, cache misses."""
    counters = torch._dynamo.utils.counters
    return {f"{group}.{key}": count for group, counts in counters.items() for key, count in counts.items()}


def compiled_steps(sizes: Sizes, where: Place, engine: Engine, rounds: int) -> None:
    """Print what a trace does to compiled code that was there before it, and to code compiled inside it."""
    step = CompiledStep(sizes, where)

    def make() -> AbstractContextManager[Any]:
        return sl.trace(step.model, engine=engine)

    print(
        f"\na compiled training step ({engine} engine), {STEPS_IN_A_TRACE} steps in a trace, {rounds} traces"
    )
    timed_steps(step, 2 * STEPS_IN_A_TRACE)  # compiles, and lets the clocks settle
    before, _ = timed_steps(step, 2 * STEPS_IN_A_TRACE)
    counted = dynamo_counts()
    traced: list[float] = []
    first: list[float] = []
    after: list[float] = []
    faults: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(rounds):
            times, trace = timed_steps(step, STEPS_IN_A_TRACE, make)
            first.append(times[0])
            traced.append(statistics.fmean(times))
            faults += trace.info["faults"]
            after += timed_steps(step, STEPS_IN_A_TRACE)[0]
    plain = statistics.median(before)
    print(f"  plain, before any trace        {plain * 1e3:8.3f} ms, median")
    tiny = sizes is TINY  # too small for a target
    compiled_line(
        "in a trace, mean of all steps", statistics.median(traced), plain, None if tiny else COMPILED
    )
    compiled_line("in a trace, its first step", statistics.median(first), plain)
    compiled_line("plain, after a trace", statistics.median(after), plain, None if tiny else AFTERWARDS)
    changed = {key: n - counted.get(key, 0) for key, n in dynamo_counts().items() if n != counted.get(key, 0)}
    report("Dynamo's counters changed", changed)
    report("warnings", [f"{one.category.__name__}: {one.message}" for one in warned])
    report("faults of the recorder", faults)
    compiled_inside(sizes, where, engine, counted)


def compiled_line(name: str, taken: float, plain: float, target: float | None = None) -> None:
    """Print one time beside the plain one."""
    ratio = taken / plain
    judged = "" if target is None else verdict(ratio, target)
    print(f"  {name:30s} {taken * 1e3:8.3f} ms   × {ratio:.3f}   {judged}".rstrip())


def report(name: str, found: Any) -> None:
    """Print that there is nothing, or what there is."""
    print(f"  {name}: {found} ✗" if found else f"  {name}: none ✓")


def compiled_inside(sizes: Sizes, where: Place, engine: Engine, counted: dict[str, int]) -> None:
    """Compile inside a trace: as many graphs as without one, and none after it."""
    torch._dynamo.utils.counters.clear()
    step = CompiledStep(sizes, where)
    _, trace = timed_steps(step, 5, lambda: sl.trace(step.model, engine=engine))
    inside = dynamo_counts()
    timed_steps(step, 5)
    names = ("frames.ok", "frames.total", "stats.unique_graphs", "stats.calls_captured")
    as_before = {
        name: (counted.get(name), inside.get(name)) for name in names if counted.get(name) != inside.get(name)
    }
    print("  compiled inside a trace")
    report("  counted otherwise than without one (without, with)", as_before)
    later = {key: n - inside.get(key, 0) for key, n in dynamo_counts().items() if n != inside.get(key, 0)}
    report("  Dynamo's counters changed by plain steps after it", later)
    report("  faults of the recorder", trace.info["faults"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--numbers", action="store_true", help="the check and statistics instead")
    parser.add_argument("--device-time", action="store_true", help="the time of the device instead")
    parser.add_argument("--compiled", action="store_true", help="a compiled training step instead")
    parser.add_argument("--tiny", action="store_true", help="small sizes, also on a CPU")
    add_option(parser, default="native")
    options = parser.parse_args()
    where = place(options.tiny)
    sizes = TINY if options.tiny else Sizes()
    engines = available(options.engine)
    print(f"torch {torch.__version__}, {where.name}; sightline {sl.__version__}")
    if options.compiled:
        for engine in engines:
            compiled_steps(sizes, where, engine, options.rounds)
    elif options.device_time:
        steps_with_device_time(sizes, where, options.rounds)
    elif options.numbers:
        steps_with_numbers(sizes, where, options.rounds)
    else:
        steps(sizes, where, engines, options.rounds)


if __name__ == "__main__":
    main()
