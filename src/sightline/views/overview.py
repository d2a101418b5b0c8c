"""``print(t)``: what a trace holds, on one screen.

What was recorded and how, whether anything went wrong, where the time went by module and by line, and which
views show more. All shares are of one total, the host time of the modules, of the ops outside them and of the
optimizer, which has its own line. Where the time of devices was taken, it is that which shares are of, and
host time stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.analysis.cost import (
    Costs,
    compiled_text,
    cost_of,
    is_opaque,
    leaf_ops,
    uncounted,
    uncounted_text,
)
from sightline.analysis.device_use import DeviceUse, device_use
from sightline.analysis.problems import CUT_SHORT, Severity, find
from sightline.analysis.scopes import OUTSIDE
from sightline.analysis.select import Mask
from sightline.analysis.steps import step_summaries
from sightline.analysis.unmatched import left_out_text, unmatched
from sightline.notation import bytes_text, count_text, time_text
from sightline.trace.data import I64, KINDS, LEVELS, PHASES, TraceData
from sightline.trace.dtypes import nbytes_of
from sightline.trace.index import Index
from sightline.views.layout import grid_width
from sightline.views.outline import (
    Block,
    Cell,
    Column,
    Grid,
    Line,
    Span,
    View,
    column_widths,
    cut,
    grid,
    line,
    width,
    wrapped,
)
from sightline.views.shapes import Exchanges, key
from sightline.views.statistics_text import WRONG
from sightline.views.steps import step_table, steps_told

if TYPE_CHECKING:
    from sightline.api import Trace

_MODULE_ROWS: Final = 14
_LINE_ROWS: Final = 5
_NAME_WIDTH, _SHAPE_WIDTH, _PLACE_WIDTH, _CODE_WIDTH = 32, 38, 34, 36
_LEAST_SHAPES: Final = 18  #: where there is little room
_BAR: Final = 10
_FAULTS: Final = 3
_SEVERE: Final = {Severity.ERROR: "error", Severity.WARNING: "warn"}
_MARGIN: Final = 10  #: columns for the titles of facts
_WIDTH: Final = 100  #: columns of the text; on a terminal there may be fewer
_MANY_OPS: Final = 100_000  #: in a longer run, looking for problems takes too long for a first look
_NOT_CALLED: Final = "none was called, as module(…), on the thread that started the recording"
_COMPILED: Final = 'compiled code runs without calling any; compiled="eager" shows them'
_VIEWS: Final = "t.code()  t.log()  t.call_order()  t.summary()  t.memory()  t.source()  t.problems()"


def overview(trace: Trace, more: str = _VIEWS) -> View:
    """One screen about a trace; ``more`` says which views there are, as they are asked for where it is."""
    data = trace.data
    costs, use = cost_of(data, trace.index.device_own), device_use(trace.index)
    whole = _Time.of(costs, use)
    steps = step_summaries(trace.index)
    facts = [
        *_head(data),
        *_counts(data),
        *steps_told(steps),
        *_taken(data),
        *whole.told(),
        *_uncounted(data, costs),
    ]
    facts += [*_trouble(data), *_unmatched(data), *_problems(trace)]
    stepped = step_table(steps)
    modules = _modules(trace, costs, whole)
    heaviest = _heaviest(trace, whole)

    def made(room: int) -> list[Block]:
        room = min(room, _WIDTH)
        tables = [table(room) for table in (modules, heaviest) if table is not None]
        texts = [span.text for table in tables[:1] for row in table.rows for span in _spans(row)]
        told = wrapped("key", key(texts if modules else []), _MARGIN, room)
        every = [*([stepped] if stepped is not None else []), *tables]
        set_off = [block for table in every for block in (line(), table)]
        return [*facts, *set_off, line(), *told, _fact("more", more)]

    return View(tuple(made(_WIDTH)), fit=made)


def _head(data: TraceData) -> Iterator[Line]:
    info = data.info
    told = [f"torch {info['torch']}"] if info.get("torch") else []
    devices = sorted({meta.device for meta in data.metas}) or [str(info.get("device") or "")]
    told += [", ".join(device for device in devices if device)] if any(devices) else []
    told.append(f"ops={info.get('ops', 'both')}")
    if info.get("compiled") and info["compiled"] != "opaque":
        told.append(f"compiled={info['compiled']}")
    if info.get("last"):
        told.append(f"last={info['last']}, after {info.get('dropped') or 0:,} more")
    duration = info.get("duration_ns") or _extent(data)
    told.append(time_text(duration) + (", not finished" if info.get("unfinished") else ""))
    name = str(info.get("name") or "of a run")
    yield line(("trace ", "dim"), (cut(name, 60), "title"), (f"  {' · '.join(told)}", "dim"), hang=_MARGIN)


def _extent(data: TraceData) -> int:
    """How long the recording is by its own rows."""
    ends = [int((rows.start + rows.duration).max()) for rows in (data.ops, data.calls) if len(rows)]
    return max(ends, default=0)


def _counts(data: TraceData) -> Iterator[Line]:
    ops, values = data.ops, data.values
    for number, level in enumerate(LEVELS):
        phases = np.bincount(ops.phase[ops.level == number], minlength=len(PHASES)).tolist()
        if any(phases):
            parts = [f"{name} {count:,}" for name, count in zip(PHASES, phases, strict=True) if count]
            split = f" ({' · '.join(parts)})" if len(parts) > 1 else f" {parts[0].split()[0]}"
            yield _fact(f"{level} ops", f"{sum(phases):,}{split}")
    called = len(np.unique(data.calls.module))
    calls = f", {len(data.calls):,} calls" if called else f"; {_why_none(data)}"
    yield _fact("modules", f"{called:,} called{calls}")
    told = compiled_text(data)
    if told:
        yield _fact("compiled", told)
    if not len(ops) and not called:
        why = "nothing of torch's ran in the block"
        if data.info.get("unfinished"):
            why = "nothing had been written when the process ended"
        yield _fact("empty", f"no op and no module call was recorded: {why}")
    external = int((values.kind == KINDS.index("external")).sum())
    external = max(external, int(data.info.get("external") or 0))
    size = bytes_text(int(data.storages.sum()))
    told = f"{len(values):,} in {len(data.storages):,} storages of {size}"
    evicted = int((values.kind == KINDS.index("evicted")).sum())
    warning = f" · {external:,} external" if external else ""
    yield _fact("values", told, warning + (f" · {evicted:,} evicted" if evicted else ""))


def _why_none(data: TraceData) -> str:
    """Why no module call was recorded."""
    return _COMPILED if is_opaque(data).any() else _NOT_CALLED


def _fact(title: str, text: str, warning: str = "") -> Line:
    return line((f"{title:<{_MARGIN}}", "dim"), text, (warning, "warn"), hang=_MARGIN)


def _taken(data: TraceData) -> Iterator[Line]:
    """What was asked for besides the ops: statistics, checks, tensors."""
    yield from _measured(data)
    if data.captures or data.info.get("left_out"):
        size = sum(nbytes_of(kept.dtype, kept.shape) or 0 for kept in data.captures)
        left_out = left_out_text(data.info)
        missing = f" · {left_out}" if left_out else ""
        yield _fact("tensors", f"{len(data.captures):,} kept, {bytes_text(size)}", missing)


def _unmatched(data: TraceData) -> Iterator[Line]:
    """Globs that matched nothing: whoever asked waits for what will not come."""
    for title, each in zip(chain(["asked"], repeat("")), unmatched(data), strict=False):
        yield line((f"{title:<{_MARGIN}}", "dim"), (cut(str(each), _WIDTH - _MARGIN), "warn"), hang=_MARGIN)


def _measured(data: TraceData) -> Iterator[Line]:
    """How many values were measured or checked, and how many of them are not finite."""
    stats = data.stats
    found = []
    for (name, style), counts in zip(WRONG, (stats.nans, stats.infs), strict=True):
        if counts.any():
            found += [Span(" · "), Span(f"{int((counts > 0).sum()):,} with {name}", style)]
    if found:
        found.append(Span(": t.nonfinite()"))
    title, told = "stats", f"{len(stats):,} of {len(data.values):,} values measured"
    if data.info.get("check"):
        title, told = "check", f"{data.info['check']}: {int(data.info.get('checked') or 0):,} results"
        found = found or ([Span(" · all finite")] if data.info.get("checked") else [])
    if data.info.get("check") or len(stats):
        yield line((f"{title:<{_MARGIN}}", "dim"), told, *found, hang=_MARGIN)


def _problems(trace: Trace) -> Iterator[Line]:
    """How many problems there are, if any and if they are found quickly."""
    if len(trace.ops) > _MANY_OPS:
        return
    found = find(trace.index)
    parts: list[Span] = []
    for severity in sorted(Severity, reverse=True):
        count = sum(each.severity is severity for each in found)
        if count:
            told = f"{count} {severity.word}{'s' * (count > 1)}"
            parts += [Span(", "), Span(told, _SEVERE.get(severity, ""))]
    if parts:
        yield line((f"{'problems':<{_MARGIN}}", "dim"), *parts[1:], ": t.problems()", hang=_MARGIN)


@dataclass(frozen=True, slots=True)
class _Time:
    """Where the time of a run went, that of the host and, if it was taken, that of devices."""

    host: tuple[tuple[str, int], ...]  #: what each phase took
    device: tuple[tuple[str, int], ...]
    use: DeviceUse | None

    @classmethod
    def of(cls, costs: Costs, use: DeviceUse | None) -> _Time:
        total, optimizer = costs.total, ("optimizer", costs.optimizer_time)
        host = (("forward", total.time), ("backward", total.backward_time),
                ("recompute", total.recompute_time))  # fmt: skip
        device = (("forward", total.device_time), ("backward", total.backward_device_time),
                  ("recompute", total.recompute_device_time))  # fmt: skip
        tops = costs.scopes.children(-1)
        summed = [[(name, int(column[tops].sum())) for name, column in phases] for phases in (host, device)]
        outside = ("outside every op", use.unowned if use else 0)
        host_parts = [*summed[0], optimizer]
        device_parts = [*summed[1], ("optimizer", costs.optimizer_device_time), outside]
        return cls(
            tuple(part for part in host_parts if part[1]),
            tuple(part for part in device_parts if part[1]),
            use,
        )

    @property
    def total(self) -> int:
        """What shares are of."""
        return sum(time for _, time in (self.device if self.use else self.host))

    def told(self) -> Iterator[Line]:
        if self.host:
            total = time_text(sum(time for _, time in self.host))
            told = f"{total} {_split_text(self.host)}"
            yield _fact("host time", told if self.use else f"{told}; shares are of this")
        if self.use:
            told, split = f"time {time_text(self.total)} in {self.use.ran}", _split_text(self.device)
            one = len(f"{told} {split}") <= _WIDTH - _MARGIN
            texts = ([f"{told} {split}"] if one else [told, split.strip("()")]) + self.use.texts()
            yield from (_fact("device", text) for text in texts)

    def columns(self, host: str) -> tuple[Column, ...]:
        """Times, share and bar; ``host`` is what the host's is called where it is the only one."""
        times = ("host time", "device time") if self.use else (host,)
        return (*(Column(each, right=True) for each in times), Column("share", right=True), Column(""))

    def cells(self, host: int, device: int) -> list[Cell]:
        """What one row took."""
        times, spent = ((host, device), device) if self.use else ((host,), host)
        shown = [Span(time_text(time) if time else "") for time in times]
        if not spent or not self.total:
            return [*shown, Span(""), Span("")]
        part = spent / self.total
        return [*shown, Span(f"{100 * part:.0f} %"), Span("▇" * round(_BAR * min(part, 1)), "number")]


