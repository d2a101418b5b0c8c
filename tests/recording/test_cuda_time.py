"""Device time on a GPU, against what torch's profiler says of the plain run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.data.trace_data import WORK_KINDS
from sightline.errors import UsageError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

_LONG = 50_000  #: ns; shorter ops differ by more from run to run


def step() -> Callable[[], Any]:
    """A training step whose ops take long enough to be compared."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, device="cuda")
    model = nn.Sequential(layer, nn.Linear(1024, 8192, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    x = torch.randn(16, 512, 1024, device="cuda")

    def run() -> None:
        optimizer.zero_grad()
        model(x).float().logsumexp(-1).mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    for _ in range(3):
        run()
    return run


def profiled(run: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """Device time of each aten op itself, as torch's profiler has it, and how often each ran."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
    times, counts = Counter[str](), Counter[str]()
    for event in profile.key_averages():
        if event.key.startswith("aten::"):
            times[event.key.removeprefix("aten::")] += round(1000 * event.self_device_time_total)
            counts[event.key.removeprefix("aten::")] += event.count
    return times, counts


@pytest.mark.parametrize("engine", ["native", "python"])
def test_it_is_what_torchs_profiler_says(engine: Any) -> None:
    run = step()
    expected, counts = profiled(run)
    with sl.trace(time="device", ops="aten", engine=engine) as t:
        run()
    found, ran = Counter[str](), Counter[str]()
    for op in t.ops:
        name = op.name.partition(".")[0]
        found[name] += op.device_duration or 0
        ran[name] += 1
    # The profiler also sees ops inside ops: one that ran as often in both is the same op in both.
    compared = {
        name: (time, found[name])
        for name, time in expected.items()
        if time > _LONG and counts[name] == ran[name]
    }
    assert sum(time for time, _ in compared.values()) > 0.7 * sum(expected.values())
    wrong = {name: times for name, times in compared.items() if abs(times[1] - times[0]) > 0.1 * times[0]}
    assert not wrong
    assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.1)
    t.validate()


def test_streams_copies_and_what_no_op_asked_for() -> None:
    side, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    kept = torch.empty_like(x, device="cpu", pin_memory=True)
    torch.cuda.synchronize()
    with sl.trace(time="device") as t:
        y = x @ x
        with torch.cuda.stream(side):
            z = x @ x
        kept.copy_(y, non_blocking=True)
        torch.cuda.synchronize()
    assert torch.equal(y, z)
    work = t.data.device_work
    assert {"kernel", "copy"} <= {WORK_KINDS[kind] for kind in work.kind.tolist()}
    assert len(set(work.stream.tolist())) == 2
    assert all((op.device_duration or 0) > 0 for op in t.ops.where(name="mm"))
    assert "2 streams" in str(t)
    t.validate()


def test_kernels_of_the_recorder_are_left_out() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    with sl.trace(time="device", stats=True) as t:
        (x @ x).relu()
    assert not [name for name in t.data.names if name.startswith("sightline_")]


def test_not_inside_torchs_profiler() -> None:
    with torch.profiler.profile(), pytest.raises(UsageError, match="which is running already"):
        sl.trace(time="device")
    with sl.trace(time="device") as t:  # and it is free again
        torch.ones(4, device="cuda") + 1
    assert len(t.data.device_work)
    with sl.trace(time="device") as t:
        torch.ones(4, device="cuda") + 1
    assert len(t.data.device_work)
