"""Which op asked for what a device did, and how much of the run a device was busy."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sightline.trace import data as d

#: Ops hold each other at most so deep, as far as it is looked for.
_DEEPEST: Final = 64
#: Clocks differ by so many ns at most.
_SLACK: Final = 2_000


class Busy(NamedTuple):
    """How one device spent the run, in ns."""

    device: int
    total: int  #: from the start of what is recorded to its end, or to the last of what the device did
    busy: int  #: something ran
    waiting: int  #: nothing ran, and the host had not asked for what came next
    work: int  #: what ran, added up
    streams: int

    @property
    def overlap(self) -> int:
        """What ran while something else did, on another stream."""
        return max(self.work - self.busy, 0)

    @property
    def pending(self) -> int:
        """Nothing ran, though the host had asked for what came next: it was on its way, or had to wait."""
        return max(self.total - self.busy - self.waiting, 0)


def is_timed(data: d.TraceData) -> bool:
    """Whether the recording has device time: it was asked for, and read at the end of the run."""
    read = len(data.device_work) or not data.info.get("unfinished")
    return data.info.get("time") == "device" and bool(read)


def owners(data: d.TraceData) -> d.I32:
    """The op that asked for each piece of device work; -1 where it was none that is recorded.

    The innermost op of a thread that was running when the host asked: ops of one thread hold each other, and
    the one that began last is the innermost. Of two threads, that of the op that began last.
    """
    work, ops = data.device_work, data.ops
    best = np.full(len(work), -1, dtype=np.int32)
    ends = _ends(data)
    for thread in np.unique(ops.thread) if len(work) else ():
        mine = np.flatnonzero(ops.thread == thread)
        mine = mine[np.argsort(ops.start[mine], kind="stable")]
        start, end = ops.start[mine], ends[mine]
        at = np.searchsorted(start, work.launch, side="right") - 1
        for _ in range(_DEEPEST):
            outside = (at >= 0) & (end[at] < work.launch)
            if not outside.any():
                break
            at[outside] -= 1
        found = (at >= 0) & (end[at] >= work.launch)
        op = np.where(found, mine[at], -1)
        later = found & ((best < 0) | (ops.start[op] > ops.start[best]))
        best[later] = op[later]
    return best


def _ends(data: d.TraceData) -> d.I64:
    """When ops ended, at least: an API call not before the ops it ran, whose recording is not in its time."""
    ops = data.ops
    ends = ops.start + ops.duration + _SLACK
    inner = np.flatnonzero(ops.parent >= 0)
    own = ends[inner].copy()
    np.maximum.at(ends, ops.parent[inner], own)
    return ends


def own_durations(data: d.TraceData, owner: d.I32) -> d.I64:
    """What devices spent on each op itself, in ns: nothing is counted twice."""
    spent = np.zeros(len(data.ops), dtype=np.int64)
    known = owner >= 0
    np.add.at(spent, owner[known], data.device_work.duration[known])
    return spent


def durations(data: d.TraceData, own: d.I64) -> d.I64:
    """What devices spent on each op in ns; on an API call with the ops that it ran."""
    spent, parent = own.copy(), data.ops.parent
    inner = np.flatnonzero(parent >= 0)
    np.add.at(spent, parent[inner], own[inner])
    return spent


def busy(data: d.TraceData) -> list[Busy]:
    """How each device spent the run; with ``last=`` the part of it that was kept."""
    work = data.device_work
    first = int(data.ops.start[0]) if data.info.get("dropped") and len(data.ops) else 0
    found = []
    for device in np.unique(work.device).tolist():
        mine = np.flatnonzero(work.device == device)
        start, launch = work.start[mine], work.launch[mine]
        end = start + work.duration[mine]
        order = np.argsort(start, kind="stable")
        start, end, launch = start[order], end[order], launch[order]
        begin, last = min(first, int(start[0])), int(end.max())
        before = np.concatenate([[begin], np.maximum.accumulate(end)[:-1]])  # the end of all that came before
        idle = np.maximum(start - before, 0)
        waiting = np.clip(launch - before, 0, idle)
        until = max(int(data.info.get("duration_ns") or 0), last)
        waited = int(waiting.sum()) + until - last  # after the last of it the host asks for nothing
        ran, streams = last - begin - int(idle.sum()), len(np.unique(work.stream[mine]))
        found.append(Busy(device, until - begin, ran, waited, int((end - start).sum()), streams))
    return found