def _split_text(parts: Sequence[tuple[str, int]]) -> str:
    """``(forward 1.00 ms · backward 200 µs)``."""
    split = " · ".join(f"{name} {time_text(time)}" for name, time in parts)
    return f"({split})" if len(parts) > 1 else "".join(name for name, _ in parts)


def _uncounted(data: TraceData, costs: Costs) -> Iterator[Line]:
    """What the FLOPs leave out, if anything; all of them are in the summary."""
    tops = costs.scopes.children(-1)
    missed = uncounted_text(uncounted(data, costs.scopes, tops))
    if missed:
        total = costs.total
        columns = (total.flops, total.backward_flops, total.recompute_flops)
        known = sum(int(column[top]) for column in columns for top in tops)
        yield _fact("FLOPs", f"{count_text(known)} · " if known else "", missed)


def _trouble(data: TraceData) -> Iterator[Line]:
    """What went wrong: in the traced program, and in the recorder."""
    if data.info.get("unfinished"):
        yield line((f"{'cut short':<{_MARGIN}}", "dim"), (CUT_SHORT, "warn"), hang=_MARGIN)
    exception = data.info.get("exception")
    if exception:
        yield line((f"{'raised':<10}", "dim"), (cut(str(exception), 88), "error"), hang=_MARGIN)
        yield from (line((text, ""), hang=_MARGIN) for text in str(data.info.get("note") or "").splitlines())
    faults = [str(fault) for fault in data.info.get("faults") or ()]
    count = max(int(data.info.get("fault_count") or 0), len(faults))
    if count:
        told = "the recorder failed once" if count == 1 else f"the recorder failed {count:,} times"
        told = f"{told}; the run went on without it there"
        yield line((f"{'faults':<10}", "dim"), (told, "error"), hang=_MARGIN)
        shown = [(cut(fault, 88), "error") for fault in faults[:_FAULTS]]
        yield from (line(" " * _MARGIN, fault, hang=_MARGIN) for fault in shown)


