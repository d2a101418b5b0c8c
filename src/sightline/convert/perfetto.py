"""The recording as a timeline for Perfetto and chrome://tracing: trace events, written in chunks.

Tracks, top to bottom: the steps, the phases, and for each thread module calls with the API calls in them and
the aten ops in those; then each stream of each device with its work, and an arrow to it from the op that
launched it (``time="device"``). A counter shows the bytes in use on each device. Times are microseconds
with the nanoseconds behind the point, so that nothing is rounded and slices nest as they did.

The ranks of a distributed job share one timeline: a process for each, on the common clock of
`sightline.ranks.collective_waits`, and an arrow through each collective from the rank that came first to the
one that came last.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline._version import __version__
from sightline.analysis.lifetimes import USES, clock, memory_levels
from sightline.convert.atomic_files import atomic_text
from sightline.convert.context import Lists, TableContext
from sightline.convert.encoding import json_text
from sightline.convert.timeline import (
    CALL,
    DeviceSlices,
    Slices,
    TrackSpan,
    device_slices,
    host_slices,
    phases,
    steps,
)
from sightline.data import trace_data as d
from sightline.data.device_time import device_name
from sightline.data.index import Index
from sightline.data.trace_data import TraceData
from sightline.notation import position_text
from sightline.ranks.collective_waits import Waiting
from sightline.ranks.desync import GroupTable
from sightline.ranks.merge import Run
from sightline.store import load

Progress = Callable[[int, int], None]

_CHUNK: Final = 1 << 12  #: slices that are written together
_THREAD, _PHASES, _STEPS = 1, 1000, 2000  #: track ids: each thread, its phases, and the lanes of steps
_STREAMS: Final = 1 << 20  #: and the streams of devices, in order
_CACHED_TEXTS: Final = 1 << 13  #: of each kind
_SOURCE_LINE: Final = 300  #: characters of a source line
_LONGEST: Final = 2000  #: characters of any other text: slices of a chunk are in memory together


def _no_progress(_done: int, _total: int) -> None:
    pass


class Timeline:
    """The timeline of a recording, or of all ranks of a job; as text it is JSON.

    >>> import torch, sightline as sl
    >>> with sl.trace() as t:
    ...     y = torch.ones(2, 3).relu()
    >>> str(t.to_perfetto())[:16]
    '{"traceEvents":['
    """

    def __init__(self, source: Index | Run) -> None:
        self._source = source

    def save(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        """Write it to a file that appears complete or not at all; a name in ``.gz`` compresses it."""
        with atomic_text(path) as file:
            self._write(file, progress)

    def __str__(self) -> str:
        text = io.StringIO()
        self._write(text, None)
        return text.getvalue()

    def _write(self, file: IO[str], progress: Progress | None) -> None:
        if isinstance(self._source, Index):
            write(self._source, file, progress)
        else:
            write_ranks(self._source, file)


def write(index: Index, file: IO[str], progress: Progress | None = None) -> None:
    """Write the timeline as JSON."""
    EventWriter(index).write(file, progress or _no_progress)


class EventWriter:
    """Writes the trace events of one recording."""

    def __init__(self, index: Index, pid: int | None = None, order: int | None = None) -> None:
        """``pid`` and ``order`` are the number and the position of its process among others."""
        self._context = TableContext(index)
        self._data = index.raw
        pid = index.raw.info.get("pid") if pid is None else pid
        self._pid = pid if type(pid) is int and 0 < pid < 1 << 31 else 1
        self._order = order
        self._text = lru_cache(maxsize=_CACHED_TEXTS)(_text)
        self._source = lru_cache(maxsize=_CACHED_TEXTS)(self._source_args)
        self._op_bodies: dict[Any, str] = {}

    def write(self, file: IO[str], progress: Progress) -> None:
        """Write everything."""
        separator = ""
        file.write('{"traceEvents":[\n')
        for events in self.events(progress):
            file.write(separator + ",\n".join(events))
            separator = ",\n"
        info = self._data.info
        about = {"recorder": f"sightline {__version__}"}
        about |= {key: str(info[key]) for key in ("name", "ops", "torch", "python") if info.get(key)}
        file.write(f'\n],"displayTimeUnit":"ms","otherData":{json_text(about)}}}\n')

    def events(self, progress: Progress = _no_progress) -> Iterator[list[str]]:
        """All trace events, in chunks."""
        host, device = self._host, device_slices(self._data)
        step_spans, phase_spans = steps(self._context.index.step_infos), phases(self._data, host)
        yield self._metadata(host, device, step_spans, phase_spans)
        yield from self._spans("step", _STEPS, step_spans)
        yield from self._spans("phase", _PHASES, phase_spans)
        for first in range(0, len(host), _CHUNK):
            yield self._slices(host, first)
            progress(min(first + _CHUNK, len(host)), len(host))
        for first in range(0, len(device), _CHUNK):
            yield from self._device_work(device, first, host)
        yield from self._memory()
        if self._data.info.get("exception"):
            end, args = host.end.max(initial=0), json_text({"exception": str(self._data.info["exception"])})
            event = (
                f'{{"ph":"i","pid":{self._pid},"tid":{_THREAD},"ts":{_us(int(end))},"s":"p","name":"exception",'
                f'"cat":"exception","args":{args}}}'
            )
            yield [event]

    @cached_property
    def _host(self) -> Slices:
        return host_slices(self._data)

    @cached_property
    def _op_slices(self) -> d.I64:
        return self._host.op_slices(len(self._data.ops))

    def flow(self, op: int, kind: str, id: str) -> str:
        """A point of an arrow, at the slice of an op: ``s`` begins it, ``t`` is on its way, ``f`` ends it."""
        at = int(self._op_slices[op])
        thread, start = int(self._host.thread[at]), int(self._host.start[at])
        bound = ',"bp":"e"' if kind == "f" else ""
        return (
            f'{{"ph":"{kind}"{bound},"pid":{self._pid},"tid":{_THREAD + _track(thread)},"ts":{_us(start)},'
            f'"name":"collective","cat":"collective","id":{json_text(id)}}}'
        )

    # -- tracks ----------------------------------------------------------------------------------

    def _metadata(
        self, host: Slices, device: DeviceSlices, step_spans: list[TrackSpan], phase_spans: list[TrackSpan]
    ) -> list[str]:
        """The names of the process and the tracks, and the order of the tracks."""
        tracks = [(_STEPS + lane, "steps" if lane == 0 else f"steps ({lane + 1})")
                  for lane in sorted({span.lane for span in step_spans})]  # fmt: skip
        tracks += [(_PHASES + _track(lane), f"phases of thread {lane}" if lane else "phases")
                   for lane in sorted({span.lane for span in phase_spans})]  # fmt: skip
        tracks += [(_THREAD + _track(thread), f"thread {thread}" if thread else "main thread")
                   for thread in np.unique(host.thread).tolist()]  # fmt: skip
        tracks += [(_STREAMS + lane, f"{device_name(number)} stream {stream}")
                   for lane, (number, stream) in enumerate(device.streams)]  # fmt: skip
        name = str(self._data.info.get("name") or "recording")
        entries: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": name})]
        if self._order is not None:
            entries.append(("process_sort_index", 0, {"sort_index": self._order}))
        for order, (track, title) in enumerate(tracks):
            entries.append(("thread_name", track, {"name": title}))
            entries.append(("thread_sort_index", track, {"sort_index": order}))
        return [
            f'{{"ph":"M","pid":{self._pid},"tid":{track},"name":"{kind}","args":{json_text(args)}}}'
            for kind, track, args in entries
        ]

    def _spans(self, category: str, track: int, spans: list[TrackSpan]) -> Iterator[list[str]]:
        for first in range(0, len(spans), _CHUNK):
            yield [
                f'{{"ph":"X","pid":{self._pid},"tid":{track + _track(one.lane)},"ts":{_us(one.start)},'
                f'"dur":{_us(one.end - one.start)},"name":{_text(one.name)},"cat":"{category}",'
                f'"args":{{"ops":{one.ops}}}}}'
                for one in spans[first : first + _CHUNK]
            ]

    # -- module calls and ops --------------------------------------------------------------------

    def _slices(self, host: Slices, first: int) -> list[str]:
        """A chunk of the slices of module calls and ops."""
        rows = slice(first, first + _CHUNK)
        id, start, length = host.id[rows], host.start[rows], host.end[rows] - host.start[rows]
        is_call = host.kind[rows] == CALL
        bodies: list[str] = [""] * len(id)
        for mask, write_bodies in ((is_call, self._calls), (~is_call, self._ops)):
            chosen = np.flatnonzero(mask)
            for at, text in zip(chosen.tolist(), write_bodies(id[chosen], length[chosen]), strict=True):
                bodies[at] = text
        threads = host.thread[rows].tolist()
        timed = zip(threads, microseconds(start), microseconds(length), bodies, strict=True)
        head = f'{{"ph":"X","pid":{self._pid},"tid":'
        return [
            f'{head}{_THREAD + _track(thread)},"ts":{begin},"dur":{long},{body}}}'
            for thread, begin, long, body in timed
        ]

    def _calls(self, ids: d.I32, lengths: d.I64) -> Iterator[str]:
        calls = self._data.calls
        inputs = self._tensors(calls.input_offsets, calls.inputs, ids)
        outputs = self._tensors(calls.output_offsets, calls.outputs, ids)
        columns = (
            calls.module,
            calls.index,
            calls.phase,
            calls.duration,
            calls.flags,
            self._context.call_lines,
            _column(self._context.index.call_device_durations, len(calls)),
        )
        lists = (column[ids].tolist() for column in columns)
        rows = zip(ids.tolist(), lengths.tolist(), inputs, outputs, *lists, strict=True)
        for id, length, taken, returned, module, number, phase, took, flags, line, on_device in rows:
            info = self._data.modules[module]
            yield (
                f'"name":{self._text(info.label)},"cat":"module,{d.PHASES[phase]}","args":{{'
                f'"module_call":{id},"type":{self._text(info.type)},"number":{number},'
                f'"inputs":{self._text(taken)},"outputs":{self._text(returned)}{self._source(line)}'
                f"{_end_args(flags)}{_measured('host_us', took, length)}{_device_args(on_device)}}}"
            )

    def _ops(self, ids: d.I32, lengths: d.I64) -> Iterator[str]:
        context, ops, meta = self._context, self._data.ops, self._data.values.meta
        inputs, outputs = (
            lists.split(meta[lists.items].tolist())
            for lists in (
                Lists(ops.input_offsets, ops.inputs, ids),
                Lists(ops.output_offsets, ops.outputs, ids),
            )
        )
        shared = (ops.name, ops.form, ops.result, ops.level, ops.phase, ops.flops, ops.flags,
                 context.index.op_modules, context.op_lines)  # fmt: skip
        keys = zip(*(column[ids].tolist() for column in shared), strict=True)
        device_times = _column(context.index.device_durations, len(ops))[ids].tolist()
        rows = zip(ids.tolist(), lengths.tolist(), ops.duration[ids].tolist(), device_times,
                   ops.forward[ids].tolist(), keys, inputs, outputs, strict=True)  # fmt: skip
        cache = self._op_bodies  # the part of the event that equal ops share
        for id, length, took, on_device, forward, key, taken, returned in rows:
            tensors = (tuple(taken), tuple(returned))
            body = cache.get((key, tensors))
            if body is None:
                if len(cache) >= _CACHED_TEXTS:
                    cache.clear()
                name, form, result, level, phase, flops, flags, module, line = key
                text = context.op_text(name, form, result, *tensors)
                inside = f',"module":{self._text(context.labels[module])}' if module >= 0 else ""
                counted = f',"flops":{flops}' if flops >= 0 else ""
                body = cache[key, tensors] = (
                    f'"name":{self._text(self._data.names[name])},"cat":"{d.LEVELS[level]},{d.PHASES[phase]}",'
                    f'"args":{{"call":{self._text(text)}{inside}{self._source(line)}{counted}{_end_args(flags)},'
                )
            backward = f',"forward":{forward}' if forward >= 0 else ""
            yield f'{body}"op":{id}{backward}{_measured("host_us", took, length)}{_device_args(on_device)}}}'

    def _tensors(self, offsets: d.I64, flat: d.I32, ids: d.I32) -> Iterator[str]:
        lists = Lists(offsets, flat, ids)
        texts = self._context.metas[self._data.values.meta[lists.items]].tolist()
        return map(", ".join, lists.split(texts))

    def _source_args(self, frame: int) -> str:
        """The arguments with the source line; empty without one."""
        context = self._context
        if frame < 0:
            return ""
        file, line = context.files[frame], context.lines[frame]
        function = context.functions[frame][:_LONGEST]
        source = {"source": position_text(file[-_LONGEST:], line), "function": function,
                 "code": context.code[frame][:_SOURCE_LINE]}  # fmt: skip
        return "," + json_text(source)[1:-1]

    # -- devices -----------------------------------------------------------------------------------

    def _device_work(self, device: DeviceSlices, first: int, host: Slices) -> Iterator[list[str]]:
        """A chunk of the work of devices, and the arrows to it from the slices of ops."""
        rows, work = slice(first, first + _CHUNK), self._data.device_work
        id, lane, start = device.id[rows], device.lane[rows], device.start[rows]
        length = device.end[rows] - start
        owner = self._context.index.device_work_ops[id]
        names, kinds = self._context.names[work.name[id]].tolist(), work.kind[id].tolist()
        columns = zip(id.tolist(), lane.tolist(), microseconds(start), microseconds(length), names, kinds,
                      owner.tolist(), work.duration[id].tolist(), length.tolist(), strict=True)  # fmt: skip
        yield [
            f'{{"ph":"X","pid":{self._pid},"tid":{_STREAMS + track},"ts":{begin},"dur":{long},'
            f'"name":{self._text(name)},"cat":"device,{d.WORK_KINDS[kind]}","args":{{"device_work":{one}'
            + (f',"op":{op}' if op >= 0 else "") + (_measured("device_us", took, shown)) + "}}"
            for one, track, begin, long, name, kind, op, took, shown in columns
        ]  # fmt: skip
        owned = np.flatnonzero(owner >= 0)
        at = self._op_slices[owner[owned]]
        # An arrow must begin before the end of its slice: Perfetto binds it to the slice open at its time.
        launch = np.clip(
            clock(work.launch[id[owned]]), host.start[at], np.maximum(host.end[at] - 1, host.start[at])
        )
        arrows = zip(id[owned].tolist(), microseconds(launch), host.thread[at].tolist(),
                     microseconds(start[owned]), lane[owned].tolist(), strict=True)  # fmt: skip
        head = f'{{"pid":{self._pid},"name":"launch","cat":"launch","id":'
        events = [
            event
            for one, leaves, thread, arrives, to in arrows
            for event in (
                f'{head}{one},"ph":"s","tid":{_THREAD + _track(thread)},"ts":{leaves}}}',
                f'{head}{one},"ph":"f","bp":"e","tid":{_STREAMS + to},"ts":{arrives}}}',
            )
        ]
        if events:
            yield events

    # -- memory and the end ----------------------------------------------------------------------

    def _memory(self) -> Iterator[list[str]]:
        """Bytes in use on each device, in total and by use, whenever that changes."""
        for level in memory_levels(self._data):
            name = json_text(f"memory {level.device}")
            uses = [use for use in range(len(USES)) if level.bytes[:, use].any()]
            head = f'{{"ph":"C","pid":{self._pid},"tid":0,"name":{name},"ts":'
            for first in range(0, len(level.times), _CHUNK):
                rows = slice(first, first + _CHUNK)
                total = level.bytes[rows].sum(axis=1).tolist()
                parts = [(USES[use], level.bytes[rows, use].tolist()) for use in uses]
                yield [
                    f'{head}{time},"args":{{"total":{total[at]}'
                    + "".join(f',"{use}":{held[at]}' for use, held in parts)
                    + "}}"
                    for at, time in enumerate(microseconds(level.times[rows]))
                ]


def microseconds(times: d.I64) -> list[str]:
    """Nanoseconds as microseconds that give the same nanoseconds again, by rounding or by truncating.

    Some versions of Perfetto multiply by 1000 and truncate. A result one too small would make a slice stick
    out of the one around it, and be dropped: in that case the next larger number is written.

    >>> microseconds(np.array([1_234_567, 5, 1001]))
    ['1234.567', '0.005', '1.0010000000000001']
    """
    numbers = times / 1000
    texts = [f"{number:.3f}" for number in numbers.tolist()]
    larger = np.nextafter(numbers, np.inf)
    short = (numbers * 1000).astype(np.int64) != times
    fixable = short & (np.rint(larger * 1000) == times)  # not all are after a week
    for at in np.flatnonzero(fixable).tolist():
        texts[at] = repr(float(larger[at]))
    return texts


def _text(text: str) -> str:
    return json_text(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def _us(nanoseconds: int) -> str:
    return microseconds(np.array([nanoseconds]))[0]


def _measured(name: str, took: int, shown: int) -> str:
    """The measured time, if the slice is longer or shorter so that it nests."""
    return "" if took == shown else f',"{name}":{took / 1000:.3f}'


def _column(times: d.I64 | None, count: int) -> d.I64:
    return np.full(count, -1, dtype=np.int64) if times is None else times


def _device_args(on_device: int) -> str:
    """Device time, if it is known and not 0."""
    return f',"device_us":{on_device / 1000:.3f}' if on_device > 0 else ""


def _track(lane: int) -> int:
    """A thread's number as part of a track id; in a damaged file it may be negative."""
    return lane & 0xFF


