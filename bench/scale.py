"""What a bundle weighs and how fast it is written and opened, as recordings grow.

    python bench/scale.py [--quick]

A training step of the toy transformer is recorded at both levels and repeated, with times that vary, until
there are so many ops. Saved without sources; opened in a fresh process each time, as a person would: the
time runs from ``load`` to the text of the first screen. In brackets: the same screen drawn again, which is
what the view itself takes.
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
from sightline.trace import data as d
from sightline.trace.bundle import save

#: The most a save of a million ops may take, an op may weigh, and a first screen may take.
SAVE_S, BYTES_PER_OP, SCREEN_S = 4.0, 60, 0.6

#: First screens; the first is the one that counts.
SCREENS = {"code": "t.code(tail=40)", "calls": "t.call_order(tail=40, fold=False)", "overview": "t"}

OPEN = """
import json, sys, time
from sightline.api import Trace
from sightline.trace.bundle import load
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
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description="What a bundle weighs, and how fast it opens.")
    parser.add_argument("--quick", action="store_true", help="without the million")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    step = pattern()
    print(f"a step of {len(step.ops):,} ops at both levels and {len(step.calls):,} module calls, repeated")
    print(f"{'ops':>10} {'values':>10} {'save':>8} {'size':>10} {'per op':>8} {'open':>8}", end="")
    print("".join(f" {name:>15}" for name in SCREENS))
    for wanted in (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000):
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
