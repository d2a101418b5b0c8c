"""Device work made up for recordings of the CPU, as ``time="device"`` would have found it on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from sightline.api import Trace
from sightline.data import trace_data as d


@dataclass(frozen=True)
class Work:
    """Something a device did; times are ns since the recording began."""

    launch: int
    start: int
    duration: int
    name: str = "gemm"
    kind: str = "kernel"
    device: int = 0
    stream: int = 7


def with_work(data: d.TraceData, works: Iterable[Work], **info: object) -> d.TraceData:
    """The recording as it would be with ``time="device"``, had a device done this."""
    listed = sorted(works, key=lambda work: work.start)
    names = list(dict.fromkeys([*data.names, *(work.name for work in listed)]))
    ids = {name: at for at, name in enumerate(names)}
    columns = d.DeviceWorkColumns(
        np.array([ids[work.name] for work in listed], dtype=np.int32),
        np.array([d.WORK_KINDS.index(work.kind) for work in listed], dtype=np.int8),
        np.array([work.device for work in listed], dtype=np.int8),
        np.array([work.stream for work in listed], dtype=np.int32),
        *(
            np.array([getattr(work, name) for work in listed], dtype=np.int64)
            for name in ("launch", "start", "duration")
        ),
    )
    return replace(data, names=names, device_work=columns, info={**data.info, "time": "device", **info})


def kernels(data: d.TraceData, *, factor: int = 3, stream: int = 7) -> list[Work]:
    """A kernel for each aten op, asked for in its middle, ``factor`` times as long as the op, one by one."""
    works, free = [], 0
    for op in np.flatnonzero(data.ops.level == d.LEVELS.index("aten")).tolist():
        launch = int(data.ops.start[op] + data.ops.duration[op] // 2)
        start = max(launch + 1_000, free)
        name = f"{data.names[data.ops.name[op]]}_kernel"
        works.append(Work(launch, start, factor * int(data.ops.duration[op]), name, stream=stream))
        free = start + works[-1].duration
    return works


def timed(trace: Trace, works: Iterable[Work] | None = None, **info: object) -> Trace:
    """The trace with a kernel for each aten op, or with the work given."""
    return Trace(with_work(trace.data, kernels(trace.data) if works is None else works, **info))
