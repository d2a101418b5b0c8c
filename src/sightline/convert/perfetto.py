"""The recording as a timeline for Perfetto and chrome://tracing: trace events, written as they are made.

Tracks, top to bottom: the steps, the phases, and for each thread module calls with the API calls in them and
the aten ops in those; then each stream of each device with what it ran, an arrow leading there from the op
that asked for it (``time="device"``). A counter shows the bytes in use on each device. Times are microseconds
with the nanoseconds behind the point, so that nothing is rounded and slices nest as they did.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import IO, Any, Final

import numpy as np

from sightline._version import __version__
from sightline.analysis.device_use import device_name
from sightline.analysis.lifetimes import USES, clock, memory_levels
from sightline.convert.atomic_files import whole_text
from sightline.convert.context import Lists, TableContext
from sightline.convert.encoding import json_text
from sightline.convert.timeline import (
    CALL,
    DeviceSlices,
    Slices,
    Stretch,
    device_slices,
    phases,
    slices,
    steps,
)
from sightline.notation import position_text
from sightline.trace import data as d
from sightline.trace.index import Index

Progress = Callable[[int, int], None]

_CHUNK: Final = 1 << 12  #: slices that are written together
_THREAD, _PHASES, _STEPS = 1, 1000, 2000  #: track ids: each thread, its phases, and the lanes of steps
_STREAMS: Final = 1 << 20  #: and the streams of devices, in order
_KEPT: Final = 1 << 13  #: texts that are remembered, of each kind
_SOURCE_LINE: Final = 300  #: characters of a source line
_LONGEST: Final = 2000  #: characters of any other text: slices of a chunk are in memory together


def _silent(_done: int, _total: int) -> None:
    """Nobody watches."""


def to_perfetto(index: Index, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Write the timeline to a file that is there whole or not at all; ``.gz`` compresses it."""
    with whole_text(path) as file:
        write(index, file, progress)


def write(index: Index, file: IO[str], progress: Progress | None = None) -> None:
    """Write the timeline as JSON."""
    EventWriter(index).write(file, progress or _silent)


