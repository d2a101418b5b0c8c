"""Which op owns what a device did, and how busy a device was: worked out of made-up device work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sightline.api import Trace
from sightline.data import trace_data as d
from sightline.data.device_time import DeviceUsage, device_usage, work_owners
from sightline.errors import InvalidTrace
from tests.builders import TraceBuilder, make_trace
from tests.device_work import Work, timed, with_work


def nested() -> d.TraceData:
    """An API call [1000, 11000) with two aten ops in it: [2000, 4000) and [5000, 8000)."""
    b = TraceBuilder()
    x = b.value(2, 2)
    with b.api("F.linear", x):
        b.op("t", x, out=(2, 2))
        b.op("mm", x, x, out=(2, 2))
    return at_times(b.build().data, start=[1_000, 2_000, 5_000], duration=[10_000, 2_000, 3_000])


def at_times(
    data: d.TraceData, *, start: list[int], duration: list[int], thread: list[int] | None = None
) -> d.TraceData:
    ops = replace(
        data.ops, start=np.array(start, dtype=np.int64), duration=np.array(duration, dtype=np.int64),
        thread=data.ops.thread if thread is None else np.array(thread, dtype=np.int8),
    )  # fmt: skip
    return replace(data, ops=ops)


def launched(data: d.TraceData, *launches: int) -> d.TraceData:
    return with_work(data, [Work(at, at + 100_000 * (n + 1), 10 + n) for n, at in enumerate(launches)])


@pytest.mark.parametrize(
    ("launch", "owner"),
    [
        (999, -1),  # before anything ran
        (1_000, 0),  # in the call, before its ops
        (2_000, 1),
        (4_000, 1),
        (5_999, 2),
        (6_500, 2),
        (10_500, 0),  # in the call, after its ops and what the clocks may differ by
        (13_000, 0),  # 2 µs later it may still be the call's
        (13_001, -1),
    ],
)
def test_the_innermost_op_that_was_running_owns_it(launch: int, owner: int) -> None:
    assert work_owners(launched(nested(), launch)).tolist() == [owner]


def test_an_op_that_has_just_ended_may_still_own_it() -> None:
    assert work_owners(launched(nested(), 4_000 + 900, 4_000 + 2_001)).tolist() == [1, 2]


def test_an_api_call_ends_no_earlier_than_its_ops() -> None:
    data = at_times(nested(), start=[1_000, 2_000, 50_000], duration=[5_000, 2_000, 3_000])
    assert work_owners(launched(data, 30_000, 51_000)).tolist() == [0, 2]


def test_of_two_threads_the_op_that_began_last_owns_it() -> None:
    b = TraceBuilder()
    x = b.value(2, 2)
    for name in ("backward", "mm", "add"):
        x = b.op(name, x, out=(2, 2))
    data = at_times(
        b.build().data, start=[0, 10_000, 40_000], duration=[90_000, 5_000, 5_000], thread=[0, 1, 1]
    )
    assert work_owners(launched(data, 12_000, 42_000, 30_000)).tolist() == [1, 2, 0]


def test_nothing_ran() -> None:
    data = with_work(nested(), [])
    assert work_owners(data).tolist() == []
    assert device_usage(data) == []
    assert [op.device_duration for op in Trace(data).ops] == [0, 0, 0]


def test_without_ops_nobody_owns_it() -> None:
    assert work_owners(launched(TraceBuilder().build().data, 5)).tolist() == [-1]


def test_sums_of_ops_and_of_module_calls() -> None:
    trace = timed(make_trace())
    work = trace.data.device_work
    aten = [op for op in trace.ops if op.level == "aten"]
    assert [op.device_duration for op in aten] == [3 * op.duration for op in aten]
    assert all(
        op.device_duration == sum(child.device_duration or 0 for child in op.children)
        for op in trace.ops
        if op.level == "api"
    )
    root = trace.module_calls[0]
    inside = [op.device_duration or 0 for op in aten if root.ops[0].id <= op.id <= root.ops[-1].id]
    assert root.device_duration == sum(inside) > 0
    assert sum(op.device_duration or 0 for op in aten) == int(work.duration.sum())


def test_without_device_time_there_is_none() -> None:
    trace = make_trace()
    assert {op.device_duration for op in trace.ops} | {
        call.device_duration for call in trace.module_calls
    } == {None}


def test_a_recording_that_was_cut_short_has_none() -> None:
    trace = timed(make_trace(), [], unfinished=True)
    assert trace.ops[0].device_duration is None


# -- busy ------------------------------------------------------------------------------------------


def test_busy_idle_and_waiting() -> None:
    works = [
        Work(launch=50, start=100, duration=100),  # waited 50 for the host, 50 on its way
        Work(launch=60, start=220, duration=80),  # 20 idle, asked for before
        Work(launch=400, start=410, duration=90),  # 100 waiting for the host, 10 on its way
    ]
    data = with_work(nested(), works, duration_ns=1_000)
    assert device_usage(data) == [
        DeviceUsage(device=0, total=1_000, busy=270, waiting=50 + 100 + 500, work=270, streams=1)
    ]
    assert device_usage(data)[0].pending == 50 + 20 + 10
    assert device_usage(data)[0].overlap == 0


def test_streams_that_overlap_are_busy_once() -> None:
    works = [Work(0, 0, 100), Work(0, 50, 100, stream=9), Work(0, 60, 20, stream=9), Work(0, 150, 50)]
    [one] = device_usage(with_work(nested(), works, duration_ns=200))
    assert (one.busy, one.work, one.overlap, one.streams) == (200, 270, 70, 2)
    assert (one.waiting, one.pending) == (0, 0)


def test_each_device_has_its_own() -> None:
    works = [Work(0, 0, 100), Work(0, 500, 100, device=1)]
    one, other = device_usage(with_work(nested(), works, duration_ns=1_000))
    assert (one.device, one.busy, other.device, other.busy) == (0, 100, 1, 100)
    assert one.total == other.total == 1_000


def test_a_device_that_is_busy_after_the_end() -> None:
    [one] = device_usage(with_work(nested(), [Work(0, 0, 5_000)], duration_ns=1_000))
    assert (one.total, one.busy, one.waiting) == (5_000, 5_000, 0)


def test_with_last_what_was_dropped_is_no_idle_time() -> None:
    data = with_work(nested(), [Work(2_500, 3_000, 1_000)], duration_ns=5_000, dropped=7)
    [one] = device_usage(data)
    assert (one.total, one.busy, one.waiting, one.pending) == (4_000, 1_000, 2_500, 500)


# -- invariants ------------------------------------------------------------------------------------


def test_a_valid_recording() -> None:
    timed(make_trace(backward=False)).validate()


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (Work(10, 20, -1), "device work 0 ends before it begins"),
        (Work(21, 20, 1), "device work 0 begins before the host launched it"),
    ],
)
def test_what_cannot_be(work: Work, says: str) -> None:
    with pytest.raises(InvalidTrace, match=says):
        timed(make_trace(backward=False), [work]).validate()


@pytest.mark.parametrize("column", ["name", "kind"])
def test_references_that_lead_nowhere(column: str) -> None:
    data = with_work(make_trace().data, [Work(10, 20, 1)])
    wrong = replace(
        data.device_work, **{column: np.array([120], dtype=getattr(data.device_work, column).dtype)}
    )
    with pytest.raises(InvalidTrace, match=f"{column} of device work 0 points nowhere"):
        Trace(replace(data, device_work=wrong, names=data.names[:100])).validate()
