"""``t.memory()``: the peak of a run's memory, the tensors that hold it, and the curve over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from sightline.analysis.memory import MemoryUsage, Share, usage_of
from sightline.analysis.op_text import api_call_of, backward_suffix, short_name, with_location
from sightline.data.index import Index
from sightline.data.not_recorded import other_threads
from sightline.data.trace_data import I64, PHASES, TraceData
from sightline.data.user_frames import user_frame
from sightline.errors import NothingMatched
from sightline.hints import Hint
from sightline.notation import bytes_text, time_text
from sightline.views.rendering import (
    MARGIN,
    WIDTH,
    Block,
    Cell,
    Column,
    Line,
    Span,
    View,
    comment_lines,
    fact_line,
    fact_lines,
    grid,
    line,
)
from sightline.views.table_layout import fit_blocks

_HEIGHT: Final = 6  #: lines of the plot
_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_BAR: Final = 16
_ROWS: Final = 8  #: of the tables by module and by line
_LARGEST: Final = 10
_Row = list[str | Cell | tuple[str, str]]


def memory(
    index: Index, module: str | None = None, phase: str | None = None, depth: int | None = None
) -> View:
    """The memory of a run; ``module`` and ``phase`` select, ``depth`` limits the names of modules."""
    usages = usage_of(index, module, phase, depth)
    if not usages or not any(usage.peak.nbytes for usage in usages):
        if module is not None:
            raise NothingMatched(f"{Hint.option('module', module)} holds no memory in this trace.")
        empty = line(("memory  ", "dim"), "no tensor was recorded that holds memory")
        return View((empty, *comment_lines([other_threads(index.raw)])))
    first = usages[0]

    def fit(room: int) -> list[Block]:
        room = min(room, WIDTH)
        blocks: list[Block] = [*_head(usages, module), line(), *_plot(first, room), line(), _kinds(first)]
        for title, shares in (("module", first.by_module(depth)), ("line", first.by_line())):
            blocks += [line(), _table(title, shares, first.peak.nbytes)]
        blocks += [line(), _tensors(first), line()]
        for title, parts in _notes(usages, index.raw):
            blocks += fact_lines(title, parts, MARGIN, room)
        return blocks

    return View(tuple(fit_blocks(fit(WIDTH), WIDTH)), fit=fit)


def _head(usages: Sequence[MemoryUsage], module: str | None) -> Iterator[Line]:
    """The peak of the first device, with the op that ran then; a line for each other device."""
    usage, *others = usages
    peak, op = usage.peak, usage.peak_op
    device = "" if usage.device == "cpu" else f" on {usage.device}"
    of = f" of {module!r}" if module is not None else ""
    parts: list[str | Span | tuple[str, str]] = [
        (f"peak {bytes_text(peak.nbytes)}", "title"), f"{of}{device}",
        (f"  at {time_text(peak.moment)} of {time_text(usage.held.over)}", "dim"),
    ]  # fmt: skip
    if op is None:
        parts.append(" · held before the block")
    else:
        call = api_call_of(op)
        name = short_name(call) + backward_suffix(call)
        parts += [f" · in {op.phase}, ", (with_location(name, call), "op")]
    yield fact_line("memory", *parts)
    for other in others:
        if other.peak.nbytes:
            text = (
                f"on {other.device}: peak {bytes_text(other.peak.nbytes)} at {time_text(other.peak.moment)}"
            )
            yield line((f"{'':<{MARGIN}}{text}", "dim"))


def _plot(usage: MemoryUsage, room: int) -> Iterator[Line]:
    columns = max(room - MARGIN - 2, 10)
    maxima, duration = usage.curve(columns)
    top = max(int(maxima.max(initial=0)), 1)
    heights = np.ceil(maxima * (_HEIGHT * 8) / top).astype(np.int64)
    for row in reversed(range(_HEIGHT)):
        label = bytes_text(top * (row + 1) / _HEIGHT) if row in (_HEIGHT - 1, _HEIGHT // 2 - 1) else ""
        cells = "".join(_LEVELS[min(max(height - 8 * row, 0), 8)] for height in heights.tolist())
        yield line((f"{label:>{MARGIN - 1}} │", "dim"), (cells.rstrip(), "number"))
    yield line((f"{'0':>{MARGIN - 1}} └{_phases(usage, columns, duration)}", "dim"))


def _phases(usage: MemoryUsage, columns: int, duration: int) -> str:
    """The time axis, with the names of the phases along it."""
    ops = usage.index.raw.ops
    order = np.argsort(ops.start, kind="stable")
    starts: I64 = ops.start[order]
    middles = (np.arange(columns) + 0.5) * duration / columns
    positions = np.searchsorted(starts, middles, side="right") - 1
    phases = [-1 if each < 0 else int(ops.phase[order[each]]) for each in positions.tolist()]
    text = ""
    while len(text) < columns:
        phase = phases[len(text)]
        end = next((to for to in range(len(text), columns) if phases[to] != phase), columns)
        room = end - len(text)
        name = PHASES[phase] if phase >= 0 else ""
        name = name if len(name) < room else ""
        text += name + "─" * (room - len(name) - 1) + ("┴" if end < columns else "─")
    return text


def _amount(nbytes: int, whole: int) -> tuple[str, str]:
    return bytes_text(nbytes), f"{nbytes / max(whole, 1):.0%}"


def _kinds(usage: MemoryUsage) -> Block:
    whole = usage.peak.nbytes
    rows: list[_Row] = []
    for share in usage.by_kind():
        bar = "▇" * round(_BAR * share.nbytes / max(whole, 1))
        rows.append([share.name, *_amount(share.nbytes, whole), f"{share.count:,}", (bar, "number")])
    columns = [Column("at the peak, by kind"), Column("bytes", right=True), Column("", right=True),
               Column("tensors", right=True), Column("")]  # fmt: skip
    return grid(columns, rows)


def _table(title: str, shares: list[Share], whole: int) -> Block:
    shown, rest = shares[:_ROWS], shares[_ROWS:]
    style = "module" if title == "module" else "op"
    rows: list[_Row] = [
        [(share.name, style), *_amount(share.nbytes, whole), f"{share.count:,}"] for share in shown
    ]
    if rest:
        left = sum(share.nbytes for share in rest)
        count = sum(share.count for share in rest)
        rows.append([(f"{len(rest):,} more", "dim"), *_amount(left, whole), f"{count:,}"])
    columns = [Column(f"by {title}", least=24, end=True), Column("bytes", right=True),
               Column("", right=True), Column("tensors", right=True)]  # fmt: skip
    return grid(columns, rows)


def _tensors(usage: MemoryUsage) -> Block:
    """The largest tensors at the peak, with the op that produced them and the reason they are kept."""
    rows: list[_Row] = []
    for tensor in usage.largest(_LARGEST):
        value = tensor.value
        op = None if value is None else value.producer
        name, module, position = tensor.name or ("" if value is None else value.kind), "", ""
        if op is not None and (not tensor.name or tensor.use == "other"):
            call, frame = api_call_of(op), user_frame(op)
            name = short_name(call) + backward_suffix(call)
            module = "" if call.module is None else call.module.label
            position = "" if frame is None else frame.position
        kept = tensor.why if tensor.for_op is None else f"{tensor.why} {short_name(tensor.for_op)}"
        if tensor.use in ("parameters", "buffers", "gradients", "optimizer state"):
            kept = tensor.use.removesuffix("s")
        shape = "evicted" if value is None else str(value)
        rows.append([bytes_text(tensor.nbytes), (shape, "shape"), (name, "op"), (module, "module"),
                     (position, "dim"), (kept, "dim")])  # fmt: skip
    columns = [Column("largest", right=True), Column("tensor", least=12), Column("made by", least=16),
               Column("module", least=10, end=True), Column("line", least=16, end=True),
               Column("kept", least=16)]  # fmt: skip
    return grid(columns, rows)


def _notes(usages: Sequence[MemoryUsage], data: TraceData) -> Iterator[tuple[str, list[str]]]:
    """The figures of the devices' allocators for the same run, and the limits of the view."""
    info = data.info
    allocators = info.get("allocator")
    known = {usage.device: usage for usage in usages}
    for device, numbers in sorted(allocators.items()) if isinstance(allocators, dict) else ():
        (before, after), (_, reserved), (most_before, most) = (
            numbers[name] for name in ("allocated", "reserved", "most")
        )
        parts = [f"{device} allocated {bytes_text(before)} before, {bytes_text(after)} after"]
        parts.append(f"reserved {bytes_text(reserved)}")
        usage = known.get(device)
        if most > most_before:
            parts.append(f"most {bytes_text(most)}")
            unseen = max(before - usage.held_before(), 0) if usage is not None else 0
            if usage is not None and most:
                ours = usage.peak.nbytes + unseen
                also = f" with {bytes_text(unseen)} of others" if unseen else ""
                parts.append(f"seen here {bytes_text(ours)}{also}, {ours / most - 1:+.1%}")
        else:
            parts.append(f"most {bytes_text(most)}, before the block")
        yield "allocator", parts
    if not usages[0].exact:
        yield "note", ["this recording does not say when storages were freed: each counts until its last use"]
    if info.get("ops") == "none":
        option = Hint('ops="none"', "--ops none")
        yield "note", [f"with {option} only inputs and outputs of modules are seen"]
    if elsewhere := other_threads(data):
        yield "note", [elsewhere]
    if info.get("last"):
        yield "note", [f"memory freed before the last {info['last']:,} ops is unknown"]
    counted = ["storages of recorded tensors, until torch frees them" if usages[0].exact else "storages"]
    yield "counted", [*counted, "without the workspaces of ops"]
