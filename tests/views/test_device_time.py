"""Views with ``time="device"``: what devices spent beside what the host did, each named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sightline.analysis.cost import cost_of
from sightline.data.device_time import device_summary
from tests.builders import make_trace
from tests.device_work import Work, kernels, timed
from tests.store.bundles import on_a_device

Golden = Callable[[str, str], None]


def test_overview(golden: Golden) -> None:
    golden("overview_device_time", str(on_a_device()))


def test_summary(golden: Golden) -> None:
    golden("summary_device_time", str(on_a_device().summary()))


def test_source(golden: Golden) -> None:
    golden("source_device_time", str(on_a_device().source()))


@pytest.mark.parametrize("width", [40, 60, 64, 100])
def test_no_line_is_wider_than_it_may_be(width: int) -> None:
    trace = on_a_device()
    source = str(trace.source(width=width)).splitlines()
    assert max(map(len, source)) <= width
    assert source[0].endswith(" device time")
    assert ("host time" in source[0]) is (width >= 64)
    assert max(map(len, (*str(trace.summary(width=width)).splitlines(), *str(trace).splitlines()))) <= 100


def test_everything_a_device_did_is_in_the_overview_once() -> None:
    trace = on_a_device()
    costs, use = cost_of(trace.data, trace.index.device_own), device_summary(trace.index)
    assert use is not None
    total = costs.total
    tops = costs.scopes.children(-1)
    columns = (total.device_time, total.backward_device_time, total.recompute_device_time)
    owned = sum(int(column[tops].sum()) for column in columns) + costs.optimizer_device_time
    assert owned + use.unowned == use.total == int(trace.data.device_work.duration.sum())


def test_the_share_is_of_device_time() -> None:
    trace = make_trace(backward=False)
    [first, *_] = [op for op in trace.ops if op.level == "aten"]  # the embedding
    at = first.start
    text = str(
        timed(trace, [Work(at, at + 5_000, 600_000), Work(at, at + 700_000, 400_000, "Memset", "fill")])
    )
    [row] = [line for line in text.splitlines() if line.startswith("  embed")]
    assert row.split()[-3:] == ["100", "%", "▇▇▇▇▇▇▇▇▇▇"]
    assert "1.00 ms" in row
    assert "time 1.00 ms in 1 kernel, 1 fill on cuda:0" in text
    lines = text.splitlines()
    heaviest = lines[next(at for at, line in enumerate(lines) if line.startswith("heaviest")) + 2]
    assert "x = self.embed(tokens)" in heaviest


def test_each_device_is_told_apart() -> None:
    works = [Work(0, 0, 50_000), Work(0, 0, 25_000, device=1)]
    text = str(timed(make_trace(), works, duration_ns=100_000))
    assert "on cuda:0, cuda:1" in text
    assert "device    cuda:0 busy 50 %, waiting for the host 50 %\n" in text
    assert "device    cuda:1 busy 25 %, waiting for the host 75 %\n" in text


def test_nothing_ran_on_a_device() -> None:
    trace = timed(make_trace(), [])
    text = str(trace)
    assert "device    time 0 ns in no kernels" in text
    assert "busy" not in text
    assert "device" not in str(trace.summary()).partition("\n\n")[0]  # no column of it
    assert "device time" in str(trace.source())


@pytest.mark.parametrize("view", ["overview", "summary", "source"])
def test_without_it_no_view_speaks_of_devices(view: str) -> None:
    trace = make_trace()
    text = str(trace if view == "overview" else getattr(trace, view)())
    assert "device" not in text


def test_one_module_has_its_own_device_time() -> None:
    trace = make_trace()
    text = str(timed(trace, kernels(trace.data)).summary(module="blocks.0.fc"))
    [row] = [line for line in text.splitlines() if line.startswith("device time")]
    assert row.split("time ")[1].split(" · ") == ["modules 15.0 µs", "backward 27.0 µs"]