# -- modules ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Sibling scopes of one class that follow each other: told as one when there are several."""

    scopes: tuple[int, ...]
    depth: int


#: A table for a width.
_Table = Callable[[int], Grid]


def _modules(trace: Trace, costs: Costs, whole: _Time) -> _Table | None:
    data = trace.data
    rows = costs.scopes.rows
    groups = _Shallow(data, costs).groups()
    if not groups:
        return None
    total = costs.total
    host = total.time + total.backward_time + total.recompute_time
    device = total.device_time + total.backward_device_time + total.recompute_device_time
    exchanges = Exchanges(trace.index)
    names = [_name(data, costs, group) for group in groups]
    exchanged = [
        exchanges.of([call for scope in group.scopes for call in rows[scope].calls]) for group in groups
    ]
    every = [list(group.scopes) for group in groups]
    shares = [whole.cells(int(host[scopes].sum()), int(device[scopes].sum())) for scopes in every]

    def laid(shapes: int) -> Grid:
        texts = [Span(each.fitted(shapes), "shape") for each in exchanged]
        columns = (Column("module", least=20), Column("input → output", least=16), *whole.columns("time"))
        cells = zip(names, texts, shares, strict=True)
        return grid(columns, [[name, text, *share] for name, text, share in cells])

    def made(room: int) -> Grid:
        """With all there is, else without the bars, at last with shapes in the room that is left."""
        table = laid(_SHAPE_WIDTH)
        if grid_width(table) <= room or (room >= _WIDTH and not whole.use):
            return table
        table = _without_bars(table)
        over = grid_width(table) - room
        left = max(_LEAST_SHAPES, column_widths(table)[1] - over)
        return _without_bars(laid(left)) if over > 0 else table

    return made


