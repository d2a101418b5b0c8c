"""What a bundle weighs and how fast it is written and opened, and what streaming costs, as recordings grow.

    python bench/scale.py [--quick] [--only streaming|bundles]

A training step of the toy transformer is recorded at both levels and repeated, with times that vary, until
there are so many ops. Saved without sources; opened in a fresh process each time, as a person would: the
time runs from ``load`` to the text of the first screen. In brackets: the same screen drawn again, which is
what the view itself takes.

Streaming is measured on a training loop that is really run at both levels, in a process of its own for each
length: what recording adds per op, as the median over stretches of a few thousand ops, in memory and with
``path=``, turn by turn in one process; and the most memory the process ever had, with the finished bundle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import toy, workload

import sightline as sl
from sightline.data import trace_data as d
from sightline.store import save

#: The most a save of a million ops may take, an op may weigh, and a first screen may take.
SAVE_S, BYTES_PER_OP, SCREEN_S = 4.0, 60, 0.6

#: First screens; the first is the one that counts.
SCREENS = {"code": "t.code(tail=40)", "calls": "t.call_order(tail=40, fold=False)", "overview": "t"}

OPEN = """
import json, sys, time
from sightline.api import Trace
from sightline.store import load
from sightline.views import call_order, code, overview
start = time.perf_counter()
t = Trace(load(sys.argv[1]))
t.index
opened = time.perf_counter() - start
text = str({screen})
shown = time.perf_counter() - start
start = time.perf_counter()
again = str({screen})
print(json.dumps([opened, shown, time.perf_counter() - start]))
assert "torch" not in sys.modules
"""


#: What streaming may cost, of what recording in memory does, and the memory it may add from 10k ops to 1M.
STREAM_RATIO, GROWTH_MIB = 1.15, 64

STREAM = """
import json, resource, statistics, sys, tempfile, time
import torch
import sightline as sl
torch.set_num_threads(1)
wanted, ways = int(sys.argv[1]), sys.argv[2].split(",")
model = torch.nn.Sequential(*(part for _ in range(4) for part in (torch.nn.Linear(16, 16), torch.nn.ReLU())))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
batch = torch.randn(4, 16)

def stretch(steps):
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        (model(batch) ** 2).mean().backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps

for _ in range(2):
    with sl.trace(model) as t:
        stretch(1)
