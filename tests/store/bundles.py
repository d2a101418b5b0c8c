"""Traces for the tests of bundles, every view of one, and what it means that two are the same."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sightline.api import Trace
from sightline.data import trace_data as d
from sightline.data.forms import SLOT, Elided, Form, Record, Symbol
from sightline.errors import SightlineError
from sightline.store import bundle_schema as schema
from sightline.store import save
from sightline.store.shards.stores import MemoryStore
from tests.builders import TraceBuilder, make_trace
from tests.device_work import Work, kernels, timed
from tests.store.shards.captured import capture, some_bytes
from tests.views import odd_traces


def empty() -> Trace:
    return TraceBuilder().build()


def measured() -> Trace:
    """Statistics, steps, schemas, every kind of argument, and names no file could be called."""
    trace = make_trace(3, file="measured.py")
    data = trace.data
    count = 5
    chance = np.random.default_rng(0)
    low, high, mean, std, l2 = (chance.normal(size=count) for _ in range(5))
    zeros, nans, infs = (np.arange(count, dtype=np.int64) * big for big in (1, 1 << 40, 1 << 62))
    bits = np.array([0, 1, (1 << 64) - 1, 1 << 63, 12345], dtype=np.uint64)
    measured = np.array([0, 2, 3, 7, 9], dtype=np.int32)
    stats = d.StatColumns(measured, low, high, mean, std, l2, zeros, nans, infs, bits)
    stats.min[:3] = np.nan, np.inf, -np.inf
    steps = [d.StepInfo("step\0'\"; DROP TABLE ops; --", 0, 3, 0, 1, 5, 10), d.StepInfo("", 3, 3, 1, 1, 0, 0)]
    odd = Form(
        (SLOT, True, 1, 1.0, -0.0, float("inf"), 1 << 200, 1j, None, (), [], {}, ({"a": [SLOT]},), Elided(3)),
        {"dtype": Symbol("torch.float32"), "out": Record("Output", {"x": SLOT}), "\ud800": "\ud800\x1b[31m"},
    )
    return Trace(
        replace(
            data,
            stats=stats,
            steps=steps,
            forms=[*data.forms, odd, Form((), {}), Form(())],
            schemas={"mm": ("self", "mat2"), "": ()},
            info={**data.info, "nested": {"a": (1, 2)}, "duration_ns": 1 << 40, "torch": "2.13", "pid": 7},
        )
    )


def captured(*, step: str = "") -> Trace:
    """A trace with captured tensors in memory, under hostile keys too."""
    data = make_trace(1).data
    infos = [
        capture("blocks.0.fc", value=3, shape=(2, 3), step=step),
        capture("blocks.0.attn", "q", dtype="bfloat16", shape=(4,), step=step),
        capture("../../etc", "passwd", dtype="bool", shape=(3,), step=step),
        capture("\x1b[31m", "'; DROP TABLE ops; --", dtype="complex128", shape=(), step=step),
    ]
    held = {info.key: some_bytes(info, seed) for seed, info in enumerate(infos)}
    return Trace(replace(data, captures=infos, store=MemoryStore(held)))


def on_a_device() -> Trace:
    """A trace with device time: kernels of ops, a copy on another stream, and what no op asked for."""
    trace = make_trace()
    works = kernels(trace.data)
    end = works[-1].start + works[-1].duration
    works += [
        Work(2_000, 6_000, 10_000, "Memcpy HtoD", "copy", stream=9),
        Work(end + 50_000, end + 51_000, 4_000, "</script>\x1b[31m", stream=9),
        Work(end + 60_000, end + 80_000, 1_000, "Memset (Device)", "fill"),
    ]
    return timed(trace, works, duration_ns=end + 200_000, device_own_ns=5_000)


ZOO: dict[str, Callable[[], Trace]] = {
    "empty": empty,
    "transformer": make_trace,
    "forward": lambda: make_trace(5, backward=False),
    "hostile": odd_traces.hostile,
    "nested": odd_traces.nested,
    "crashed": odd_traces.crashed,
    "measured": measured,
    "captured": captured,
    "on a device": on_a_device,
}


def all_views(trace: Trace) -> dict[str, str]:
    """Every view of a trace as text; where one cannot be, why."""
    asked: dict[str, Callable[[], Any]] = {
        "overview": lambda: trace,
        "code": trace.code,
        "code api": lambda: trace.code(level="api", torch_frames=True, fold=False),
        "code folded": lambda: trace.code(names=True),
        "code tail": lambda: trace.code(tail=3),
        "source": trace.source,
        "log": trace.log,
        "log inside": lambda: trace.log(inside=True, tensor=str),
        "call_order": trace.call_order,
        "completion": lambda: trace.call_order(order="completion", fold=False),
        "summary": trace.summary,
        "problems": trace.problems,
        "nonfinite": trace.nonfinite,
        "lineage": lambda: trace.lineage(trace.values[-1]),
        "tensors": lambda: [repr(trace.tensors), *(repr(trace.tensors[key]) for key in trace.tensors)],
        "rows": lambda: [repr(table) for table in (trace.ops, trace.values, trace.modules, trace.module_calls,
                                                   trace.frames, trace.steps)],
        "arguments": lambda: [op.args for op in trace.ops],
        "ops": lambda: [str(op) for op in trace.ops],
        "numbers": lambda: [value.stats for value in trace.values],
        "code lines": lambda: [frame.code for frame in trace.frames],
    }  # fmt: skip
    return {name: _text(view) for name, view in asked.items()}


def _text(view: Callable[[], Any]) -> str:
    try:
        return str(view())
    except (SightlineError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def assert_same(one: d.TraceData, other: d.TraceData) -> None:
    """Every column bit for bit, and every table."""
    for kind in schema.KINDS:
        for name, dtype in schema.columns_of(kind).items():
            mine, theirs = (getattr(getattr(data, kind), name) for data in (one, other))
            assert mine.dtype == theirs.dtype == np.dtype(dtype), (kind, name)
            assert mine.tobytes() == theirs.tobytes(), (kind, name)
        assert len(getattr(one, kind)) == len(getattr(other, kind))
    assert one.storages.tobytes() == other.storages.tobytes()
    for table in ("modules", "codes", "files", "metas", "names", "schemas", "steps", "captures"):
        assert getattr(one, table) == getattr(other, table), table
    assert repr(one.forms) == repr(other.forms)
    assert repr(one.info) == repr(other.info)
    assert list(one.files) == list(other.files)


def saved(trace: Trace, folder: Path, **options: bool) -> Path:
    path = folder / "run.sight"
    save(trace.data, path, **options)
    return path


def altered(path: Path, *statements: str, values: tuple[Any, ...] = ()) -> Path:
    """A bundle after somebody had their way with its database, checksums of texts included."""
    connection = sqlite3.connect(path / schema.DATABASE, isolation_level=None)
    for statement in statements:
        connection.execute(statement, values if "?" in statement else ())
    connection.execute("BEGIN")
    sums = {}
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in there.intersection(schema.TEXTS):
        sums[table] = 0
        for (raw,) in connection.execute(f"SELECT CAST(data AS BLOB) FROM {table} ORDER BY id"):
            sums[table] = zlib.crc32(raw or b"", sums[table])
    if "facts" in there:
        for name, text in connection.execute("SELECT name, data FROM facts WHERE name != 'sums'").fetchall():
            sums[f"facts.{name}"] = zlib.crc32(str(text).encode())
        connection.execute("UPDATE facts SET data = ? WHERE name = 'sums'", (json.dumps(sums),))
    connection.execute("COMMIT")
    connection.close()
    return path
