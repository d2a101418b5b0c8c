"""What recording, checking and measuring cost on a GPU: a Llama of one billion parameters in bf16.

    PYTHONPATH=src python bench/gpu/llama.py [--rounds N]

Variants are measured again and again in one process, in an order drawn anew each time, since the clock rate
of a GPU depends on what ran before; the median of each counts. Starting and stopping the trace is inside
the clock, building it is not. The last table counts the CUDA calls that make the host wait, as torch's
profiler sees them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import sightline as sl

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMalloc")


class EmptyDispatch(TorchDispatchMode):
    """Sees every op and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op."""
        return func(*args, **(kwargs or {}))


def llama() -> Any:
    """The shape of Llama 3.2 1B, with random weights."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def variants(model: Any) -> dict[str, Callable[[], Any]]:
    """How the model is run: each makes a context manager."""
    return {
        "empty dispatch mode": EmptyDispatch,
        'ops="none"': lambda: sl.trace(model, ops="none"),
        'ops="api"': lambda: sl.trace(model, ops="api"),
        'ops="aten"': lambda: sl.trace(model, ops="aten"),
        'ops="both"': lambda: sl.trace(model),
        'check="nonfinite"': lambda: sl.trace(model, check="nonfinite"),
        "stats without fingerprints": lambda: sl.trace(model, stats=sl.Stats(fingerprint=False)),
        "stats=True": lambda: sl.trace(model, stats=True),
    }


def seconds(model: Any, tokens: Any, make: Callable[[], Any] | None) -> float:
    """One forward, start to the device's end."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    if make is None:
        model(tokens)
    else:
        with make():
            model(tokens)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def waits(model: Any, tokens: Any, make: Callable[[], Any] | None) -> int:
    """How often the host waited for the device in one forward."""
    block = nullcontext() if make is None else make()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        block.__enter__()
        model(tokens)
    block.__exit__(None, None, None)  # a check has its last word here, and waits for it
    return sum(event.count for event in profiled.key_averages() if event.key in WAITS)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    model = llama()
    found = variants(model)
    drawn = random.Random(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; sightline {sl.__version__}")
    with torch.no_grad():
        for name, shape in (("8 × 4096 tokens", (8, 4096)), ("1 × 1 token", (1, 1))):
            tokens = torch.randint(0, 32_000, shape, device="cuda")
            times: dict[str, list[float]] = {"plain": [], **{key: [] for key in found}}
            for _ in range(2):
                for make in (None, *found.values()):
                    seconds(model, tokens, make)
            for _ in range(rounds if shape[0] > 1 else 4 * rounds):
                for key in drawn.sample(list(times), len(times)):
                    times[key].append(seconds(model, tokens, found.get(key)))
            plain = statistics.median(times["plain"])
            print(f"\n{name}: plain {plain * 1e3:.2f} ms")
            for key, taken in times.items():
                print(f"  {key:28s} × {statistics.median(taken) / plain:.3f}")
        print("\nwaits for the device in one forward of 1 × 128 tokens")
        tokens = torch.randint(0, 32_000, (1, 128), device="cuda")
        for key, make in (("plain", None), *found.items()):
            waits(model, tokens, make)
            print(f"  {key:28s} {waits(model, tokens, make)}")


if __name__ == "__main__":
    main()
