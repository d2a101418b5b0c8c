"""How fast tensors are written in the background, against one ``save_file`` of the same bytes."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sightline.data.trace_data import CaptureInfo
from sightline.store.shards.writer import ShardWriter


def writing_speed(folder: Path, *, tensors: int = 200, rounds: int = 5) -> dict[str, float]:
    """MB/s of `ShardWriter` and of safetensors, in turns on one disk; neither waits for the disk to sync.

    200 tensors of 2 to 12 MB in float32, made beforehand: 1.4 GB in memory and as much on the disk. A first
    round is not counted: on a virtual machine the first to touch the page cache pays for it.
    """
    import torch

    made = {f"m{index}": torch.randn((2 + index % 11) * 250_000) for index in range(tensors)}
    nbytes = sum(tensor.nbytes for tensor in made.values())
    ways: dict[str, Callable[[Path, dict[str, Any]], None]] = {
        "writer": in_the_background,
        "save_file": at_once,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in sorted(ways, reverse=turn % 2 == 0):
            target = folder / name
            start = time.perf_counter()
            ways[name](target, made)
            taken = time.perf_counter() - start
            shutil.rmtree(target)
            if turn:
                seconds[name].append(taken)
    speed = {name: nbytes / 1e6 / statistics.median(taken) for name, taken in seconds.items()}
    return {**speed, "ratio": speed["writer"] / speed["save_file"]}


def in_the_background(folder: Path, tensors: dict[str, Any]) -> None:
    """Through the writer, one by one."""
    import torch

    with ShardWriter(folder) as writer:
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            info = CaptureInfo("", name, "output", 0, 0, "output", "", -1, shape, "float32")
            writer.put(info.key, "float32", shape, tensor.view(torch.uint8).numpy(), info)


def at_once(folder: Path, tensors: dict[str, Any]) -> None:
    """In one file, with safetensors' own function."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, str(folder / "all.safetensors"))
