"""What numbers and captures cost on a CPU, beside the plain run and beside writing alone: one table.

    python bench/tensors.py [--seconds S] [--folder DIR]

A transformer of twelve layers, width 768, on 128 tokens; forward without gradients, all cores. All variants
are run in turn, again and again, in one process; the best of each counts. Starting and stopping the trace
are inside the clock, building it is not.

Captures of all module outputs go to a folder behind the run; the time they add is set beside that of
``safetensors.torch.save_file`` writing the same bytes at once to as many new files, with and without waiting
for the disk: captures do wait, ``save_file`` does not. On a machine that is not idle, look at the CPU time.
Extra memory is the peak of the process during a run with captures above that of one without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import torch
from models import Transformer
from safetensors.torch import save_file

import sightline as sl

LAYERS, WIDTH, HEADS, TOKENS = 12, 768, 12, 128
#: Upper bounds, as multiples of the plain forward.
TARGETS: Final = {"  and check": 1.12, "  and stats": 1.35, "  with check": 1.12, "  with stats": 1.35}
CAPTURE_TARGET: Final = 0.8


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def traced(model: Any, x: Any, **options: Any) -> Callable[[], None]:
    """A run inside a trace."""

    def run() -> None:
        with sl.trace(model, **options):
            model(x)

    return run


def numbers_table(model: Any, x: Any, seconds: float) -> list[str]:
    """Statistics and the check, as multiples of the plain forward."""
    variants: dict[str, Callable[[], Any]] = {
        "plain": lambda: model(x),
        'recording, ops="aten"': traced(model, x, ops="aten"),
        "  and check": traced(model, x, ops="aten", check="nonfinite"),
        "  and stats, no fingerprints": traced(model, x, ops="aten", stats=sl.Stats(fingerprint=False)),
        "  and stats": traced(model, x, ops="aten", stats=True),
        'recording, ops="both"': traced(model, x),
        "  with check": traced(model, x, check="nonfinite"),
        "  with stats": traced(model, x, stats=True),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        for name, run in variants.items():
            times[name].append(timed(run))
    plain = min(times["plain"])
    lines = [f"{'':28}{'ms':>9}{'× plain':>10}{'median':>9}  target"]
    for name, taken in times.items():
        ratio, middle = min(taken) / plain, statistics.median(taken) / statistics.median(times["plain"])
        target = TARGETS.get(name)
        judged = "" if target is None else f"  ≤ {target} {'✓' if ratio <= target else '✗'}"
        lines.append(f"{name:28}{min(taken) * 1e3:9.1f}{ratio:10.2f}{middle:9.2f}{judged}")
    return lines


class Peak:
    """The most memory the process had, above what it had at the start: sampled by a thread."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._start = self.most = resident()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = max(self.most, resident()) - self._start


def resident() -> int:
    """Bytes of memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def capture_table(model: Any, x: Any, root: Path, rounds: int) -> list[str]:
    """Writing all module outputs behind the run, beside writing the same bytes at once."""
    outputs: dict[str, Any] = {}
    with sl.trace(model, ops="none", capture=True) as t:
        model(x)
    outputs = {key.replace("/", "|"): t.tensors[key].torch() for key in t.tensors}
    size = sum(tensor.nbytes for tensor in outputs.values())
    repeats = max(1, (1 << 30) // size)  # about a gigabyte, so that a start and a stop do not count
    ways: dict[str, Callable[[Path], None]] = {
        "forwards alone": lambda _: _forwards(model, x, repeats),
        "save_file": lambda folder: _saved(outputs, folder, repeats, sync=False),
        "save_file and fsync": lambda folder: _saved(outputs, folder, repeats, sync=True),
        "forwards with captures": lambda folder: _captured(model, x, folder / "run.sight", repeats),
    }
    plain, alone, synced, captured = ways
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[int]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first warms the disk's cache, and is not counted
        for name in sorted(ways, reverse=number % 2 == 0):  # no one always follows the same one
            folder = root / f"{number}"
            folder.mkdir()
            before = time.process_time()
            with Peak() as peak:
                taken = timed(partial(ways[name], folder))
            if number:
                wall[name].append(taken)
                cpu[name].append(time.process_time() - before)
                peaks[name].append(peak.extra)
            shutil.rmtree(folder)
    lines = [
        f"{size * repeats / 1e6:.0f} MB of module outputs, {repeats} forwards, {rounds} rounds",
        f"  {'':24}{'best s':>9}{'median':>9}{'CPU s':>9}",
    ]
    for name in ways:
        best, middle = min(wall[name]), statistics.median(wall[name])
        lines.append(f"  {name:24}{best:9.2f}{middle:9.2f}{min(cpu[name]):9.2f}")
    added = max(min(wall[captured]) - min(wall[plain]), 1e-9)
    for name in (synced, alone):  # shards are synced, so that is the like; save_file itself does not sync
        speed = min(wall[name]) / added
        judged = f"  ≥ {CAPTURE_TARGET} {'✓' if speed >= CAPTURE_TARGET else '✗'}"
        lines.append(f"  the time captures add: {speed:.2f} × the speed of {name}{judged}")
    used = min(cpu[captured]) - min(cpu[plain])
    lines.append(f"  the CPU time they add: {used / max(min(cpu[alone]), 1e-9):.1f} × that of {alone}")
    extra = statistics.median(peaks[captured]) - statistics.median(peaks[plain])
    return [*lines, f"  extra memory at the peak: {extra / 2**20:.0f} MiB  ≤ 256 (the queue)"]


def _saved(outputs: dict[str, Any], folder: Path, repeats: int, *, sync: bool) -> None:
    """The same bytes into files that stay: one that is written over would never get to the disk."""
    for number in range(repeats):
        path = folder / f"{number}.safetensors"
        save_file(outputs, path)
        if sync:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _forwards(model: Any, x: Any, repeats: int) -> None:
    for _ in range(repeats):
        model(x)


def _captured(model: Any, x: Any, folder: Path, repeats: int) -> None:
    with sl.trace(model, ops="none", capture=True, path=folder):
        _forwards(model, x, repeats)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What statistics, checks and captures cost on a CPU.")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where captures are written")
    parser.add_argument("--only", choices=("numbers", "captures"), default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, x = Transformer(LAYERS, WIDTH, HEADS, growth=4).eval(), torch.randint(0, 64, (1, TOKENS))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; sightline {sl.__version__}\n")
    with torch.no_grad():
        if options.only != "captures":
            print("\n".join(numbers_table(model, x, options.seconds)), "\n")
        if options.only == "numbers":
            return
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print("\n".join(capture_table(model, x, Path(folder), options.rounds)))


if __name__ == "__main__":
    main()