class EventWriter:
    """One timeline in the making."""

    def __init__(self, index: Index) -> None:
        self._context = TableContext(index)
        self._data = index.raw
        pid = index.raw.info.get("pid")
        self._pid = pid if type(pid) is int and 0 < pid < 1 << 31 else 1
        self._text = lru_cache(maxsize=_KEPT)(_text)
        self._source = lru_cache(maxsize=_KEPT)(self._source_args)
        self._alike: dict[Any, str] = {}

    def write(self, file: IO[str], progress: Progress) -> None:
        """Write everything."""
        data = self._data
        made = slices(data)
        on_device = device_slices(data)
        named, stages = steps(self._context.index.step_infos), phases(data, made)
        separator = ""
        file.write('{"traceEvents":[\n')
        for events in self._parts(made, on_device, named, stages, progress):
            file.write(separator + ",\n".join(events))
            separator = ",\n"
        about = {"recorder": f"sightline {__version__}", **self._about()}
        file.write(f'\n],"displayTimeUnit":"ms","otherData":{json_text(about)}}}\n')

    def _about(self) -> dict[str, str]:
        info = self._data.info
        return {key: str(info[key]) for key in ("name", "ops", "torch", "python") if info.get(key)}

    def _parts(
        self, made: Slices, on_device: DeviceSlices, named: list[Stretch], stages: list[Stretch],
        progress: Progress,
    ) -> Iterator[list[str]]:  # fmt: skip
        yield self._metadata(made, on_device, named, stages)
        yield from self._stretches("step", _STEPS, named)
        yield from self._stretches("phase", _PHASES, stages)
        for first in range(0, len(made), _CHUNK):
            yield self._slices(made, first)
            progress(min(first + _CHUNK, len(made)), len(made))
        if len(on_device):
            where = made.places_of_ops(len(self._data.ops))
            for first in range(0, len(on_device), _CHUNK):
                yield from self._device_work(on_device, first, made, where)
        yield from self._memory()
        if self._data.info.get("exception"):
            yield [self._exception(int(made.end.max(initial=0)))]

    # -- tracks ----------------------------------------------------------------------------------

    def _metadata(
        self, made: Slices, on_device: DeviceSlices, named: list[Stretch], stages: list[Stretch]
    ) -> list[str]:
        """What the process and the tracks are called, and in which order they stand."""
        tracks = [(_STEPS + lane, "steps" if lane == 0 else f"steps ({lane + 1})")
                  for lane in sorted({step.lane for step in named})]  # fmt: skip
        tracks += [(_PHASES + _track(lane), f"phases of thread {lane}" if lane else "phases")
                   for lane in sorted({stage.lane for stage in stages})]  # fmt: skip
        tracks += [(_THREAD + _track(thread), f"thread {thread}" if thread else "main thread")
                   for thread in np.unique(made.thread).tolist()]  # fmt: skip
        tracks += [(_STREAMS + lane, f"{device_name(device)} stream {stream}")
                   for lane, (device, stream) in enumerate(on_device.streams)]  # fmt: skip
        name = str(self._data.info.get("name") or "recording")
        events = [self._named("process_name", 0, name=name)]
        for order, (track, title) in enumerate(tracks):
            events.append(self._named("thread_name", track, name=title))
            events.append(self._named("thread_sort_index", track, sort_index=order))
        return events

    def _named(self, what: str, track: int, **args: Any) -> str:
        return f'{{"ph":"M","pid":{self._pid},"tid":{track},"name":"{what}","args":{json_text(args)}}}'

    def _stretches(self, what: str, track: int, stretches: list[Stretch]) -> Iterator[list[str]]:
        for first in range(0, len(stretches), _CHUNK):
            yield [
                f'{{"ph":"X","pid":{self._pid},"tid":{track + _track(one.lane)},"ts":{_us(one.start)},'
                f'"dur":{_us(one.end - one.start)},"name":{_text(one.name)},"cat":"{what}",'
                f'"args":{{"ops":{one.ops}}}}}'
                for one in stretches[first : first + _CHUNK]
            ]

    # -- module calls and ops --------------------------------------------------------------------

    def _slices(self, made: Slices, first: int) -> list[str]:
        rows = slice(first, first + _CHUNK)
        id, start, lasted = made.id[rows], made.start[rows], made.end[rows] - made.start[rows]
        is_call = made.kind[rows] == CALL
        bodies: list[str] = [""] * len(id)
        for which, written in ((is_call, self._calls), (~is_call, self._ops)):
            places = np.flatnonzero(which)
            for at, text in zip(places.tolist(), written(id[places], lasted[places]), strict=True):
                bodies[at] = text
        threads = made.thread[rows].tolist()
        timed = zip(threads, microseconds(start), microseconds(lasted), bodies, strict=True)
        head = f'{{"ph":"X","pid":{self._pid},"tid":'
        return [
            f'{head}{_THREAD + _track(thread)},"ts":{begin},"dur":{long},{body}}}'
            for thread, begin, long, body in timed
        ]

    def _calls(self, ids: d.I32, lasted: d.I64) -> Iterator[str]:
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
        own = (column[ids].tolist() for column in columns)
        listed = zip(ids.tolist(), lasted.tolist(), inputs, outputs, *own, strict=True)
        for id, shown, given, made, module, number, phase, took, flags, line, on_device in listed:
            info = self._data.modules[module]
            yield (
                f'"name":{self._text(info.label)},"cat":"module,{d.PHASES[phase]}","args":{{'
                f'"module_call":{id},"type":{self._text(info.type)},"number":{number},'
                f'"inputs":{self._text(given)},"outputs":{self._text(made)}{self._source(line)}'
                f"{_ended(flags)}{_measured('host_us', took, shown)}{_spent(on_device)}}}"
            )

    def _ops(self, ids: d.I32, lasted: d.I64) -> Iterator[str]:
        context, ops, meta = self._context, self._data.ops, self._data.values.meta
        given, made = Lists(ops.input_offsets, ops.inputs, ids), Lists(ops.output_offsets, ops.outputs, ids)
        inputs, outputs = meta[given.items].tolist(), meta[made.items].tolist()
        i, o = given.bounds, made.bounds
        alike = (ops.name, ops.form, ops.result, ops.level, ops.phase, ops.flops, ops.flags,
                 context.index.op_modules, context.op_lines)  # fmt: skip
        keys = zip(*(column[ids].tolist() for column in alike), strict=True)
        spent = _column(context.index.device_durations, len(ops))[ids].tolist()
        own = zip(ids.tolist(), lasted.tolist(), ops.duration[ids].tolist(), spent,
                  ops.forward[ids].tolist(), keys, strict=True)  # fmt: skip
        known = self._alike
        for at, (id, shown, took, on_device, forward, key) in enumerate(own):
            tensors = (*inputs[i[at] : i[at + 1]], -1, *outputs[o[at] : o[at + 1]])
            body = known.get((key, tensors))
            if body is None:
                if len(known) >= _KEPT:
                    known.clear()
                body = known[key, tensors] = self._op(key, tensors)
            backward = f',"forward":{forward}' if forward >= 0 else ""
            yield f'{body}"op":{id}{backward}{_measured("host_us", took, shown)}{_spent(on_device)}}}'

    def _op(self, key: tuple[int, ...], tensors: tuple[int, ...]) -> str:
        """What ops that look alike have in common, up to what each has of its own."""
        name, form, result, level, phase, flops, flags, module, line = key
        split = tensors.index(-1)
        text = self._context.op_text(name, form, result, tensors[:split], tensors[split + 1 :])
        inside = f',"module":{self._text(self._context.labels[module])}' if module >= 0 else ""
        counted = f',"flops":{flops}' if flops >= 0 else ""
        return (
            f'"name":{self._text(self._data.names[name])},"cat":"{d.LEVELS[level]},{d.PHASES[phase]}","args":{{'
            f'"call":{self._text(text)}{inside}{self._source(line)}{counted}{_ended(flags)},'
        )

    def _tensors(self, offsets: d.I64, flat: d.I32, ids: d.I32) -> Iterator[str]:
        lists = Lists(offsets, flat, ids)
        texts = self._context.metas[self._data.values.meta[lists.items]].tolist()
        return map(", ".join, lists.split(texts))

    def _source_args(self, frame: int) -> str:
        """The arguments that say where something is written; none for what has no line."""
        context = self._context
        if frame < 0:
            return ""
        file, line = context.files[frame], context.lines[frame]
        function = context.functions[frame][:_LONGEST]
        place = {"source": position_text(file[-_LONGEST:], line), "function": function,
                 "code": context.code[frame][:_SOURCE_LINE]}  # fmt: skip
        return "," + json_text(place)[1:-1]

    # -- devices -----------------------------------------------------------------------------------

    def _device_work(self, made: DeviceSlices, first: int, ops: Slices, where: d.I64) -> Iterator[list[str]]:
        """What devices ran, and the arrows that lead there from the slices of ops; ``where`` those are."""
        rows, work = slice(first, first + _CHUNK), self._data.device_work
        id, lane, start = made.id[rows], made.lane[rows], made.start[rows]
        lasted = made.end[rows] - start
        owner = self._context.index.device_work_ops[id]
        names, kinds = self._context.names[work.name[id]].tolist(), work.kind[id].tolist()
        listed = zip(id.tolist(), lane.tolist(), microseconds(start), microseconds(lasted), names, kinds,
                     owner.tolist(), work.duration[id].tolist(), lasted.tolist(), strict=True)  # fmt: skip
        yield [
            f'{{"ph":"X","pid":{self._pid},"tid":{_STREAMS + track},"ts":{begin},"dur":{long},'
            f'"name":{self._text(name)},"cat":"device,{d.WORK_KINDS[kind]}","args":{{"device_work":{one}'
            + (f',"op":{op}' if op >= 0 else "") + (_measured("device_us", took, shown)) + "}}"
            for one, track, begin, long, name, kind, op, took, shown in listed
        ]  # fmt: skip
        asked = np.flatnonzero(owner >= 0)
        at = where[owner[asked]]
        # An arrow begins in the slice that is open at its time: not where that one ends.
        left = np.clip(
            clock(work.launch[id[asked]]), ops.start[at], np.maximum(ops.end[at] - 1, ops.start[at])
        )
        arrows = zip(id[asked].tolist(), microseconds(left), ops.thread[at].tolist(),
                     microseconds(start[asked]), lane[asked].tolist(), strict=True)  # fmt: skip
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
        """Bytes in use on each device: all, and for what, at each moment that changes."""
        for level in memory_levels(self._data):
            name = json_text(f"memory {level.device}")
            used = [use for use in range(len(USES)) if level.bytes[:, use].any()]
            head = f'{{"ph":"C","pid":{self._pid},"tid":0,"name":{name},"ts":'
            for first in range(0, len(level.times), _CHUNK):
                rows = slice(first, first + _CHUNK)
                total = level.bytes[rows].sum(axis=1).tolist()
                parts = [(USES[use], level.bytes[rows, use].tolist()) for use in used]
                yield [
                    f'{head}{time},"args":{{"total":{total[at]}'
                    + "".join(f',"{use}":{held[at]}' for use, held in parts)
                    + "}}"
                    for at, time in enumerate(microseconds(level.times[rows]))
                ]

    def _exception(self, when: int) -> str:
        said = json_text({"exception": str(self._data.info["exception"])})
        return (
            f'{{"ph":"i","pid":{self._pid},"tid":{_THREAD},"ts":{_us(when)},"s":"p","name":"exception",'
            f'"cat":"exception","args":{said}}}'
        )


