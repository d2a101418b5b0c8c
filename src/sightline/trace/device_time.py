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
    total: int  #: from the start of the recording to its end, or to the last of what the device did
    busy: int  #: something ran
    waiting: int  #: nothing ran, and the host had not asked for what came next
    work: int  #: what ran, added up: more than ``busy`` where streams overlap
    streams: int


def owners(data: d.TraceData) -> d.I32:
    """The op that asked for each piece of device work; -1 where it was none that is recorded.

    The innermost op of a thread that was running when the host asked: ops of one thread hold each other, and
    the one that began last is the innermost.
    """
    work, ops = data.device_work, data.ops
    best = np.full(len(work), -1, dtype=np.int32)
    for thread in np.unique(ops.thread) if len(work) else ():
        mine = np.flatnonzero(ops.thread == thread)
        mine = mine[np.argsort(ops.start[mine], kind="stable")]
        start, end = ops.start[mine], ops.start[mine] + ops.duration[mine] + _SLACK
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


def durations(data: d.TraceData, owner: d.I32) -> d.I64:
    """What devices spent on each op in ns; on an API call with the ops that it ran."""
    spent = np.zeros(len(data.ops), dtype=np.int64)
    known = owner >= 0
    np.add.at(spent, owner[known], data.device_work.duration[known])
    parent = data.ops.parent
    inner = np.flatnonzero(parent >= 0)
    own = spent[inner].copy()
    np.add.at(spent, parent[inner], own)
    return spent


def busy(data: d.TraceData) -> list[Busy]:
    """How each device spent the run."""
    work = data.device_work
    found = []
    for device in np.unique(work.device).tolist():
        mine = np.flatnonzero(work.device == device)
        start, launch = work.start[mine], work.launch[mine]
        end = start + work.duration[mine]
        order = np.argsort(start, kind="stable")
        start, end, launch = start[order], end[order], launch[order]
        before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])  # the end of all that came before
        idle = np.maximum(start - before, 0)
        waiting = np.clip(launch - before, 0, idle)
        total = max(int(data.info.get("duration_ns") or 0), int(end.max()))
        running = int(end.max()) - int(idle.sum())
        waited = int(waiting.sum()) + total - int(end.max())  # after the last of it the host asks for nothing
        found.append(
            Busy(device, total, running, waited, int((end - start).sum()), len(np.unique(work.stream[mine])))
        )
    return found
