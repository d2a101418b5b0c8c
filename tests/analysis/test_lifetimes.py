"""A storage is in use from the first op that has it to the end of the last."""

from __future__ import annotations

from sightline.analysis.lifetimes import USES, lifetimes, memory_levels
from sightline.api import Trace
from tests.builders import TraceBuilder, make_trace


def chained() -> Trace:
    """x → a → b, with a weight: 32, 16, 64 and 128 bytes."""
    b = TraceBuilder()
    x, w = b.value(8), b.value(32, kind="parameter", name="w")
    a = b.op("first", x, w, out=(4,), duration=10)
    made = b.op("second", a, out=(16,), duration=10)
    b.op("third", made, out=(), duration=10)
    return b.build()


def test_when_each_storage_was_in_use() -> None:
    trace = chained()
    found = lifetimes(trace.data)
    first, second, third = trace.ops
    ends = [op.start + op.duration for op in trace.ops]
    assert found.bytes.tolist() == [32, 128, 16, 64, 4]
    assert [USES[use] for use in found.use] == [
        "other",
        "parameters",
        "activations",
        "activations",
        "activations",
    ]
    assert found.first.tolist() == [first.start, 0, first.start, second.start, third.start]
    assert found.last.tolist() == [ends[0], ends[2], ends[1], ends[2], ends[2]]


def test_the_bytes_in_use_over_time() -> None:
    (level,) = memory_levels(chained().data)
    assert level.device == "cpu"
    by_use = {use: level.bytes[:, at].tolist() for at, use in enumerate(USES)}
    assert set(by_use["parameters"]) == {128}
    assert max(by_use["activations"]) == 16 + 64
    assert by_use["activations"][-1] == by_use["other"][-1] == 0
    assert (level.times[1:] > level.times[:-1]).all()


def test_views_and_versions_share_a_storage() -> None:
    b = TraceBuilder()
    x = b.value(8)
    b.op("relu", x, out=(8,))
    trace = b.build()
    assert len(lifetimes(trace.data).bytes) == len(trace.data.storages)


def test_a_device_has_a_level_of_its_own() -> None:
    b = TraceBuilder()
    b.op("copy", b.value(8), b.value(4, device="cuda:0"), out=(2,))
    devices = [level.device for level in memory_levels(b.build().data)]
    assert devices == ["cpu", "cuda:0"]


def test_an_empty_recording_uses_nothing() -> None:
    assert list(memory_levels(TraceBuilder().build().data)) == []
    assert len(lifetimes(make_trace().data).bytes) == len(make_trace().data.storages)