per_step = len(t.ops)
steps = max(1, 3000 // per_step)
stretches = max(2, wanted // (steps * per_step))
stretch(20)
bare = statistics.median(stretch(steps) for _ in range(20)) / per_step
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
found = {way: [] for way in ways}
told = {}
with tempfile.TemporaryDirectory() as folder:
    for turn, way in enumerate(ways):
        asked = {"path": {"path": f"{folder}/{turn}.sight"}, "last": {"last": 10_000}}.get(way, {})
        trace = sl.trace(model, **asked)
        trace.start()
        found[way] += (stretch(steps) / per_step - bare for _ in range(stretches))
        running, start = peak(), time.perf_counter()
        t = trace.stop()
        told = {"ops": len(t.ops), "finish": time.perf_counter() - start, "running": running, "peak": peak()}
        assert not t.info["faults"], t.info["faults"]
        del t
tenth = {way: max(1, len(times) // 10) for way, times in found.items()}
print(json.dumps(told | {
    "added": {way: statistics.median(times) for way, times in found.items()},
    "first": {way: statistics.median(times[:tenth[way]]) for way, times in found.items()},
    "last": {way: statistics.median(times[-tenth[way]:]) for way, times in found.items()},
}))
"""


def streamed(ops: int, ways: str) -> dict[str, Any]:
    """What a process that records so many ops says of itself."""
    run = subprocess.run(
        [sys.executable, "-c", STREAM, str(ops), ways], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def streaming(sizes: tuple[int, ...]) -> None:
    """Print what streaming costs."""
    turns = ",".join(["memory", "path"] * 3)
    found = streamed(min(60_000, sizes[-1]), turns)["added"]
    ratio = found["path"] / found["memory"]
    added = {way: f"{times * 1e6:.1f} µs" for way, times in found.items()}
    print(f"recording adds {added['memory']} per op in memory, {added['path']} with path=")
    print(
        f"{'ops':>10} {'added':>10} {'at the end':>12} {'memory running':>16} {'finished':>12} {'finish':>8}"
    )
    rows = [streamed(size, "path") for size in sizes]
    for row in rows:
        print(
            f"{row['ops']:>10,} {row['added']['path'] * 1e6:>7.1f} µs {row['last']['path'] * 1e6:>9.1f} µs "
            f"{row['running']:>12.0f} MiB {row['peak']:>8.0f} MiB {row['finish']:>6.2f} s"
        )
    grown = rows[-1]["peak"] - rows[0]["peak"]
    print(
        f"path= ≤ {STREAM_RATIO} × memory: {ratio:.2f} {verdict(ratio <= STREAM_RATIO)}   "
        f"memory flat within {GROWTH_MIB} MiB: {grown:.0f} {verdict(grown <= GROWTH_MIB)}"
    )


def pattern() -> d.TraceData:
    """One training step, recorded at both levels."""
    model, tokens = toy()
    work = workload("toy", model, tokens, backward=True)
    with sl.trace(model, ops="both", name="scale") as trace:
        work.run()
    return trace.data


class Repeated:
    """A pattern many times over: what it makes is new each time, what it was given is not."""

    def __init__(self, data: d.TraceData, times: int) -> None:
        self._data = data
        self._times = times
        made = data.values.producer >= 0
        self._given, self._made = np.flatnonzero(~made), np.flatnonzero(made)
        self._place = np.empty(len(made), dtype=np.int64)  # of a value, among the given or the made ones
        self._place[self._given], self._place[self._made] = np.arange(len(self._given)), np.arange(made.sum())
        own = np.zeros(len(data.storages), dtype=bool)
        own[data.values.storage[self._given][data.values.storage[self._given] >= 0]] = True
        self._kept = own
        self._storage = np.where(own, np.cumsum(own) - 1, np.cumsum(~own) - 1)

    def data(self) -> d.TraceData:
        """The whole recording."""
        data, times = self._data, self._times
        kept, fresh = data.storages[self._kept], data.storages[~self._kept]
        return d.TraceData(
            ops=self._ops(), values=self._values(), calls=self._calls(), frames=data.frames,
            modules=data.modules, codes=data.codes, files=data.files, metas=data.metas, forms=data.forms,
            names=data.names, storages=np.concatenate([kept, np.tile(fresh, times)]), schemas=data.schemas,
            info=dict(data.info),
        )  # fmt: skip

    def _shifted(self, ids: Any, size: int) -> Any:
        """Ids of rows that are new each time."""
        turns = np.repeat(np.arange(self._times) * size, len(ids))
        tiled = np.tile(ids.astype(np.int64), self._times)
        return np.where(tiled >= 0, tiled + turns, tiled).astype(np.int32)

    def _value_ids(self, ids: Any) -> Any:
        made = self._data.values.producer[ids] >= 0
        turns = np.repeat(np.arange(self._times) * len(self._made), len(ids))
        place = np.tile(self._place[ids], self._times)
        found = np.where(np.tile(made, self._times), len(self._given) + place + turns, place)
        return np.where(np.tile(ids < 0, self._times), -1, found).astype(np.int32)

    def _offsets(self, offsets: Any) -> Any:
        return np.concatenate([[0], np.cumsum(np.tile(np.diff(offsets), self._times))])

    def _times_of(self, rows: Any, seed: int) -> tuple[Any, Any]:
        chance = np.random.default_rng(seed)
        factor = chance.lognormal(0.0, 0.3, len(rows) * self._times)
        duration = (np.tile(rows.duration, self._times) * factor).astype(np.int64)
        step = int(self._data.info["duration_ns"])
        start = np.tile(rows.start, self._times) + np.repeat(np.arange(self._times) * step, len(rows))
        return start + chance.integers(0, 3000, len(start)), duration

    def _tiled(self, rows: Any, *names: str) -> dict[str, Any]:
        return {name: np.tile(getattr(rows, name), self._times) for name in names}

    def _ops(self) -> d.OpColumns:
        ops, calls = self._data.ops, len(self._data.calls)
        start, duration = self._times_of(ops, 0)
        return d.OpColumns(
            **self._tiled(ops, "name", "level", "flavour", "phase", "frame", "form", "result", "flops",
                          "flags", "thread"),
            call=self._shifted(ops.call, calls), parent=self._shifted(ops.parent, len(ops)),
            forward=self._shifted(ops.forward, len(ops)), start=start, duration=duration,
            input_offsets=self._offsets(ops.input_offsets), inputs=self._value_ids(ops.inputs),
            output_offsets=self._offsets(ops.output_offsets), outputs=self._value_ids(ops.outputs),
        )  # fmt: skip

    def _values(self) -> d.ValueColumns:
        values, ops = self._data.values, len(self._data.ops)
        given, made, times = self._given, self._made, self._times
        names = ("meta", "offset", "kind", "name", "slot", "flags")
        plain = {
            name: np.concatenate([getattr(values, name)[given], np.tile(getattr(values, name)[made], times)])
            for name in names
        }
        storage = values.storage[made]
        own = (storage >= 0) & ~self._kept[storage]
        fresh = int((~self._kept).sum())
        turns = np.repeat(np.arange(times) * fresh + int(self._kept.sum()), len(made))
        moved = np.tile(np.where(storage >= 0, self._storage[storage], -1), times)
        old = np.where(values.storage[given] >= 0, self._storage[values.storage[given]], -1)
        storages = np.concatenate([old, np.where(np.tile(own, times), moved + turns, moved)]).astype(np.int32)
        nothing = np.full(len(given), -1, dtype=np.int32)
        return d.ValueColumns(
            **plain, storage=storages,
            producer=np.concatenate([nothing, self._shifted(values.producer[made], ops)]),
            previous=np.concatenate([nothing, self._value_ids(values.previous[made])]),
            base=np.concatenate([nothing, self._value_ids(values.base[made])]),
        )  # fmt: skip

    def _calls(self) -> d.CallColumns:
        calls, ops = self._data.calls, len(self._data.ops)
        start, duration = self._times_of(calls, 1)
        often = np.bincount(calls.module, minlength=len(self._data.modules))[calls.module]
        turns = np.repeat(np.arange(self._times), len(calls))
        return d.CallColumns(
            **self._tiled(calls, "module", "frame", "phase", "flags", "input_form", "output_form"),
            index=(np.tile(calls.index, self._times) + turns * np.tile(often, self._times)).astype(np.int32),
            parent=self._shifted(calls.parent, len(calls)), start=start, duration=duration,
            first_op=self._shifted(calls.first_op, ops), end_op=self._shifted(calls.end_op, ops),
            input_offsets=self._offsets(calls.input_offsets), inputs=self._value_ids(calls.inputs),
            output_offsets=self._offsets(calls.output_offsets), outputs=self._value_ids(calls.outputs),
            order=self._shifted(calls.order, len(calls)),
        )  # fmt: skip


def opened(path: Path, screen: str) -> tuple[float, float, float]:
    """Seconds to open a bundle, to have the first screen of a view, and to draw that again: the view's part.

    The best of five processes: others share this machine.
    """
    best = (float("inf"),) * 3
    for _ in range(5):
        script = OPEN.format(screen=SCREENS[screen])
        run = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
        )
        opening, shown, again = json.loads(run.stdout)
        best = min(best, (opening, shown, again), key=lambda times: times[1])
    return best


def verdict(fine: bool) -> str:
    """A mark a reader can find."""
    return "✓" if fine else "✗"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a bundle weighs, and how fast it opens.")
    parser.add_argument("--quick", action="store_true", help="without the million")
    parser.add_argument("--only", choices=("streaming", "bundles"), help="one of the two tables")
    asked = parser.parse_args()
    sizes = (10_000, 100_000) if asked.quick else (10_000, 100_000, 1_000_000)
    torch.set_num_threads(1)
    if asked.only != "bundles":
        streaming(sizes)
    if asked.only != "streaming":
        bundles(sizes)


def bundles(sizes: tuple[int, ...]) -> None:
    """Print what saving and opening takes."""
    step = pattern()
    print(f"a step of {len(step.ops):,} ops at both levels and {len(step.calls):,} module calls, repeated")
    print(f"{'ops':>10} {'values':>10} {'save':>8} {'size':>10} {'per op':>8} {'open':>8}", end="")
    print("".join(f" {name:>15}" for name in SCREENS))
    for wanted in sizes:
        data = Repeated(step, -(-wanted // len(step.ops))).data()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.sight"
            start = time.perf_counter()
            save(data, path, source=False)
            took = time.perf_counter() - start
            size = (path / "rank0.db").stat().st_size
            screens = {name: opened(path, name) for name in SCREENS}
        ops = len(data.ops)
        per_op, first = size / ops, screens["code"][1]
        print(
            f"{ops:>10,} {len(data.values):>10,} {took:>6.2f} s {size / 2**20:>6.1f} MiB {per_op:>6.1f} B",
            end="",
        )
        print(f" {screens['code'][0] * 1e3:>5.1f} ms", end="")
        print("".join(f" {shown:>6.2f} ({again:.2f}) s" for _, shown, again in screens.values()))
        if wanted == 1_000_000:
            print(
                f"a million: save ≤ {SAVE_S:.0f} s {verdict(took <= SAVE_S)}   "
                f"≤ {BYTES_PER_OP} bytes per op {verdict(per_op <= BYTES_PER_OP)}   "
                f"open and first screen ≤ {SCREEN_S} s {verdict(first <= SCREEN_S)}"
            )


if __name__ == "__main__":
    main()
