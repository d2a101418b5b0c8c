"""``print(t)``: what a trace holds, on one screen.

What was recorded and how, whether anything went wrong, where the time went by module and by line, and which
views show more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.analysis.cost import Costs, cost_of, leaf_ops
from sightline.analysis.places import Chains, shown_frames, torch_file
from sightline.analysis.scopes import OUTSIDE
from sightline.analysis.select import Mask
from sightline.notation import bytes_text, time_text
from sightline.trace.data import I64, KINDS, LEVELS, PHASES, TraceData
from sightline.views.outline import Cell, Column, Grid, Line, Span, View, cut, grid, line, width
from sightline.views.shapes import FULL, SHORT, SHORTEST, Exchange, Exchanges

if TYPE_CHECKING:
    from sightline.api import Trace

_MODULE_ROWS: Final = 14
_LINE_ROWS: Final = 5
_NAME_WIDTH, _SHAPE_WIDTH, _PLACE_WIDTH, _CODE_WIDTH = 32, 38, 34, 36
_BAR: Final = 10
_FAULTS: Final = 3
_VIEWS: Final = "t.code()  t.log()  t.call_order()  t.summary()  t.source()"


def overview(trace: Trace) -> View:
    """One screen about a trace."""
    data = trace.data
    costs = cost_of(data)
    blocks: list[Line | Grid] = [*_head(data), *_counts(data), *_trouble(data)]
    modules = _modules(trace, costs)
    lines = _heaviest(trace)
    for block in (modules, lines):
        if block is not None:
            blocks += [line(), block]
    return View((*blocks, line(), line(("more  ", "dim"), _VIEWS)))


def _head(data: TraceData) -> Iterator[Line]:
    info = data.info
    told = [f"torch {info['torch']}"] if info.get("torch") else []
    devices = sorted({meta.device for meta in data.metas}) or [str(info.get("device") or "")]
    told += [", ".join(device for device in devices if device)] if any(devices) else []
    told.append(f"ops={info.get('ops', 'both')}")
    if info.get("compiled") and info["compiled"] != "opaque":
        told.append(f"compiled={info['compiled']}")
    duration = info.get("duration_ns") or _extent(data)
    told.append(time_text(duration))
    name = str(info.get("name") or "of a run")
    yield line(("trace ", "dim"), (cut(name, 60), "title"), (f"  {' · '.join(told)}", "dim"))


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
    yield _fact("modules", f"{called:,} called, {len(data.calls):,} calls")
    external = int((values.kind == KINDS.index("external")).sum())
    external = max(external, int(data.info.get("external") or 0))
    size = bytes_text(int(data.storages.sum()))
    told = f"{len(values):,} in {len(data.storages):,} storages of {size}"
    yield _fact("values", told, f" · {external:,} external" if external else "")


def _fact(title: str, text: str, warning: str = "") -> Line:
    return line((f"{title:<10}", "dim"), text, (warning, "warn"))


def _trouble(data: TraceData) -> Iterator[Line]:
    """What went wrong: in the traced program, and in the recorder."""
    exception = data.info.get("exception")
    if exception:
        yield line((f"{'raised':<10}", "dim"), (cut(str(exception), 88), "error"))
    faults = [str(fault) for fault in data.info.get("faults") or ()]
    count = max(int(data.info.get("fault_count") or 0), len(faults))
    if count:
        told = "the recorder failed once" if count == 1 else f"the recorder failed {count:,} times"
        yield line((f"{'faults':<10}", "dim"), (f"{told}; the run went on without it there", "error"))
        yield from (line("          ", (cut(fault, 88), "error")) for fault in faults[:_FAULTS])


# -- modules ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Sibling scopes of one class that follow each other: told as one when there are several."""

    scopes: tuple[int, ...]
    depth: int


def _modules(trace: Trace, costs: Costs) -> Grid | None:
    data = trace.data
    rows = costs.scopes.rows
    groups = _Shallow(data, costs).groups()
    if not groups:
        return None
    spent = costs.total.time + costs.total.backward_time + costs.total.recompute_time
    whole = sum(int(spent[scope]) for scope in costs.scopes.children(-1))
    exchanges = Exchanges(trace.index)
    made: list[list[Cell]] = []
    for group in groups:
        calls = [call for scope in group.scopes for call in rows[scope].calls]
        time = sum(int(spent[scope]) for scope in group.scopes)
        shapes = _fitting(exchanges.of(calls))
        made.append([_name(data, costs, group), Span(shapes, "shape"), *_share(time, whole)])
    return grid((Column("module"), Column("input → output"), *_SHARE_COLUMNS), made)


def _fitting(exchange: Exchange) -> str:
    """The longest text of an exchange that has room."""
    for brevity in (FULL, SHORT):
        text = exchange.text(brevity)
        if width(text) <= _SHAPE_WIDTH:
            return text
    return cut(exchange.text(SHORTEST), _SHAPE_WIDTH)


_SHARE_COLUMNS: Final = (Column("time", right=True), Column("share", right=True), Column(""))


def _share(time: int, whole: int) -> list[Cell]:
    if not time or not whole:
        return [Span(""), Span(""), Span("")]
    part = time / whole
    return [Span(time_text(time)), Span(f"{100 * part:.0f} %"), Span("▇" * round(_BAR * part), "number")]


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


def _heaviest(trace: Trace) -> Grid | None:
    """The source lines the ops of which took longest; backward ops count for the line of their forward op."""
    data = trace.data
    leaf = leaf_ops(data)
    times = np.where(leaf, data.ops.duration, 0)
    whole = int(times.sum())
    if not whole:
        return None
    made = []
    for frame, time, count in _by_line(data, times, leaf)[:_LINE_ROWS]:
        row = trace.frames[frame]
        file = row.position.rpartition("/")[2]
        where = f"{file} in {row.function.rpartition('<locals>.')[2]}"
        place, code = Span(cut(where, _PLACE_WIDTH)), Span(cut(row.code, _CODE_WIDTH), "op")
        made.append([place, code, Span(f"{count:,}"), *_share(time, whole)])
    if not made:
        return None
    columns = (Column("heaviest lines"), Column("code"), Column("ops", right=True), *_SHARE_COLUMNS)
    return grid(columns, made)


def _by_line(data: TraceData, times: I64, leaf: Mask) -> list[tuple[int, int, int]]:
    """For each line: a frame there, the time of its ops and how many they are; the heaviest first."""
    frames = shown_frames(data)
    known = leaf & (frames >= 0)
    used, inverse = np.unique(frames[known], return_inverse=True)
    spent = np.zeros(len(used), dtype=np.int64)
    np.add.at(spent, inverse, times[known])
    chains = Chains(data, torch_file)
    found: dict[tuple[str, int], list[int]] = {}
    for frame, time, count in zip(used.tolist(), spent.tolist(), np.bincount(inverse).tolist(), strict=True):
        chain = chains.of(frame)
        if chain:
            place = (data.codes[data.frames.code[chain[-1]]].file, int(data.frames.line[chain[-1]]))
            sums = found.setdefault(place, [chain[-1], 0, 0])
            sums[1] += time
            sums[2] += count
    return sorted(((frame, time, count) for frame, time, count in found.values()), key=lambda row: -row[1])
