"""What the front doors cost beside the tools they stand in for: one table, each pair in one process.

    python bench/originals.py [--seconds S] [--only torchspy]

An original is measured where it can be imported: put its source on PYTHONPATH. One that cannot be has a line
that says so. Both of a pair do the same work in turn, again and again, printing into nothing; the best time
of each counts: of the processor, which other programs on the machine disturb less. *Added* is the time above
the plain run, per unit: an aten op, a module call, a line that is printed, a node. DLBacktrace changes the
whole process and comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
from models import Transformer, Workload, workload
from torch import nn

import sightline as sl

Run = Callable[[], Any]
RUNS_IN_A_BLOCK: Final = 1


@dataclass
class Pair:
    """The same work through a front door and through its original."""

    name: str
    unit: str
    units: Callable[[str], int]  #: how many there are in one run, given what it printed
    make: Callable[[Any], Run]  #: of a tool's module: a block of a few runs
    module: str  #: below ``sightline.compat``, and the original's own name
    plain: Run | None = None  #: the same work without any tool

    def measure(self, seconds: float) -> tuple[str, ...]:
        """The line of the table."""
        ours = self.make(import_module(f"sightline.compat.{self.module}"))
        try:
            theirs = self.make(import_module(self.module))
        except (ImportError, SyntaxError, AttributeError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return (self.name, self.unit, f"not measured ({reason[:60]})", "", "")
        contenders = {"plain": self.plain or (lambda: None), "ours": ours, "theirs": theirs}
        best = dict.fromkeys(contenders, float("inf"))
        counted = dict.fromkeys(contenders, 1)
        end, rounds = time.process_time() + seconds, 0
        while rounds < 2 or time.process_time() < end:
            for name, run in list(contenders.items())[:: 1 if rounds % 2 else -1]:  # who is first is slower
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    start = time.process_time()
                    run()
                    best[name] = min(best[name], time.process_time() - start)
                counted[name] = self.units(printed.getvalue()) or 1
            rounds += 1
        added = {name: (best[name] - best["plain"]) / counted[name] * 1e6 for name in ("theirs", "ours")}
        ratio = added["theirs"] / added["ours"]
        return (
            self.name, self.unit, f"{added['theirs']:.2f}", f"{added['ours']:.2f}",
            f"{ratio:.2f} {'✓' if ratio >= 0.95 else '✗'}",
        )  # fmt: skip


def repeated(run: Run, times: int = RUNS_IN_A_BLOCK) -> Run:
    """A few runs in one."""

    def block() -> None:
        for _ in range(times):
            run()

    return block


class Nothing(nn.Module):
    """Returns what it is given, so that what a call costs is all there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        return x


def code_tracing(work: Workload, *, quiet: bool) -> Pair:
    """Ops of a block, with the list of them at its end."""

    def make(tool: Any) -> Run:
        def block() -> None:
            with tool.TracingMode(quiet=quiet, color=False) as mode:
                for _ in range(RUNS_IN_A_BLOCK):
                    work.run()
            len(mode.traces)

        return block

    name = f"torch-code-tracing, {'quiet, with its traces' if quiet else 'printing'}"
    return Pair(name, "op", lambda _: work.ops * RUNS_IN_A_BLOCK, make, "torch_code_tracing",
                repeated(work.run))  # fmt: skip


def blocks(work: Workload) -> Pair:
    """Blocks as they are printed."""

    def make(tool: Any) -> Run:
        def block() -> None:
            with tool.Tracer("Bench").trace(work.model):
                work.run()

        return block

    lines = lambda printed: printed.count("\n")  # noqa: E731
    return Pair("tracy_nn", "line printed", lines, make, "tracy_nn", work.run)


def calls(classes: tuple[type[nn.Module], ...], name: str) -> Pair:
    """Names of module calls; each tool has a model of its own, and is registered before the clock starts."""
    times, x, folder = 100, torch.ones(1), tempfile.mkdtemp()

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(*(Nothing() for _ in range(9))) for _ in range(10)))

    def make(tool: Any) -> Run:
        own, tracer = model(), tool.CallTracer(folder)
        tracer.register_hooks(own, classes)
        run = repeated(lambda: own(x), times)

        def block() -> None:
            tracer.reset_trace()
            run()

        return block

    plain = model()
    reported = sum(isinstance(one, classes) for one in plain.modules())
    return Pair(
        f"torchspy, CallTracer, {name}", "call reported", lambda _: reported * times, make, "torchspy",
        repeated(lambda: plain(x), times),
    )  # fmt: skip


def saves(*, inside: bool) -> Pair:
    """Tensors written to files, or calls that do nothing outside a context."""
    tensor, folder = torch.ones(64, 64), tempfile.mkdtemp()
    times = 20 if inside else 1000

    def make(tool: Any) -> Run:
        saver = tool.TensorSaver(tempfile.mkdtemp(dir=folder))
        spy_save = tool.spy_save
        save = repeated(lambda: spy_save("x", tensor), times)

        def block() -> None:
            saver.reset_counts()
            with tool.DebugContext(saver):
                save()

        return block if inside else save

    name = "torchspy, spy_save, " + ("of 16 kB" if inside else "outside a context")
    return Pair(name, "call", lambda _: times, make, "torchspy")


def backtrace(work: Workload, *, predict: bool) -> Pair:
    """Tracing a model, or running its graph."""
    example = work.inputs[0]

    def make(tool: Any) -> Run:
        def trace() -> Any:
            return tool.DLBacktrace(model=work.model.eval(), input_for_graph=(example,))

        with contextlib.redirect_stdout(io.StringIO()):
            traced = trace()
        nodes[0] = len(traced.layer_stack)
        return (lambda: traced.predict(example)) if predict else trace

    nodes = [1]
    name = f"DLBacktrace, {'predict' if predict else 'tracing'}"
    return Pair(name, "node", lambda _: nodes[0], make, "dl_backtrace")


def pairs() -> Iterator[Pair]:
    """All of them."""
    torch.manual_seed(0)
    toy = workload("toy", Transformer(1, 32, 2).eval(), torch.randint(64, (1, 8)))
    yield code_tracing(toy, quiet=True)
    yield code_tracing(toy, quiet=False)
    yield blocks(toy)
    yield calls((nn.Module,), "of every module")
    yield calls((nn.Sequential,), "of a tenth of them")
    yield saves(inside=False)
    yield saves(inside=True)
    yield backtrace(toy, predict=False)
    yield backtrace(toy, predict=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What the front doors cost beside the originals.")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each pair")
    parser.add_argument("--only", default="", help="only pairs whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, one thread; sightline {sl.__version__}\n")
    chosen = [one for one in pairs() if options.only in one.name]
    show(("", "per", "original µs", "here µs", "×"))
    with torch.no_grad():
        for one in chosen:
            show(one.measure(options.seconds))


def show(line: tuple[str, ...]) -> None:
    """Print a line of the table."""
    print(f"{line[0]:44}{line[1]:16}{line[2]:>12}{line[3]:>12}{line[4]:>10}", flush=True)


if __name__ == "__main__":
    main()