def _without_bars(table: Grid) -> Grid:
    return Grid(table.columns[:-1], tuple(row[:-1] for row in table.rows))


def _spans(row: Sequence[Cell]) -> list[Span]:
    return [span for cell in row for span in (cell if isinstance(cell, tuple) else (cell,))]


class _Shallow:
    """The top of the module tree, as deep as a few rows allow."""

    def __init__(self, data: TraceData, costs: Costs) -> None:
        self._data = data
        self._scopes = costs.scopes

    def groups(self) -> list[_Group]:
        """Level by level, as long as it all fits."""
        shown = self._grouped(-1, 0)
        while True:
            deeper: list[_Group] = []
            for at, group in enumerate(shown):
                deeper.append(group)
                opened = at + 1 < len(shown) and shown[at + 1].depth > group.depth
                if len(group.scopes) == 1 and not opened:
                    deeper += self._grouped(group.scopes[0], group.depth + 1)
            if len(deeper) == len(shown) or len(deeper) > _MODULE_ROWS:
                return shown[:_MODULE_ROWS]
            shown = deeper

    def _ran(self, scope: int) -> bool:
        rows = self._scopes.rows
        return rows[scope].module != OUTSIDE and any(row.calls for row in rows[scope : rows[scope].end])

    def _grouped(self, scope: int, depth: int) -> list[_Group]:
        rows = self._scopes.rows
        inside = [child for child in self._scopes.children(scope) if self._ran(child)]
        found = []
        for _, group in groupby(inside, key=lambda child: self._data.modules[rows[child].module].type):
            members = tuple(group)
            if len(members) > 2:
                found.append(_Group(members, depth))
            else:
                found += [_Group((member,), depth) for member in members]
        return found


