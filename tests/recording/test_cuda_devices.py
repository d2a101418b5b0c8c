"""``time="device"`` as far as it can be seen without one: events as CUPTI tells them, and where they go."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sightline as sl
from sightline.data.trace_data import WORK_KINDS
from sightline.errors import UsageError
from sightline.recording import cuda_devices, recorder
from sightline.recording.cuda_devices import DeviceWork, check_device, read_events
from sightline.recording.streaming import writer as stream_writer
from sightline.recording.torchapi import DeviceType
from tests.recording.streaming.streams import Awkward, train

CPU, CUDA = DeviceType.CPU, DeviceType.CUDA


@dataclass
class Event:
    """What read_events asks of an event of torch's profiler."""

    kind: Any
    called: str
    begins: int
    lasts: int = 0
    correlation: int = 0
    device: int = 0
    stream: int = 7
    annotation: bool = False

    def device_type(self) -> Any:
        return self.kind

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.begins

    def duration_ns(self) -> int:
        return self.lasts

    def correlation_id(self) -> int:
        return self.correlation

    def device_index(self) -> int:
        return self.device

    def device_resource_id(self) -> int:
        return self.stream

    def is_user_annotation(self) -> bool:
        return self.annotation


def test_kernels_copies_and_fills_with_their_launches() -> None:
    events = [
        Event(CUDA, "gemm", 120, 30, correlation=1),
        Event(CPU, "cudaLaunchKernel", 100, 5, correlation=1),
        Event(CPU, "cudaMemcpyAsync", 110, 5, correlation=2),
        Event(CUDA, "Memcpy HtoD (Pageable -> Device)", 160, 8, correlation=2, stream=9),
        Event(CUDA, "Memset (Device)", 170, 2, correlation=3, device=1),
        Event(CUDA, "gemm", 180, 31, correlation=4),
        Event(CPU, "cudaLaunchKernel", 175, 5, correlation=4),
    ]
    rows, names, own = read_events(events)
    assert names == ["gemm", "Memcpy HtoD (Pageable -> Device)", "Memset (Device)"]
    assert own == 0
    kernel, copy, fill = (WORK_KINDS.index(kind) for kind in ("kernel", "copy", "fill"))
    assert rows == [
        (0, kernel, 0, 7, 100, 120, 30),
        (1, copy, 0, 9, 110, 160, 8),
        (2, fill, 1, 7, 170, 170, 2),  # nobody says when it was asked for: when it began
        (0, kernel, 0, 7, 175, 180, 31),
    ]


def test_a_launch_that_seems_to_come_later_was_no_later() -> None:
    events = [
        Event(CPU, "cudaLaunchKernel", 130, 5, correlation=1),
        Event(CUDA, "gemm", 120, 30, correlation=1),
    ]
    [row], _, _ = read_events(events)
    assert row[4:6] == (120, 120)


def test_of_several_events_of_the_host_the_first_is_the_launch() -> None:
    events = [
        Event(CPU, "cudaLaunchKernel", 90, 5, correlation=1),
        Event(CPU, "cudaLaunchKernel", 95, 5, correlation=1),
        Event(CUDA, "gemm", 120, 30, correlation=1),
    ]
    [row], _, _ = read_events(events)
    assert row[4] == 90


def test_kernels_of_the_recorder_are_counted_apart_and_annotations_are_no_work() -> None:
    events = [
        Event(CUDA, "sightline_statistics_kernel", 120, 30),
        Event(CUDA, "sightline_check", 160, 12),
        Event(CUDA, "Optimizer.step", 100, 900, annotation=True),
    ]
    assert read_events(events) == ([], [], 42)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(
        UsageError, match=r'^time="device" reads the times of a CUDA device, and torch sees none'
    ):
        sl.trace(time="device")


def test_inside_torchs_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_devices, "profiler_enabled", lambda: True)
    with pytest.raises(UsageError, match=r"uses torch's profiler, which is running already: stop it first"):
        sl.trace(time="device")


def test_a_device_and_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_devices, "profiler_enabled", lambda: False)
    check_device()


