"""The recording as slices on tracks, each inside the one it ran in.

Starts are on the clock of the run, but durations leave the recorder's own time out, so an op would end before
those inside it. A slice therefore lasts as long as was measured, or until the last one inside it ends. Slices
that still overlap are cut: on a track, any two slices are nested or apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.lifetimes import LONGEST, clock
from sightline.data.trace_data import I8, I32, I64, LEVELS, PHASES, StepInfo, TraceData

CALL, API, ATEN = range(3)  #: kinds of slices, in the order of those that begin at once
_PASSES: Final = 64  #: levels of nesting through which an end is passed up
_CHUNK: Final = 1 << 16


@dataclass(frozen=True)
class Slices:
    """Module calls and ops in the order they began, thread by thread."""

    kind: I8
    id: I32  #: of the op or the module call
    thread: I32
    start: I64
    end: I64

    def __len__(self) -> int:
        return len(self.id)

    def op_slices(self, count: int) -> I64:
        """The slice of each of ``count`` ops."""
        slices = np.zeros(count, dtype=np.int64)
        at = np.flatnonzero(self.kind != CALL)
        slices[self.id[at]] = at
        return slices


@dataclass(frozen=True)
class DeviceSlices:
    """The work of devices, stream by stream in the order it began."""

    streams: list[tuple[int, int]]  #: device and number of each
    id: I64  #: into ``device_work``
    lane: I64  #: into ``streams``
    start: I64
    end: I64

    def __len__(self) -> int:
        return len(self.id)


def device_slices(data: TraceData) -> DeviceSlices:
    """The work of devices as slices; on a stream each ends at the latest where the next one begins."""
    work = data.device_work
    pairs = np.stack([work.device.astype(np.int64), work.stream.astype(np.int64)], axis=1)
    streams, lane = np.unique(pairs, axis=0, return_inverse=True)
    lane = lane.reshape(-1).astype(np.int64)
    id = np.lexsort((clock(work.start), lane))
    start = clock(work.start)[id]
    end = start + clock(work.duration)[id]
    for first, last in _runs(lane[id]):
        end[first : last - 1] = np.minimum(end[first : last - 1], start[first + 1 : last])
    return DeviceSlices([(int(device), int(stream)) for device, stream in streams], id, lane[id], start, end)


def host_slices(data: TraceData) -> Slices:
    """Every module call and op as a slice; on each thread they nest."""
    ops, calls = data.ops, data.calls
    # Calls and ops end after everything that ran inside them.
    op_end = clock(ops.start) + clock(ops.duration)
    call_end = clock(calls.start) + clock(calls.duration)
    _pass_up(op_end, ops.parent)
    at = np.flatnonzero(ops.call >= 0)
    call = ops.call[at]
    # A backward op has the call of its forward op, but did not run in it.
    at = at[(at >= calls.first_op[call]) & (at < calls.end_op[call])]
    np.maximum.at(call_end, ops.call[at], op_end[at])
    _pass_up(call_end, calls.parent)
    kind = np.concatenate([np.full(len(calls), CALL), np.where(ops.level == LEVELS.index("api"), API, ATEN)])
    id = np.concatenate([np.arange(len(calls)), np.arange(len(ops))])
    start = np.concatenate([clock(calls.start), clock(ops.start)])
    end = np.concatenate([call_end, op_end])
    thread = np.concatenate([call_threads(data), ops.thread.astype(np.int32)])
    order = np.lexsort((id, kind, start, thread))
    slices = Slices(
        kind[order].astype(np.int8), id[order].astype(np.int32), thread[order], start[order], end[order]
    )
    for first, last in _runs(slices.thread):
        cut_to_nest(slices.start[first:last], slices.end[first:last], slices.kind[first:last] == ATEN)
    return slices


def _pass_up(end: I64, parent: I32) -> None:
    """Move the ends of parents to those of their children or later."""
    inner = np.flatnonzero(parent >= 0)
    for _ in range(_PASSES):
        inner = inner[end[parent[inner]] < end[inner]]
        if not len(inner):
            return
        np.maximum.at(end, parent[inner], end[inner])
        inner = np.flatnonzero(parent >= 0)


def call_threads(data: TraceData) -> I32:
    """The thread of each module call: that of the ops in it, of the calls in it, or of the call around it."""
    ops, calls = data.ops, data.calls
    first = np.full(len(calls), -1, dtype=np.int32)
    ran = np.flatnonzero((ops.call >= 0) & (ops.phase != PHASES.index("backward")))[::-1]
    first[ops.call[ran]] = ops.thread[ran]
    threads, parents = first.tolist(), calls.parent.tolist()
    for at in range(len(threads) - 1, -1, -1):
        if parents[at] >= 0 and threads[parents[at]] < 0:
            threads[parents[at]] = threads[at]
    for at, thread in enumerate(threads):
        if thread < 0:
            threads[at] = threads[parents[at]] if parents[at] >= 0 else 0
    return np.array(threads, dtype=np.int32)


def cut_to_nest(start: I64, end: I64, leaf: NDArray[np.bool_]) -> None:
    """Cut ends so that slices in the order of their starts nest; a leaf ends where the next one begins."""
    open_ends: list[int] = []
    open_at: list[int] = []
    leaves: list[bool] = []
    for chunk in range(0, len(start), _CHUNK):
        rows = slice(chunk, chunk + _CHUNK)
        listed = zip(start[rows].tolist(), end[rows].tolist(), leaf[rows].tolist(), strict=True)
        for at, (begin, until, is_leaf) in enumerate(listed, chunk):
            while open_ends and (leaves[-1] or open_ends[-1] <= begin):
                if open_ends[-1] > begin:
                    end[open_at[-1]] = begin
                open_ends.pop(), open_at.pop(), leaves.pop()
            if open_ends and until > open_ends[-1]:
                until = end[at] = open_ends[-1]
            open_ends.append(until)
            open_at.append(at)
            leaves.append(is_leaf)


@dataclass(frozen=True, slots=True)
class TrackSpan:
    """A named part of a track."""

    name: str
    start: int
    end: int
    lane: int = 0  #: the number of its track: a thread, or one of several for steps that overlap
    ops: int = 0


def phases(data: TraceData, host: Slices) -> list[TrackSpan]:
    """For each thread, the spans in which its ops belonged to one phase."""
    spans: list[TrackSpan] = []
    is_op = host.kind != CALL
    thread, id, start, end = (column[is_op] for column in (host.thread, host.id, host.start, host.end))
    phase = data.ops.phase[id].astype(np.int32)
    for first, last in _runs(thread.astype(np.int64) * len(PHASES) + phase):
        until = int(end[first:last].max())
        if last < len(id) and thread[last] == thread[first]:
            until = min(until, int(start[last]))
        spans.append(
            TrackSpan(PHASES[phase[first]], int(start[first]), until, int(thread[first]), last - first)
        )
    return spans


def steps(infos: Sequence[StepInfo]) -> list[TrackSpan]:
    """The steps; of two that overlap without being nested, the later one gets a lane of its own."""
    lanes: list[list[int]] = []
    spans: list[TrackSpan] = []
    timed = []
    for step in infos:
        start, long = (min(max(time, 0), LONGEST) for time in (step.start, step.duration))
        timed.append((start, start + long, step))
    for start, end, step in sorted(timed, key=lambda one: (one[0], -one[1])):
        for ends in lanes:
            while ends and ends[-1] <= start:
                ends.pop()
        lane = next((at for at, ends in enumerate(lanes) if not ends or end <= ends[-1]), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(end)
        spans.append(TrackSpan(step.name, start, end, lane, step.end_op - step.first_op))
    return spans


def _runs(keys: NDArray[Any]) -> Sequence[tuple[int, int]]:
    """The runs of equal keys: (first, end) of each."""
    if not len(keys):
        return []
    bounds = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
    return list(pairwise(bounds))
