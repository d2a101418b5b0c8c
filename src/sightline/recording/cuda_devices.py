"""The work of CUDA devices (``time="device"``), and the bytes their allocators hold.

Only the device side of the profiler is on: nothing of it runs for an op. CUPTI has the true start and end of
every kernel, copy and fill, and when the host launched it, which shows its op later. Events around each op
would also count the time in which the device waits for the host.

The profiler's clock is the time of day, ours is the process's own: both are read together at the start and
at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.autograd import profiler

from sightline.data.arrays import EMPTY, IntArray
from sightline.data.trace_data import WORK_KINDS
from sightline.errors import UsageError
from sightline.hints import Hint
from sightline.recording.torchapi import DeviceType, disable_profiler, profiler_enabled

_OWN: Final = "sightline_"  # prefix of the kernels that measure tensors
_KERNEL, _COPY, _FILL = range(len(WORK_KINDS))


class DeviceWork(NamedTuple):
    """The work of devices: rows of `Batch.device`, and the names they refer to."""

    rows: IntArray
    names: list[str]
    own: int  #: nanoseconds that devices spent for the recorder


NO_WORK: Final = DeviceWork(EMPTY, [], 0)


class DeviceTimer:
    """Torch's profiler from start to stop."""

    def __init__(self, begin: int) -> None:
        self._begin = begin  # the process's clock when the recording began
        self._profile: Any = None
        self._start = (0, 0)

    def start(self) -> None:
        """Start the profiler."""
        check_device()  # a profiler may have been started since the trace was made
        self._profile = profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)
        self._profile._prepare_trace()
        self._profile._start_trace()
        self._start = _both_clocks()

    def cancel(self) -> None:
        """Stop the profiler, and drop its events."""
        if self._profile is not None and profiler_enabled():
            disable_profiler()
        self._profile = None

    def stop(self) -> DeviceWork:
        """Stop the profiler, wait for the devices, and return their work."""
        torch.cuda.synchronize()
        end = _both_clocks()
        self._profile, events = None, disable_profiler().events()
        (day, own), (later, last) = self._start, end
        rate = (last - own) / max(later - day, 1)
        numbers, names, spent = read_events(events)
        rows = np.array(numbers, dtype=np.int64).reshape(-1, 7)
        times = rows[:, 4:6]  # launch and start
        rows[:, 4:6] = np.rint((times - day) * rate).astype(np.int64) + own - self._begin
        return DeviceWork(rows[np.argsort(rows[:, 5], kind="stable")].reshape(-1), names, spent)


_OPTION: Final = Hint('time="device"', "--time device")


def check_device() -> None:
    """Raise unless there is a device and torch's profiler is free."""
    if not torch.cuda.is_available():
        raise UsageError(
            f"{_OPTION} reads the times of a CUDA device, and torch sees none here: leave it out, or "
            "record where torch.cuda.is_available()."
        )
    if profiler_enabled():
        raise UsageError(
            f"{_OPTION} uses torch's profiler, which is running already: stop it first, or leave "
            "the option out."
        )


def read_events(events: Iterable[Any]) -> tuple[list[tuple[int, ...]], list[str], int]:
    """Rows of name, kind, device, stream, launch, start and duration; names; time of our own kernels.

    Times are the profiler's. An event without a launch, as of a graph, counts as launched at its start.
    """
    launches: dict[int, int] = {}
    works: list[Any] = []
    for event in events:
        if event.device_type() == DeviceType.CPU:
            if event.correlation_id():
                launches.setdefault(event.correlation_id(), event.start_ns())
        elif not event.is_user_annotation():
            works.append(event)
    names: dict[str, int] = {}
    rows: list[tuple[int, ...]] = []
    own = 0
    for event in works:
        name = event.name()
        if name.startswith(_OWN):
            own += event.duration_ns()
            continue
        start = event.start_ns()
        launch = min(launches.get(event.correlation_id(), start), start)
        kind = _COPY if name.startswith("Memcpy ") else _FILL if name.startswith("Memset ") else _KERNEL
        rows.append((
            names.setdefault(name, len(names)), kind, event.device_index(),
            event.device_resource_id(), launch, start, event.duration_ns(),
        ))  # fmt: skip
    return rows, list(names), own


def _both_clocks() -> tuple[int, int]:
    """The time of day and the process's clock, read as close together as possible."""
    best = (1 << 62, 0, 0)
    for _ in range(20):
        before, day, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        best = min(best, (after - before, day, (before + after) // 2))
    return best[1:]


#: For each device the bytes allocated, reserved, and the peak of allocated ones since the process began.
AllocatorStatistics = dict[str, dict[str, int]]
_STATISTICS: Final = {
    "allocated": ("allocated_bytes", "current"),
    "reserved": ("reserved_bytes", "current"),
    "most": ("allocated_bytes", "peak"),
}


def read_allocators() -> AllocatorStatistics:
    """The statistics of each device on which anything is allocated."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    statistics: AllocatorStatistics = {}
    for device in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats_as_nested_dict(device)  # flattening it takes longer
        numbers = {
            name: int(stats.get(kind, {}).get("all", {}).get(when, 0))
            for name, (kind, when) in _STATISTICS.items()
        }
        if any(numbers.values()):
            statistics[f"cuda:{device}"] = numbers
    return statistics


def before_and_after(
    before: AllocatorStatistics, after: AllocatorStatistics
) -> dict[str, dict[str, list[int]]]:
    """The statistics of each device before and after.

    >>> before_and_after({}, {"cuda:0": {"allocated": 512, "reserved": 2048, "most": 1024}})
    {'cuda:0': {'allocated': [0, 512], 'reserved': [0, 2048], 'most': [0, 1024]}}
    """
    return {
        device: {
            name: [before.get(device, {}).get(name, 0), after.get(device, {}).get(name, 0)]
            for name in _STATISTICS
        }
        for device in sorted(before.keys() | after.keys())
    }