def _end_args(flags: int) -> str:
    raised = ',"raised":true' if flags & d.RAISED else ""
    return raised + (',"unfinished":true' if flags & d.UNFINISHED else "")


def write_ranks(run: Run, file: IO[str]) -> None:
    """Write all ranks of a job as JSON, one read after the other."""
    waiting = Waiting.of(run)
    arrows = [(table, waiting.times(table, "start")) for table in waiting.tables]
    file.write('{"traceEvents":[\n')
    separator = ""
    for rank, record in run.records.items():
        data = load(record.path)
        writer = EventWriter(Index(shifted(data, waiting.offsets[rank])), pid=rank + 1, order=rank)
        for events in (*writer.events(), *_arrows(writer, run, rank, arrows)):
            if events:
                file.write(separator + ",\n".join(events))
                separator = ",\n"
        data.close()
    about = {"recorder": f"sightline {__version__}", "ranks": str(len(run.records))}
    file.write(f'\n],"displayTimeUnit":"ms","otherData":{json_text(about)}}}\n')


def shifted(data: TraceData, ns: int) -> TraceData:
    """The recording with all times later by ``ns``."""
    ops, calls, work, memory = data.ops, data.calls, data.device_work, data.allocations
    return replace(
        data,
        ops=replace(ops, start=ops.start + ns),
        calls=replace(calls, start=calls.start + ns),
        device_work=replace(work, launch=work.launch + ns, start=work.start + ns),
        allocations=replace(
            memory, start=memory.start + ns, end=np.where(memory.end >= 0, memory.end + ns, memory.end)
        ),
        steps=[replace(step, start=step.start + ns) for step in data.steps],
    )


def _arrows(
    writer: EventWriter, run: Run, rank: int, arrows: list[tuple[GroupTable, NDArray[np.float64]]]
) -> Iterator[list[str]]:
    """The points of this rank on the arrows through collectives that another rank ran too."""
    for number, (table, times) in enumerate(arrows):
        calls = run.records[rank].groups.get(table.group)
        if calls is None or rank not in table.ranks:
            continue
        row = table.ranks.index(rank)
        cells, own = table.cells(row, calls)
        columns = np.arange(cells.start, cells.stop)
        common = (~np.isnan(times[:, columns])).sum(axis=0) > 1
        first = np.nanargmin(times[:, columns], axis=0) == row
        last = np.nanargmax(times[:, columns], axis=0) == row
        yield [
            writer.flow(int(op), "s" if begins else "f" if ends else "t", f"{number}.{column}")
            for op, column, is_common, begins, ends in zip(
                calls.op[own].tolist(), columns.tolist(), common.tolist(), first.tolist(), last.tolist(),
                strict=True,
            )
            if is_common
        ]  # fmt: skip
