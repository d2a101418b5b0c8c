"""What numbers and captures cost on a CPU, beside the plain run and beside writing alone: one table.

    python bench/tensors.py [--seconds S] [--folder DIR]

A transformer of twelve layers, width 768, on 128 tokens; forward without gradients, all cores. All variants
are run in turn, again and again, in one process; the best of each counts. Starting and stopping the trace
are inside the clock, building it is not.

Captures of all module outputs go to a folder behind the run; their speed is set beside that of
``safetensors.torch.save_file`` writing the same bytes at once. Extra memory is the peak of the process
during a run with captures above that of one without.
"""

from __future__ import annotations

import argparse
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
    plain, captured, alone, extra = [], [], [], []
    for number in range(rounds + 1):  # the first warms the disk's cache
        with Peak() as without:
            plain.append(timed(lambda: [model(x) for _ in range(repeats)]))
        folder = root / f"run{number}.sight"
        with Peak() as peak:
            captured.append(timed(partial(_captured, model, x, folder, repeats)))
        extra.append(peak.extra - without.extra)
        shutil.rmtree(folder)
        target = root / "alone.safetensors"
        taken = 0.0
        for _ in range(repeats):
            taken += timed(partial(save_file, outputs, target))
        alone.append(taken)
        target.unlink()
    writing = min(alone[1:])
    behind = min(captured[1:])
    speed = writing / behind
    added = writing / max(behind - min(plain[1:]), 1e-9)
    judged = f"≥ {CAPTURE_TARGET} {'✓' if added >= CAPTURE_TARGET else '✗'}"
    return [
        f"{size * repeats / 1e6:.0f} MB of module outputs, {repeats} forwards",
        f"  forwards alone                    {min(plain[1:]):7.2f} s",
        f"  save_file alone                   {writing:7.2f} s  {size * repeats / writing / 1e6:6.0f} MB/s",
        f"  forwards with captures to disk    {behind:7.2f} s",
        f"  captures, of the time they add    {added:7.2f} × the speed of save_file  {judged}",
        f"  the whole run, of save_file alone {speed:7.2f} × its speed",
        f"  extra memory at the peak          {statistics.median(extra) / 2**20:7.0f} MiB  ≤ 256 (the queue)",
    ]


def _captured(model: Any, x: Any, folder: Path, repeats: int) -> None:
    with sl.trace(model, ops="none", capture=True, path=folder):
        for _ in range(repeats):
            model(x)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What statistics, checks and captures cost on a CPU.")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where captures are written")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, x = Transformer(LAYERS, WIDTH, HEADS, growth=4).eval(), torch.randint(0, 64, (1, TOKENS))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; sightline {sl.__version__}\n")
    with torch.no_grad():
        print("\n".join(numbers_table(model, x, options.seconds)), "\n")
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print("\n".join(capture_table(model, x, Path(folder), options.rounds)))


if __name__ == "__main__":
    main()
