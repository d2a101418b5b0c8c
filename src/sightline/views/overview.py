"""``print(t)``: a trace on one screen.

What was recorded and how, whether anything went wrong, where the time went by module and by line, and which
views show more. All shares are of one total: the host time of the modules, of the ops outside them and of the
optimizer, which has its own line. If device time was recorded, shares are of that, beside the host time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.analysis.cost import (
    Costs,
    compiled_text,
    cost_of,
    exclusive_times,
    foreign_parameters_text,
    is_opaque,
    leaf_ops,
    opaque_in_forward,
    uncounted,
    uncounted_text,
)
from sightline.analysis.module_tree import brief_modules, brief_modules_text
from sightline.analysis.nonfinite import first_nonfinite, nonfinite_reported
from sightline.analysis.problems import CUT_SHORT, Severity, find, gaps
from sightline.analysis.select import Mask
from sightline.analysis.step_summaries import step_summaries
from sightline.analysis.unmatched_globs import left_out_text, unmatched
from sightline.analysis.value_names import root_names
from sightline.data.device_time import DeviceSummary, device_summary
from sightline.data.dtypes import nbytes_of
from sightline.data.index import Index
from sightline.data.not_recorded import other_threads
from sightline.data.trace_data import I64, KINDS, LEVELS, PHASES, TraceData
from sightline.hints import Hint
from sightline.notation import bytes_text, count_text, time_text
from sightline.views.inputs_outputs import Exchange, key
from sightline.views.module_groups import ModuleGroups
from sightline.views.problems import severity_counts
from sightline.views.rendering import (
    WIDTH,
    Block,
    Cell,
    Column,
    Grid,
    Line,
    Span,
    View,
    column_widths,
    cut,
    fact_lines,
    grid,
    line,
)
from sightline.views.statistics_text import WRONG
from sightline.views.steps import repeated_calls, step_lines, step_table
from sightline.views.table_layout import grid_width

if TYPE_CHECKING:
    from sightline.api import Trace

_MODULE_ROWS: Final = 14
_LINE_ROWS: Final = 5
_NAME_WIDTH, _SHAPE_WIDTH, _PLACE_WIDTH, _CODE_WIDTH = 32, 38, 34, 36
_MIN_SHAPES: Final = 18  #: where there is little room
_BAR: Final = 10
_MAX_FAULTS: Final = 3
_SEVERE: Final = {Severity.ERROR: "error", Severity.WARNING: "warn"}
_MARGIN: Final = 10  #: columns for the titles of facts
_MANY_OPS: Final = 100_000  #: in a longer run, checking for problems takes too long for a first screen
_NOT_CALLED: Final = "none was called, as module(…), on the thread that started the recording"
_EAGER: Final = Hint.recording("compiled", "eager")
_VIEWS: Final = "t.code()  t.log()  t.call_order()  t.summary()  t.memory()  t.source()  t.problems()"


def overview(trace: Trace, more: str = _VIEWS) -> View:
    """One screen about a trace; ``more`` lists the other views, as the caller spells them."""
    data = trace.data
    costs, use = cost_of(data, trace.index.device_own), device_summary(trace.index)
    whole = _Time.of(data, costs, use)
    steps = step_summaries(trace.index)
    facts = [
        *_head(data),
        *_engine(data),
        *_counts(data),
        *(step_lines(trace.index, steps) or _calls(trace.index)),
        *_recorded_data(trace.index),
        *whole.lines(),
        *_uncounted(data, costs),
    ]
    facts += [*_failures(data), *_unmatched(data), *_problems(trace)]
    stepped = step_table(steps)
    modules = _modules(trace, costs, whole)
    heaviest = _heaviest(trace, whole)

    def fit(room: int) -> list[Block]:
        room = min(room, WIDTH)
        tables = [table(room) for table in (modules, heaviest) if table is not None]
        texts = [span.text for table in tables[:1] for row in table.rows for span in _spans(row)]
        clipped = any(step.clipped and step.norm is not None for step in steps)
        meanings = ["gradient norm: before clipping"] if stepped is not None and clipped else []
        meanings += key(texts if modules else [])
        trained = any(name == "backward" for name, _ in whole.host)
        meanings += ["time: with the backward pass"] if modules is not None and trained else []
        meanings += ["share: of the device time" if use else "share: of the host time"] if tables else []
        legend = fact_lines("key", meanings, _MARGIN, room)
        every = [*([stepped] if stepped is not None else []), *tables]
        blocks = [block for table in every for block in (line(), table)]
        return [*facts, *blocks, line(), *legend, _fact("more", more)]

    return View(tuple(fit(WIDTH)), fit=fit)


def _head(data: TraceData) -> Iterator[Line]:
    info = data.info
    parts = [f"torch {info['torch']}"] if info.get("torch") else []
    devices = sorted({meta.device for meta in data.metas}) or [str(info.get("device") or "")]
    parts += [", ".join(device for device in devices if device)] if any(devices) else []
    parts.append(f"ops={info.get('ops', 'both')}")
    if info.get("compiled") and info["compiled"] != "opaque":
        parts.append(f"compiled={info['compiled']}")
    if info.get("engine") == "python" and not info.get("engine_reason"):
        parts.append("engine=python")
    if info.get("last"):
        parts.append(f"last={info['last']}, after {info.get('dropped') or 0:,} more")
    duration = info.get("duration_ns") or _extent(data)
    parts.append(time_text(duration) + (", not finished" if info.get("unfinished") else ""))
    name = str(info.get("name") or "of a run")
    yield line(("trace ", "dim"), (cut(name, 60), "title"), (f"  {' · '.join(parts)}", "dim"), hang=_MARGIN)


def _engine(data: TraceData) -> Iterator[Line]:
    """Why the plain engine has recorded, where nobody asked for it."""
    reason = data.info.get("engine_reason")
    if reason:
        changes = data.info.get("ops", "both") in ("aten", "both")
        gradients = ", and some gradients differ in their last bits" if changes else ""
        yield _fact("engine", "", f"python: it is slower{gradients} (docs/limits.md). {reason}")


def _extent(data: TraceData) -> int:
    """The end of the last op or call."""
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
    brief = brief_modules(data)
    single = sum(map(len, brief.values()))
    called, count = len(np.unique(data.calls.module)) - single, len(data.calls) - single
    calls = f", {count:,} call{'s' * (count != 1)}" if called else f"; {_why_none(data)}"
    if brief:
        calls += f"; besides {brief_modules_text(brief)}"
    outside = foreign_parameters_text(data)
    yield _fact(
        "modules", f"{called:,} called{calls}", f" · {outside} to none of them" if called and outside else ""
    )
    unseen = {data.names[name] for name in ops.name[is_opaque(data)].tolist()}
    part = "" if unseen - opaque_in_forward(data) else "in its forward "
    opaque = f"{part}its ops are not seen; {_EAGER} shows them"
    texts = [compiled_text(data), opaque if called and unseen else ""]
    if any(texts):
        yield _fact("compiled", "; ".join(filter(None, texts)))
    if elsewhere := other_threads(data):
        yield _fact("threads", "", elsewhere)
    elif not len(ops) and not called:
        why = "nothing of torch's ran in the block"
        if data.info.get("unfinished"):
            why = "nothing had been written when the process ended"
        yield _fact("empty", f"no op and no module call was recorded: {why}")
    external = int((values.kind == KINDS.index("external")).sum())
    external = max(external, int(data.info.get("external") or 0))
    size = bytes_text(int(data.storages.sum()))
    text = f"{len(values):,} in {len(data.storages):,} storages of {size}"
    evicted = int((values.kind == KINDS.index("evicted")).sum())
    warning = f" · {external:,} external" if external else ""
    yield _fact("values", text, warning + (f" · {evicted:,} evicted" if evicted else ""))


def _calls(index: Index) -> list[Line]:
    text = repeated_calls(index)
    return [_fact("calls", text)] if text else []


def _why_none(data: TraceData) -> str:
    """Why no module call was recorded."""
    compiled = f"compiled code runs without calling any; {_EAGER} shows them"
    return compiled if is_opaque(data).any() else _NOT_CALLED


def _fact(title: str, text: str, warning: str = "") -> Line:
    return line((f"{title:<{_MARGIN}}", "dim"), text, (warning, "warn"), hang=_MARGIN)


def _recorded_data(index: Index) -> Iterator[Line]:
    """What was recorded besides the ops: statistics, checks, tensors."""
    yield from _measured(index)
    data = index.raw
    if data.captures or data.info.get("left_out"):
        size = sum(nbytes_of(kept.dtype, kept.shape) or 0 for kept in data.captures)
        left_out = left_out_text(data.info)
        missing = f" · {left_out}" if left_out else ""
        yield _fact("tensors", f"{len(data.captures):,} kept, {bytes_text(size)}", missing)


def _unmatched(data: TraceData) -> Iterator[Line]:
    """Globs that matched nothing: requested data that was never recorded."""
    for title, each in zip(chain(["asked"], repeat("")), unmatched(data), strict=False):
        yield line((f"{title:<{_MARGIN}}", "dim"), (str(each), "warn"), hang=_MARGIN)


def _measured(index: Index) -> Iterator[Line]:
    """How many values were measured or checked, and how many of them are not finite."""
    data = index.raw
    stats, checks = data.stats, bool(data.info.get("check"))
    bad = []
    for (name, style), counts in zip(WRONG, (stats.nans, stats.infs), strict=True):
        if counts.any():
            bad.append(Span(f"{int((counts > 0).sum()):,} with {name}", style))
    parts = [part for each in bad for part in (Span(" · "), each)]
    if parts and len(data.ops) <= _MANY_OPS and not nonfinite_reported(index):
        # Masks, and memory that was overwritten before it was read: there is nothing to look up.
        why = "as given, meant or discarded" if first_nonfinite(index) else "as given, meant or allowed"
        parts = [Span(" · "), Span(f"{' and '.join(span.text for span in bad)}, {why}")]
    elif parts:
        parts.append(Span(f": {Hint.view('nonfinite')}"))
    title, text = "stats", f"{len(stats):,} of {len(data.values):,} values measured"
    if checks:
        checked = data.info.get("checked", 0)  # None where they were not counted: of a step
        title, text = "check", data.info["check"] + ("" if checked is None else f": {checked:,} results")
        parts = parts or ([] if checked == 0 else [Span(" · all finite")])
    if checks or len(stats):
        yield line((f"{title:<{_MARGIN}}", "dim"), text, *parts, hang=_MARGIN)


def _problems(trace: Trace) -> Iterator[Line]:
    """How many problems there are, or what was not looked at; of a long run, that nothing was."""
    data, title = trace.data, (f"{'problems':<{_MARGIN}}", "dim")
    if not len(data.ops) and not len(data.calls):
        return
    if len(data.ops) > _MANY_OPS:
        yield line(
            title,
            f"not looked for in more than {_MANY_OPS:,} ops, which takes a while: {Hint.view('problems')}",
        )
        return
    parts: list[Span] = []
    for severity, text in severity_counts(find(trace.index)):
        parts += [Span(", "), Span(text, _SEVERE.get(severity, ""))]
    if parts:
        yield line(title, *parts[1:], f": {Hint.view('problems')}", hang=_MARGIN)
        return
    unseen = ", ".join(each.subject for each in gaps(trace.index) if each.subject)
    yield line(title, "none found" + (f"; not looked at: {unseen}" if unseen else ""), hang=_MARGIN)


@dataclass(frozen=True, slots=True)
class _Time:
    """Where the time of a run went, on the host and, if it was recorded, on devices."""

    host: tuple[tuple[str, int], ...]  #: in modules, outside of them, and by phase
    device: tuple[tuple[str, int], ...]
    use: DeviceSummary | None
    in_ops: int  #: of the host time; the rest ran in Python around them

    @classmethod
    def of(cls, data: TraceData, costs: Costs, use: DeviceSummary | None) -> _Time:
        tops = costs.scopes.children(-1)
        outside = ("outside every op", use.unowned if use else 0)
        host_parts = [*costs.time_parts(tops), ("optimizer", costs.optimizer_time)]
        device_optimizer = ("optimizer", costs.optimizer_device_time)
        device_parts = [*costs.time_parts(tops, "device_"), device_optimizer, outside]
        return cls(
            tuple(part for part in host_parts if part[1]),
            tuple(part for part in device_parts if part[1]),
            use,
            int(exclusive_times(data).sum()),
        )

    @property
    def total(self) -> int:
        """The time that shares are of."""
        return sum(time for _, time in (self.device if self.use else self.host))

    def lines(self) -> Iterator[Line]:
        if self.host:
            spent = sum(time for _, time in self.host)
            total, ops = time_text(spent), time_text(self.in_ops)
            total += f", {ops} in ops" if ops != total and self.in_ops < spent else ""
            yield _fact("host time", f"{total} {_split_text(self.host)}")
        if self.use:
            text, split = f"time {time_text(self.total)} in {self.use.ran}", _split_text(self.device)
            fits = len(f"{text} {split}") <= WIDTH - _MARGIN
            yield _fact("device", f"{text} {split}" if fits else text)
            parts = [] if fits else [f"{name} {time_text(time)}" for name, time in self.device]
            for at, row in enumerate(fact_lines("", parts, 0, WIDTH - _MARGIN)):
                yield _fact("" if at else "device", row.text)
            yield from (_fact("device", text) for text in self.use.texts())

    def columns(self, host: str) -> tuple[Column, ...]:
        """Times, share and bar; ``host`` is the title of the host time where it is the only one."""
        times = ("host time", "device time") if self.use else (host,)
        return (*(Column(each, right=True) for each in times), Column("share", right=True), Column(""))

    def cells(self, host: int, device: int) -> list[Cell]:
        """The cells of one row."""
        times, spent = ((host, device), device) if self.use else ((host,), host)
        shown = [Span(time_text(time) if time else "") for time in times]
        if not spent or not self.total:
            return [*shown, Span(""), Span("")]
        part = spent / self.total
        return [*shown, Span(f"{100 * part:.0f} %"), Span("▇" * round(_BAR * min(part, 1)), "number")]


def _split_text(parts: Sequence[tuple[str, int]]) -> str:
    """``(modules 1.00 ms · backward 200 µs)``; for a single part ``in modules``."""
    split = " · ".join(f"{name} {time_text(time)}" for name, time in parts)
    alone = {"modules": "in modules", "other": "outside modules"}
    return f"({split})" if len(parts) > 1 else "".join(alone.get(name, name) for name, _ in parts)


def _uncounted(data: TraceData, costs: Costs) -> Iterator[Line]:
    """The ops that the FLOPs do not include, if any; the summary has all FLOPs."""
    tops = costs.scopes.children(-1)
    missed = uncounted_text(uncounted(data, costs.scopes, tops))
    if missed:
        total = costs.total
        columns = (total.flops, total.backward_flops, total.recompute_flops)
        known = sum(int(column[top]) for column in columns for top in tops)
        yield _fact("FLOPs", f"{count_text(known)} · " if known else "", missed)


def _failures(data: TraceData) -> Iterator[Line]:
    """What failed: the traced program, or the recorder."""
    if data.info.get("unfinished"):
        yield line((f"{'cut short':<{_MARGIN}}", "dim"), (CUT_SHORT, "warn"), hang=_MARGIN)
    exception = data.info.get("exception")
    if exception:
        yield line((f"{'raised':<10}", "dim"), (cut(str(exception), 88), "error"), hang=_MARGIN)
        yield from (line((text, ""), hang=_MARGIN) for text in str(data.info.get("note") or "").splitlines())
    contradictions = [str(text) for text in data.info.get("contradictions") or ()]
    if contradictions:
        more = f" (and {len(contradictions) - 1} more)" if len(contradictions) > 1 else ""
        text = f"this recording contradicts itself: {cut(contradictions[0], 88)}{more}"
        yield line((f"{'unsound':<10}", "dim"), (text, "error"), hang=_MARGIN)
    faults = [str(fault) for fault in data.info.get("faults") or ()]
    count = max(int(data.info.get("fault_count") or 0), len(faults))
    if count:
        times = "once" if count == 1 else f"{count:,} times"
        text = f"the recorder failed {times}; the run went on without it there"
        yield line((f"{'faults':<10}", "dim"), (text, "error"), hang=_MARGIN)
        shown = [(cut(fault, 88), "error") for fault in faults[:_MAX_FAULTS]]
        yield from (line(" " * _MARGIN, fault, hang=_MARGIN) for fault in shown)


# -- modules ---------------------------------------------------------------------------------------


#: A table for a width.
_Table = Callable[[int], Grid]


def _modules(trace: Trace, costs: Costs, whole: _Time) -> _Table | None:
    tree = ModuleGroups(trace.index, costs)
    groups = tree.groups(_MODULE_ROWS)
    if not groups:
        return None
    rest = groups[_MODULE_ROWS - 1 :] if len(groups) > _MODULE_ROWS else []
    groups = groups[: len(groups) - len(rest)]
    total = costs.total
    host = total.time + total.backward_time + total.recompute_time
    device = total.device_time + total.backward_device_time + total.recompute_device_time
    roots = root_names(trace.index)
    names = [tree.name(group, roots, _NAME_WIDTH) for group in groups]
    exchanges = [tree.exchange(group) for group in groups]
    every = [list(group.scopes) for group in groups]
    if rest:
        every.append([scope for group in rest for scope in group.scopes])
        names.append(Span(f"… {len(every[-1])} more", "dim"))
        exchanges.append(Exchange((), ()))
    shares = [whole.cells(int(host[scopes].sum()), int(device[scopes].sum())) for scopes in every]

    def table_with(shapes: int) -> Grid:
        texts = [Span(each.fit(shapes), "shape") for each in exchanges]
        columns = (Column("module", least=20), Column("input → output", least=16), *whole.columns("time"))
        cells = zip(names, texts, shares, strict=True)
        return grid(columns, [[name, text, *share] for name, text, share in cells])

    def fit(room: int) -> Grid:
        """With everything, else without the bars, else with shapes in the room that is left."""
        table = table_with(_SHAPE_WIDTH)
        if grid_width(table) <= room or (room >= WIDTH and not whole.use):
            return table
        table = _without_bars(table)
        over = grid_width(table) - room
        left = max(_MIN_SHAPES, column_widths(table)[1] - over)
        return _without_bars(table_with(left)) if over > 0 else table

    return fit


def _without_bars(table: Grid) -> Grid:
    return Grid(table.columns[:-1], tuple(row[:-1] for row in table.rows))


def _spans(row: Sequence[Cell]) -> list[Span]:
    return [span for cell in row for span in (cell if isinstance(cell, tuple) else (cell,))]


# -- lines -----------------------------------------------------------------------------------------


def _heaviest(trace: Trace, whole: _Time) -> _Table | None:
    """The source lines whose ops took longest; backward ops count for the line of their forward op.

    If device time was recorded, lines are ordered by it.
    """
    data, device = trace.data, trace.index.device_own
    leaf = leaf_ops(data)
    times = exclusive_times(data)
    if not times.any():
        return None
    rows = []
    device = np.zeros_like(times) if device is None else device
    for frame, host, spent, count in _by_line(trace.index, times, device, leaf)[:_LINE_ROWS]:
        row = trace.frames[frame]
        file = row.position.rpartition("/")[2]
        where = f"{file} in {row.function.rpartition('<locals>.')[2]}"
        place, code = Span(cut(where, _PLACE_WIDTH)), Span(cut(row.code, _CODE_WIDTH), "op")
        rows.append([place, code, Span(f"{count:,}"), *whole.cells(host, spent)])
    if not rows:
        return None
    texts = (Column("heaviest lines", least=20), Column("code", least=16))
    table = grid((*texts, Column("ops", right=True, spare=1), *whole.columns("op time")), rows)
    least = grid_width(table) if whole.use else min(grid_width(table), WIDTH)
    return lambda room: table if room >= least else _without_bars(table)


def _by_line(index: Index, host: I64, device: I64, leaf: Mask) -> list[tuple[int, int, int, int]]:
    """For each line: a frame of it, the host and device time of its ops, and their number.

    The heaviest first, by device time and then by host time.
    """
    data, frames = index.raw, index.op_user_frames
    has_line = (leaf | (device > 0)) & (frames >= 0)
    used, inverse = np.unique(frames[has_line], return_inverse=True)
    spent = np.zeros((len(used), 3), dtype=np.int64)
    np.add.at(spent, inverse, np.stack([host, device, leaf], axis=1)[has_line])
    by_position: dict[tuple[str, int], tuple[int, I64]] = {}
    for frame, sums in zip(used.tolist(), spent, strict=True):
        position = (data.codes[data.frames.code[frame]].file, int(data.frames.line[frame]))
        by_position.setdefault(position, (frame, np.zeros(3, dtype=np.int64)))[1][:] += sums
    rows = [(frame, *sums.tolist()) for frame, sums in by_position.values()]
    return sorted(rows, key=lambda row: (-row[2], -row[1]))
