"""Device time in SQL, in files and on the timeline."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from sightline.api import Trace
from sightline.convert.query import Query
from sightline.data.trace_data import WORK_KINDS
from tests.builders import make_trace
from tests.convert.trace_events import ns, read, slices
from tests.device_work import Work, timed
from tests.store.bundles import on_a_device


def asked(trace: Trace, query: str) -> list[tuple[Any, ...]]:
    with Query(trace.index, query) as desk:
        return list(desk.rows)


def test_device_time_of_ops_and_calls() -> None:
    trace = on_a_device()
    assert asked(trace, "select device_ns from ops") == [(op.device_duration,) for op in trace.ops]
    calls = [(call.device_duration,) for call in trace.module_calls]
    assert asked(trace, "select device_ns from module_calls") == calls


def test_without_device_time_it_is_null() -> None:
    trace = make_trace()
    assert asked(trace, "select distinct device_ns from ops") == [(None,)]
    assert asked(trace, "select distinct device_ns from module_calls") == [(None,)]
    assert asked(trace, "select count(*) from device_work") == [(0,)]


def test_the_table_of_device_work() -> None:
    trace = on_a_device()
    [row] = asked(trace, "select * from device_work where kind = 'copy'")
    assert row[2:] == ("Memcpy HtoD", "copy", "cuda:0", 9, 2_000, 6_000, 10_000)
    sums = "select o.id, sum(w.duration_ns) from device_work w join ops o on o.id = w.op group by 1"
    assert dict(asked(trace, sums)) == {
        op.id: op.device_duration for op in trace.ops if op.level == "aten" and op.device_duration
    } | {row[1]: trace.ops[row[1]].device_duration}
    unowned = asked(trace, "select name from device_work where op is null order by id")
    assert unowned == [("</script>\x1b[31m",), ("Memset (Device)",)]


def test_the_timeline_has_a_track_for_each_stream(tmp_path: Path) -> None:
    trace = on_a_device()
    trace.to_perfetto().save(tmp_path / "run.json")
    events = read(tmp_path / "run.json")
    titles = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert titles[-2:] == ["cuda:0 stream 7", "cuda:0 stream 9"]
    work = trace.data.device_work
    found = slices(events, "device")
    assert sorted(event["args"]["device_work"] for event in found) == list(range(len(work)))
    for event in found:
        id = event["args"]["device_work"]
        assert event["name"] == trace.data.names[work.name[id]]
        assert event["cat"] == f"device,{WORK_KINDS[work.kind[id]]}"
        assert (ns(event["ts"]), ns(event["dur"])) == (work.start[id], work.duration[id])
        assert event["args"].get("op", -1) == trace.index.device_work_ops[id]
    spent = {event["args"]["op"]: event["args"].get("device_us", 0) for event in slices(events, "aten")}
    assert spent == {op.id: (op.device_duration or 0) / 1000 for op in trace.ops if op.level == "aten"}


def test_arrows_lead_from_the_op_to_its_device_work(tmp_path: Path) -> None:
    trace = on_a_device()
    trace.to_perfetto().save(tmp_path / "run.json")
    events = read(tmp_path / "run.json")
    counts = Counter(event["ph"] for event in events)
    assert counts["s"] == counts["f"] == int((trace.index.device_work_ops >= 0).sum())
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ops = {event["args"]["op"]: event for event in slices(events, "aten")}
    for event in slices(events, "device", "kernel"):
        if "op" in event["args"]:
            op, begin = ops[event["args"]["op"]], begins[event["args"]["device_work"]]
            assert ns(op["ts"]) <= ns(begin["ts"]) < ns(op["ts"]) + ns(op["dur"])
            assert begin["tid"] == op["tid"]


def test_kernels_of_one_stream_that_overlap_are_cut(tmp_path: Path) -> None:
    works = [Work(0, 1_000, 5_000, "a"), Work(0, 3_000, 1_000, "b"), Work(0, 3_500, 9_000, "c")]
    timed(make_trace(), works).to_perfetto().save(tmp_path / "run.json")
    found = slices(read(tmp_path / "run.json"), "device")
    assert [(event["name"], ns(event["dur"]), event["args"].get("device_us")) for event in found] == [
        ("a", 2_000, 5), ("b", 500, 1), ("c", 9_000, None),
    ]  # fmt: skip