def _name(data: TraceData, costs: Costs, group: _Group) -> Cell:
    rows = costs.scopes.rows
    modules = [data.modules[rows[scope].module] for scope in group.scopes]
    first = modules[0]
    if not first.path:
        return (Span(cut(first.type, _NAME_WIDTH), "module"),)
    name = first.path.rpartition(".")[2]
    if len(modules) > 1:
        name += f" … {modules[-1].path.rpartition('.')[2]}"
    kind = f" ({first.type} ×{len(modules)})" if len(modules) > 1 else f" ({first.type})"
    indent = "  " * group.depth
    name = cut(name, _NAME_WIDTH - len(indent))
    kind = cut(kind, max(1, _NAME_WIDTH - len(indent) - width(name)))
    return (Span(indent), Span(name, "module"), Span(kind, "dim"))


# -- lines -----------------------------------------------------------------------------------------


def _heaviest(trace: Trace, whole: _Time) -> _Table | None:
    """The source lines the ops of which took longest; backward ops count for the line of their forward op.

    Where the time of devices was taken, it decides.
    """
    data, device = trace.data, trace.index.device_own
    leaf = leaf_ops(data)
    times = np.where(leaf, data.ops.duration, 0)
    if not times.any():
        return None
    made = []
    device = np.zeros_like(times) if device is None else device
    for frame, host, spent, count in _by_line(trace.index, times, device, leaf)[:_LINE_ROWS]:
        row = trace.frames[frame]
        file = row.position.rpartition("/")[2]
        where = f"{file} in {row.function.rpartition('<locals>.')[2]}"
        place, code = Span(cut(where, _PLACE_WIDTH)), Span(cut(row.code, _CODE_WIDTH), "op")
        made.append([place, code, Span(f"{count:,}"), *whole.cells(host, spent)])
    if not made:
        return None
    texts = (Column("heaviest lines", least=20), Column("code", least=16))
    table = grid((*texts, Column("ops", right=True, spare=1), *whole.columns("op time")), made)
    least = grid_width(table) if whole.use else min(grid_width(table), _WIDTH)
    return lambda room: table if room >= least else _without_bars(table)


def _by_line(index: Index, host: I64, device: I64, leaf: Mask) -> list[tuple[int, int, int, int]]:
    """For each line: a frame there, what its ops took of the host and of devices, and how many they are.

    The heaviest first, on devices where they took any time at all.
    """
    data, frames = index.raw, index.op_user_frames
    known = (leaf | (device > 0)) & (frames >= 0)
    used, inverse = np.unique(frames[known], return_inverse=True)
    spent = np.zeros((len(used), 3), dtype=np.int64)
    np.add.at(spent, inverse, np.stack([host, device, leaf], axis=1)[known])
    found: dict[tuple[str, int], tuple[int, I64]] = {}
    for frame, sums in zip(used.tolist(), spent, strict=True):
        place = (data.codes[data.frames.code[frame]].file, int(data.frames.line[frame]))
        found.setdefault(place, (frame, np.zeros(3, dtype=np.int64)))[1][:] += sums
    rows = [(frame, *sums.tolist()) for frame, sums in found.values()]
    return sorted(rows, key=lambda row: (-row[2], -row[1]))