def test_ops_are_needed() -> None:
    with pytest.raises(
        UsageError, match=r'^time="device" says what each op took: use ops="api", "aten" or "both"'
    ):
        sl.trace(time="device", ops="none")


# -- where it goes ---------------------------------------------------------------------------------


class Timer:
    """In place of CUPTI: a kernel every 20 µs of the run, and one copy."""

    def __init__(self, begin: int) -> None:
        self._begin = begin

    def start(self) -> None:
        """Nothing to switch on."""

    def cancel(self) -> None:
        """Nor off."""

    def stop(self) -> DeviceWork:
        from time import perf_counter_ns

        at = np.arange(0, perf_counter_ns() - self._begin, 20_000)
        rows = np.zeros((len(at), 7), dtype=np.int64)
        rows[:, 0] = np.arange(len(at)) % 2
        rows[:, 3] = 7
        rows[:, 4], rows[:, 5], rows[:, 6] = at, at + 5_000, 10_000
        rows[-1, :2] = 2, WORK_KINDS.index("copy")
        return DeviceWork(rows.reshape(-1), ["gemm", "reduce", "Memcpy DtoH"], 123)


@pytest.fixture
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_devices, "check_device", lambda: None)
    monkeypatch.setattr(recorder, "DeviceTimer", Timer)
    monkeypatch.setattr(stream_writer, "SECONDS", 0.001)
    monkeypatch.setattr(stream_writer, "_MAX_STALE", 1 << 12)


def work_of(trace: sl.Trace) -> dict[str, Any]:
    work = trace.data.device_work
    found = {one.name: getattr(work, one.name).tolist() for one in dataclasses.fields(work)}
    return found | {"name": [trace.data.names[name] for name in found["name"]]}


def traced(**asked: Any) -> sl.Trace:
    model = Awkward()
    with sl.trace(model, time="device", **asked) as t:
        train(model, 2)
    return t


@pytest.mark.usefixtures("a_device")
def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    t = traced()
    assert (t.info["time"], t.info["device_own_ns"]) == ("device", 123)
    assert set(work_of(t)["name"]) == {"gemm", "reduce", "Memcpy DtoH"}
    assert sum(op.device_duration or 0 for op in t.ops) > 0
    t.save(tmp_path / "run.sight")
    loaded = sl.load(tmp_path / "run.sight")
    assert work_of(loaded) == work_of(t)
    assert [op.device_duration for op in loaded.ops] == [op.device_duration for op in t.ops]
    assert str(loaded) == str(t)
    loaded.validate()


@pytest.mark.usefixtures("a_device")
def test_it_is_written_behind_the_run(tmp_path: Path) -> None:
    t = traced(path=tmp_path / "run.sight")
    loaded = sl.load(tmp_path / "run.sight")
    assert work_of(loaded) == work_of(t)
    assert len(loaded.data.device_work) > 10
    assert loaded.info["device_own_ns"] == 123
    loaded.validate()


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize("kept", ["in memory", "on disk"])
def test_with_last_only_what_was_asked_for_since(kept: str, tmp_path: Path) -> None:
    where = {"path": tmp_path / "run.sight"} if kept == "on disk" else {}
    t = traced(last=60, **where)
    assert t.info["dropped"] > 0
    launches = t.data.device_work.launch
    first = int(t.data.ops.start.min())
    assert len(launches)
    assert first <= launches.min() < first + 20_000
    t.validate()
    if where:
        assert work_of(sl.load(tmp_path / "run.sight")) == work_of(t)


@pytest.mark.usefixtures("a_device")
def test_a_recording_without_it_has_none() -> None:
    with sl.trace() as t:
        torch.ones(2) + 1
    assert len(t.data.device_work) == 0
    assert t.ops[0].device_duration is None


@pytest.mark.faults
@pytest.mark.usefixtures("a_device")
def test_what_cannot_be_read_is_a_fault_and_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Timer) -> DeviceWork:
        raise RuntimeError("CUPTI is away")

    monkeypatch.setattr(Timer, "stop", broken)
    with sl.trace(time="device") as t:
        torch.ones(2) + 1
    assert "CUPTI is away" in t.info["faults"][0]
    assert (t.info["time"], t.ops[0].device_duration) == ("host", None)
