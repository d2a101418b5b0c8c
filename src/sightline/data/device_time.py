"""Device time: the op that launched each piece of device work, and how busy each device was, also as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from sightline.data import trace_data as d
from sightline.data.trace_data import WORK_KINDS, DeviceWorkColumns
from sightline.notation import time_text

if TYPE_CHECKING:
    from sightline.data.index import Index


#: How many ops back the op that launched a piece of work is searched.
_DEEPEST: Final = 64
#: ns by which the clocks of host and device may differ.
_SLACK: Final = 2_000
_PLURALS: Final = {"kernel": "kernels", "copy": "copies", "fill": "fills"}


class DeviceUsage(NamedTuple):
    """The time that one device was busy and idle in a run, in ns."""

    device: int
    total: int  #: from the start of the recording to its end, or to the end of the last work
    busy: int  #: something ran
    waiting: int  #: nothing ran, and the host had not launched the next work
    work: int  #: the sum of all work
    streams: int

    @property
    def overlap(self) -> int:
        """Time in which work ran beside other work, on another stream."""
        return max(self.work - self.busy, 0)

    @property
    def pending(self) -> int:
        """Time in which nothing ran though the next work was launched: it was on its way, or had to wait."""
        return max(self.total - self.busy - self.waiting, 0)


def is_timed(data: d.TraceData) -> bool:
    """Whether the recording has device time: it was requested, and read at the end of the run."""
    read = len(data.device_work) or not data.info.get("unfinished")
    return data.info.get("time") == "device" and bool(read)


def work_owners(data: d.TraceData) -> d.I32:
    """The op that launched each piece of device work; -1 if that op was not recorded.

    It is the innermost op that was running at the launch: ops of one thread nest, and the one that began last
    is the innermost. With several threads it is the op that began last.
    """
    work, ops = data.device_work, data.ops
    best = np.full(len(work), -1, dtype=np.int32)
    ends = ops.start + ops.duration + _SLACK
    inner = np.flatnonzero(ops.parent >= 0)
    # An API call ends after the ops it ran: their recording is not in its duration.
    np.maximum.at(ends, ops.parent[inner], ends[inner].copy())
    for thread in np.unique(ops.thread) if len(work) else ():
        ids = np.flatnonzero(ops.thread == thread)
        ids = ids[np.argsort(ops.start[ids], kind="stable")]
        start, end = ops.start[ids], ends[ids]
        at = np.searchsorted(start, work.launch, side="right") - 1
        for _ in range(_DEEPEST):
            outside = (at >= 0) & (end[at] < work.launch)
            if not outside.any():
                break
            at[outside] -= 1
        inside = (at >= 0) & (end[at] >= work.launch)
        op = np.where(inside, ids[at], -1)
        later = inside & ((best < 0) | (ops.start[op] > ops.start[best]))
        best[later] = op[later]
    return best


def own_durations(data: d.TraceData, owner: d.I32) -> d.I64:
    """The device time of each op itself, in ns, without the ops inside it."""
    spent = np.zeros(len(data.ops), dtype=np.int64)
    has_owner = owner >= 0
    np.add.at(spent, owner[has_owner], data.device_work.duration[has_owner])
    return spent


def inclusive_durations(data: d.TraceData, own: d.I64) -> d.I64:
    """The device time of each op in ns; that of an API call includes the ops it ran."""
    spent, parent = own.copy(), data.ops.parent
    inner = np.flatnonzero(parent >= 0)
    np.add.at(spent, parent[inner], own[inner])
    return spent


def device_usage(data: d.TraceData) -> list[DeviceUsage]:
    """The usage of each device during the run; with ``last=`` during the recorded part of it."""
    work = data.device_work
    first = int(data.ops.start[0]) if data.info.get("dropped") and len(data.ops) else 0
    usage = []
    for device in np.unique(work.device).tolist():
        rows = np.flatnonzero(work.device == device)
        start, launch = work.start[rows], work.launch[rows]
        end = start + work.duration[rows]
        order = np.argsort(start, kind="stable")
        start, end, launch = start[order], end[order], launch[order]
        begin, last = min(first, int(start[0])), int(end.max())
        before = np.concatenate([[begin], np.maximum.accumulate(end)[:-1]])  # the end of all work before
        idle = np.maximum(start - before, 0)
        waiting = np.clip(launch - before, 0, idle)
        until = max(int(data.info.get("duration_ns") or 0), last)
        waited = int(waiting.sum()) + until - last  # after the last work the host launches nothing
        ran, streams = last - begin - int(idle.sum()), len(np.unique(work.stream[rows]))
        usage.append(DeviceUsage(device, until - begin, ran, waited, int((end - start).sum()), streams))
    return usage


@dataclass(frozen=True)
class DeviceSummary:
    """The work of all devices in a recording that has device time."""

    work: DeviceWorkColumns
    unowned: int  #: ns of work that no recorded op launched
    busy: tuple[DeviceUsage, ...]

    @property
    def total(self) -> int:
        """Nanoseconds of everything that ran, added up."""
        return int(self.work.duration.sum())

    @property
    def ran(self) -> str:
        """``5,213 kernels, 12 copies on cuda:0``."""
        counts = np.bincount(self.work.kind, minlength=len(WORK_KINDS)).tolist()
        texts = [
            f"{count:,} {kind if count == 1 else _PLURALS[kind]}"
            for kind, count in zip(WORK_KINDS, counts, strict=True)
            if count
        ]
        devices = ", ".join(device_name(each.device) for each in self.busy)
        return f"{', '.join(texts)} on {devices}" if texts else "no kernels"

    def texts(self) -> list[str]:
        """A line for each device: ``busy 71 %, waiting for the host 24 %``."""
        several = len(self.busy) > 1
        return [(f"{device_name(each.device)} " if several else "") + busy_text(each) for each in self.busy]


def device_summary(index: Index) -> DeviceSummary | None:
    """The summary of a recording's device time; None where that was not recorded."""
    if index.device_own is None:
        return None
    work = index.raw.device_work
    unowned = int(work.duration[index.device_work_ops < 0].sum())
    return DeviceSummary(work, unowned, tuple(device_usage(index.raw)))


def device_name(device: int) -> str:
    """``cuda:0``."""
    return f"cuda:{device}"


def busy_text(each: DeviceUsage) -> str:
    """The usage of a device as text, with idle time and overlapping streams where there are any.

    >>> busy_text(DeviceUsage(0, 100_000_000, 71_000_000, 24_000_000, 74_000_000, 2))
    'busy 71 %, waiting for the host 24 %, between kernels 5 %; 2 streams overlap by 3.00 ms'
    """
    parts = [("busy", each.busy), ("waiting for the host", each.waiting)]
    if round(100 * each.pending / max(each.total, 1)):
        parts.append(("between kernels", each.pending))
    text = ", ".join(f"{label} {100 * time / max(each.total, 1):.0f} %" for label, time in parts)
    if each.streams > 1:
        over = f"overlap by {time_text(each.overlap)}" if each.overlap else "never overlap"
        text += f"; {each.streams} streams {over}"
    return text