def microseconds(times: d.I64) -> list[str]:
    """Nanoseconds as microseconds, which a reader turns into the same nanoseconds, by rounding or cutting.

    Some versions of Perfetto multiply by 1000 and cut: a hair too little, and a slice sticks out of the one
    it is in, and is dropped. Where that would happen, the next larger number is written.

    >>> microseconds(np.array([1_234_567, 5, 1001]))
    ['1234.567', '0.005', '1.0010000000000001']
    """
    numbers = times / 1000
    texts = [f"{number:.3f}" for number in numbers.tolist()]
    larger = np.nextafter(numbers, np.inf)
    short = (numbers * 1000).astype(np.int64) != times
    for at in np.flatnonzero(
        short & (np.rint(larger * 1000) == times)
    ).tolist():  # after a week it may not help
        texts[at] = repr(float(larger[at]))
    return texts


def _text(text: str) -> str:
    return json_text(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def _us(nanoseconds: int) -> str:
    return microseconds(np.array([nanoseconds]))[0]


def _measured(name: str, took: int, shown: int) -> str:
    """The time that was measured, where the slice had to be longer, or shorter, for its neighbours."""
    return "" if took == shown else f',"{name}":{took / 1000:.3f}'


def _column(times: d.I64 | None, count: int) -> d.I64:
    return np.full(count, -1, dtype=np.int64) if times is None else times


def _spent(on_device: int) -> str:
    """What devices spent, where that is known and anything."""
    return f',"device_us":{on_device / 1000:.3f}' if on_device > 0 else ""


def _track(lane: int) -> int:
    """A thread's number as part of a track id: a damaged file may have a negative one."""
    return lane & 0xFF


def _ended(flags: int) -> str:
    raised = ',"raised":true' if flags & d.RAISED else ""
    return raised + (',"unfinished":true' if flags & d.UNFINISHED else "")
