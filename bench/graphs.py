"""What running an exported graph costs beside the model, and what drawing a long recording costs: two tables.

    python bench/graphs.py [--quick] [--only running]

All ways to run a model are measured in turn, again and again, in one process on one thread; the best time of
each counts. `run` keeps every node's inputs and outputs unless it says otherwise; making the graph is not
counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from models import Transformer, tiny_llama, toy
from torch import nn

import sightline as sl
from sightline.graph.exported import export
from sightline.graph.recorded_graph import graph as recorded_graph

#: Upper bound on the mid-size model, as a multiple of eager.
TARGET: Final = 2.0
Way = tuple[str, Callable[[], Any]]


def best_of(ways: list[Way], rounds: int) -> dict[str, float]:
    """The best seconds of each, measured in turn."""
    best = dict.fromkeys((name for name, _ in ways), float("inf"))
    for _ in range(rounds):
        for name, way in ways:
            start = time.perf_counter()
            result = way()
            best[name] = min(best[name], time.perf_counter() - start)
            del result
    return best


def models() -> list[tuple[str, nn.Module, torch.Tensor]]:
    """What is run: a mid-size transformer, one that does next to nothing per op, and a real architecture."""
    torch.manual_seed(0)
    found: list[tuple[str, nn.Module, torch.Tensor]] = []
    found.append(("mid-size", Transformer(layers=8, width=256, heads=8), torch.randint(0, 64, (4, 64))))
    small, tokens = toy()
    found.append(("toy", small, torch.cat([tokens, tokens])))  # a batch of 1 would be fixed
    llama = tiny_llama()
    if llama is not None:
        found.append(("tiny Llama", llama, torch.randint(0, 128, (2, 8))))
    return [(name, model.eval(), tokens) for name, model, tokens in found]


def running(rounds: int) -> None:
    """The first table: one row for each model and way."""
    print(f"{'running':44}{'ms':>10}{'× eager':>10}   target")
    for name, model, tokens in models():
        g = export(model, (tokens,))
        module = g.program.module()
        ways: list[Way] = [
            ("eager", partial(model, tokens)),
            ("torch's own graph module", partial(module, tokens)),
            ("run", partial(g.run, tokens)),
            ("run, keeping nothing", partial(g.run, tokens, keep=())),
            ("run, on_node", partial(g.run, tokens, keep=(), on_node=nothing)),
        ]
        with torch.no_grad():
            best = best_of(ways, rounds)
        print(f"{name}: {len(g)} nodes")
        for way, seconds in best.items():
            ratio = seconds / best["eager"]
            target = ""
            if way == "run" and name == "mid-size":
                target = f"≤ {TARGET} {'✓' if ratio <= TARGET else '✗'}"
            print(f"  {way:42}{seconds * 1e3:10.2f}{ratio:10.2f}   {target}".rstrip())


def nothing(name: str, inputs: tuple[Any, ...], outputs: Any) -> None:
    """What is called for every node: nothing happens."""


def drawing(sizes: list[int], rounds: int) -> None:
    """The second table: making, folding and writing the graph of a recording."""
    print(f"\n{'a recording of':>18}{'ops':>10}{'graph s':>10}{'fold s':>10}{'to_dot s':>10}{'µs/op':>10}")
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for size in sizes:
        x = torch.randn(2, 4)
        with torch.no_grad(), sl.trace(layer, ops="aten") as t:
            for _ in range(size // 6):  # a linear layer is two aten ops
                x = x + layer(x)
        index = t.index
        best = [float("inf")] * 3
        for _ in range(rounds):
            times = [time.perf_counter()]
            graph = recorded_graph(index)
            times.append(time.perf_counter())
            folded = graph.fold()
            times.append(time.perf_counter())
            assert folded.to_dot()
            times.append(time.perf_counter())
            best = [min(old, end - start) for old, start, end in zip(best, times, times[1:], strict=False)]
        columns = "".join(f"{seconds:10.2f}" for seconds in best)
        print(f"{size:>18,}{len(t.ops):>10,}{columns}{sum(best) / len(t.ops) * 1e6:10.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What running and drawing graphs costs.")
    parser.add_argument("--only", choices=("running", "drawing"), help="one table instead of both")
    parser.add_argument("--quick", action="store_true", help="a rough answer in half a minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; sightline {sl.__version__}\n")
    if options.only != "drawing":
        running(30 if options.quick else 200)
    if options.only != "running":
        drawing([20_000] if options.quick else [20_000, 200_000], 2 if options.quick else 5)


if __name__ == "__main__":
    main()
