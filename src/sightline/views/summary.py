"""``summary()``: the table of what each module did and what it cost.

One row per module in the order they first ran, and one row for the operations a container runs itself,
between its submodules: nothing is left out, so the rows inside a module add up to its own numbers. Shared
parameters that an earlier row has counted stand in parentheses. Consecutive layers that are equal, to the
last of their submodules, share their rows, which show the sums over all of them. Where statistics were
taken, one column has mean and deviation of the module's outputs, and one the NaN and Inf in them, if any.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from sightline.analysis.cost import (
    Costs,
    Parameters,
    compiled_text,
    cost_of,
    foreign_parameters_text,
    nonfinite_counts,
    parameters_in,
    uncounted,
    uncounted_text,
)
from sightline.analysis.held_memory import held_memory
from sightline.analysis.module_tree import (
    OUTSIDE,
    OwnOps,
    brief_modules,
    brief_modules_text,
    equal_scopes,
    own_ops,
)
from sightline.analysis.nonfinite import nonfinite_reported
from sightline.analysis.select import Selection, matching_modules, module_depth
from sightline.argument_checks import argument_text
from sightline.data.device_time import device_summary
from sightline.data.not_recorded import notes, other_threads
from sightline.data.trace_data import PHASES, TraceData
from sightline.errors import UsageError
from sightline.hints import Hint
from sightline.notation import bytes_text, count_text, time_text
from sightline.patterns import no_module_matched
from sightline.views.inputs_outputs import Exchange, Exchanges, key
from sightline.views.problems import wrap_text
from sightline.views.rendering import (
    WIDTH,
    Block,
    Cell,
    Line,
    Span,
    View,
    comment_lines,
    fact_lines,
    line,
    printable,
)
from sightline.views.rendering import width as columns
from sightline.views.statistics_text import WRONG, StatisticsIndex, ValueStatistics
from sightline.views.table_layout import OPS_ROOM, Figures, FittedTable, fit_table

if TYPE_CHECKING:
    from sightline.api import Trace

_MARGIN: Final = 12  #: columns for the titles of the facts below the table
_SPREAD: Final = "mean ± std"
_WRONG: Final = "NaN/Inf"
_WIDER: Final = Hint("width=None shows all", "a larger --width shows all")
_NO_LIMIT: Final = 10_000
_COMPILED: Final = "compiled "  #: with which the name of an op of compiled code begins
_IN_COMPILED_CODE: Final = "in compiled code"
_IN_BACKWARD: Final = "only in backward passes"
_SEVERAL: Final = re.compile(r"[\w.]*\d…\d+$")  #: the name of a row of several layers
_MIN_LAYERS: Final = 3  #: how many equal layers share their rows

#: Columns of costs: title, column of the tally, how it is written, its phase, and its `Figures.spare`.
_TALLIED: Final[tuple[tuple[str, str, Callable[[float], str], str, int], ...]] = (
    ("FLOPs", "flops", count_text, "forward", 5),
    ("bwd", "backward_flops", count_text, "backward", 8),
    ("FLOPs again", "recompute_flops", count_text, "recompute", 8),
    ("time", "time", time_text, "forward", 0),
    ("bwd", "backward_time", time_text, "backward", 6),
    ("time again", "recompute_time", time_text, "recompute", 6),
    ("device time", "device_time", time_text, "forward", 0),
    ("bwd", "backward_device_time", time_text, "backward", 4),
    ("device time again", "recompute_device_time", time_text, "recompute", 6),
    ("memory", "memory", bytes_text, "forward", 7),
)
#: Names of columns in the list of dropped ones.
_FULL_NAMES: Final = {
    "backward_flops": "backward FLOPs",
    "backward_time": "backward time",
    "backward_device_time": "backward device time",
}
#: Titles where device time is shown beside host time.
_HOST_NAMES: Final = {"time": "host time", "recompute_time": "host time again"}


def summary(
    trace: Trace, *, module: str | None = None, depth: int | None = None, phase: str | None = None,
    width: int | None = 100, stats: bool | None = None, fold: bool = True,
) -> View:  # fmt: skip
    """The cost table of a trace; ``width`` is its limit in columns, None for no limit."""
    Selection(module=module, depth=depth, phase=phase)  # raises if a filter is wrong
    if width is not None and (type(width) is not int or width < 1):
        raise UsageError(
            f"width={argument_text(width)} must be a whole number from 1 up, or None for no limit."
        )
    if not len(trace.ops) and not len(trace.module_calls):
        return View((line("(nothing was recorded)"), *comment_lines(notes(trace.data))))
    table = _Table(trace, StatisticsIndex(trace.data, stats), fold)
    tops = table.tops(module)
    rows = [row for top in tops for row in table.rows(top, depth)]
    facts = table.facts(tops)

    def fit(room: int | None) -> list[Block]:
        fitted = table.fit(rows, tops, phase, room)
        return [fitted.grid, line(), *facts, *table.notes(fitted, room)]

    if width is None:
        return View(tuple(fit(None)), fixed=True)
    return View(tuple(fit(width)), fit=lambda room: fit(min(room, width)))


@dataclass(frozen=True, slots=True)
class _Row:
    """One row: its scopes, several if they are equal, and whether it shows only their own ops."""

    scopes: tuple[int, ...]
    own: bool
    prefix: str


class _Table:
    """The rows, columns and facts of one summary."""

    def __init__(self, trace: Trace, statistics: StatisticsIndex, fold: bool) -> None:
        self._data: TraceData = trace.data
        self._statistics = statistics
        self._fold = fold
        self._wrong_in = ""  # the phase whose NaN and Inf are shown
        self._several_kinds = False  # whether calls of one module returned tensors of several kinds
        self._costs: Costs = cost_of(trace.data, trace.index.device_own)
        self._use = device_summary(trace.index)
        self._scopes = self._costs.scopes
        self._index = trace.index
        self._exchanges = Exchanges(trace.index)
        self._exchanged: dict[tuple[int, ...], Exchange] = {}
        self._own_ops = own_ops(trace.data, self._scopes)
        self._equal = equal_scopes(trace.data, self._costs, self._own_ops) if fold else []

    # -- rows ----------------------------------------------------------------------------------

    def tops(self, module: str | None) -> list[int]:
        """The outermost scopes to show."""
        if module is None:
            return self._scopes.children(-1)
        matched = matching_modules(self._index, module)
        tops: list[int] = []
        for id, scope in enumerate(self._scopes.rows):
            inside = bool(tops) and id < self._scopes.rows[tops[-1]].end
            if inside or scope.module == OUTSIDE:
                continue
            if matched[scope.module]:
                tops.append(id)
        if not tops:
            raise no_module_matched(module, self._data.modules)
        return tops

    def rows(self, top: int, depth: int | None) -> list[_Row]:
        """A scope's own row, then those of its submodules and its own ops in the order they ran."""
        rows: list[_Row] = []
        stack: list[tuple[tuple[int, ...], bool, str, str]]
        stack = [((top,), False, "", "")]  # not recursive: a model may be deeper than Python's stack
        while stack:
            scopes, own, lead, inner = stack.pop()
            rows.append(_Row(scopes, own or self._scopes.rows[scopes[0]].module == OUTSIDE, lead))
            if own:
                continue
            groups = self._groups(scopes, depth)
            if groups == [scopes]:  # all submodules are too deep to be shown: their sum is this row
                continue
            for group in reversed(groups):
                branch, indent = ("└ ", "  ") if group == groups[-1] else ("├ ", "│ ")
                stack.append((group, group == scopes, inner + branch, inner + indent))
        return rows

    def _groups(self, scopes: tuple[int, ...], depth: int | None) -> list[tuple[int, ...]]:
        """The parts of equal scopes, with equal neighbours in one group."""
        shown = [
            part for part in self._parts(scopes[0]) if part == scopes[0] or not self._too_deep(part, depth)
        ]
        groups: list[list[int]] = []
        for part in shown:
            if groups and part != scopes[0] and self._alike(groups[-1][-1], part):
                groups[-1].append(part)
            else:
                groups.append([part])
        split = [[part] if len(group) < _MIN_LAYERS else group for group in groups for part in group]
        distinct = [group for at, group in enumerate(split) if at == 0 or group != split[at - 1]]
        # The same parts of the other scopes have the same distance from their beginning.
        return [tuple(part - scopes[0] + scope for scope in scopes for part in group) for group in distinct]

    def _alike(self, one: int, other: int) -> bool:
        """Whether two scopes differ only in their position in a list, where they are neighbours."""
        if not self._equal or self._equal[one] != self._equal[other]:
            return False
        paths = [self._data.modules[self._scopes.rows[scope].module].path for scope in (one, other)]
        mine, yours = (path.rpartition(".")[2] for path in paths)
        return mine.isdecimal() and yours.isdecimal() and abs(int(mine) - int(yours)) == 1

    def _parts(self, scope: int) -> list[int]:
        """The parts of a scope, in order: its submodules, and itself for its own ops."""
        parts = [((*self._scopes.rows[child].position, 0), child) for child in self._scopes.children(scope)]
        own = self._own_ops.get(scope)
        if parts and (own or self._costs.parameters[scope].own):
            parts.append(((own.first if own else -1, -1, 1), scope))
        return [part for _, part in sorted(parts)]

    def _too_deep(self, scope: int, depth: int | None) -> bool:
        module = self._scopes.rows[scope].module
        return depth is not None and module >= 0 and module_depth(self._data.modules, module) > depth

    # -- cells ---------------------------------------------------------------------------------

    def _name(self, row: _Row, room: int, whole: bool) -> tuple[Span, ...]:
        """The first cell, ``whole`` with the class; the names of own ops are cut to ``room``."""
        scope = self._scopes.rows[row.scopes[0]]
        lead = Span(row.prefix, "dim")
        if row.own:
            mark = "· outside: " if scope.module == OUTSIDE else "· "
            names = ops_text(self._ops(row), room - len(row.prefix) - len(mark))
            return (lead, Span(mark), Span(names, "op"))
        info = self._data.modules[scope.module]
        if not info.path:
            return (lead, Span(info.type, "module"))
        at_home = scope.parent >= 0 and self._scopes.rows[scope.parent].module == info.parent
        name = info.path.rpartition(".")[2] if at_home and row.prefix else info.path
        if self._is_first_of_several(row):
            last = self._data.modules[self._scopes.rows[row.scopes[-1]].module].path
            name = f"{name}…{last.rpartition('.')[2]}"
        others = [path for path in info.aliases if path != info.path]
        shared = f" shared: {', '.join(others)}" if others else ""
        kind = f" ({info.type})" if whole else ""
        return (lead, Span(name, "module"), Span(kind, "dim"), Span(shared if whole else "", "warn"))

    def _ops(self, row: _Row) -> OwnOps | None:
        """The own ops of all scopes of a row, which is what its other numbers count too."""
        every = [own for scope in row.scopes if (own := self._own_ops.get(scope)) is not None]
        counts = sum((Counter(own.counts) for own in every), Counter[str]())
        return OwnOps(every[0].first, dict(counts)) if every else None

    def _is_first_of_several(self, row: _Row) -> bool:
        """Whether the scopes of a row are neighbours, not the same part of several neighbours."""
        rows = self._scopes.rows
        return len(row.scopes) > 1 and rows[row.scopes[0]].parent == rows[row.scopes[1]].parent

    def _calls(self, row: _Row) -> str:
        if row.own or self._is_container(row.scopes[0]):
            return ""
        return str(sum(len(self._scopes.rows[scope].calls) for scope in row.scopes))

    def _is_container(self, scope: int) -> bool:
        """Whether its submodules were called and it was not, like a `ModuleList`."""
        rows = self._scopes.rows
        return not rows[scope].calls and any(inner.calls for inner in rows[scope : rows[scope].end])

    def _shapes(self, row: _Row, brevity: int, room: int) -> str:
        if row.own or self._is_container(row.scopes[0]):
            return ""
        calls = self._scopes.rows[row.scopes[0]].calls  # those of the others are equal
        if row.scopes not in self._exchanged:
            self._exchanged[row.scopes] = self._exchanges.of(calls)
        exchange = self._exchanged[row.scopes]
        text = exchange.text(brevity) if calls else self._why_not_called(row.scopes[0])
        return text if columns(text) <= room else exchange.fit(room, brevity)

    def _why_not_called(self, scope: int) -> str:
        """The text in place of shapes: compiled code runs without calling the modules in it."""
        top = at = scope
        while at >= 0:
            own = self._own_ops.get(at)
            if own is not None and any(name.startswith(_COMPILED) for name in own.counts):
                return _IN_COMPILED_CODE
            top, at = at, self._scopes.rows[at].parent
        # A whole model that is compiled runs outside every module.
        name = _COMPILED + self._data.modules[self._scopes.rows[top].module].type
        outside = [own for at, own in self._own_ops.items() if self._scopes.rows[at].module == OUTSIDE]
        if any(name in own.counts for own in outside):
            return _IN_COMPILED_CODE
        return _IN_BACKWARD if self._scopes.rows[scope].backward_calls else "not called"

    def _parameters(self, row: _Row) -> str:
        counts = [self._costs.parameters[scope] for scope in row.scopes]
        total = sum(each.own if row.own else each.total for each in counts)
        new = sum(each.own_new if row.own else each.total_new for each in counts)
        if new == total:
            return count_text(total) if total else ""
        return f"({count_text(total)})" if not new else f"{count_text(new)} (+{count_text(total - new)})"

    def _trainable(self, row: _Row) -> str:
        counts = [self._costs.parameters[scope] for scope in row.scopes]
        trainable = sum(each.own_trainable if row.own else each.trainable for each in counts)
        return count_text(trainable) if any(each.own if row.own else each.total for each in counts) else ""

    def _outputs(self, row: _Row) -> ValueStatistics | None:
        """The statistics of a module's outputs: of its first measured result, over all calls.

        Where calls return tensors of several kinds, such as a loss or logits, over those like the first.
        """
        if row.own:
            return None
        kinds: dict[tuple[str, str, int], list[int]] = {}
        for call in (call for scope in row.scopes for call in self._scopes.rows[scope].calls):
            for position, value in enumerate(self._data.calls.outputs_of(call)):
                if self._statistics.one(value) is not None:
                    kinds.setdefault(self._exchanges.kind_of_output(call, position), []).append(value)
                    break
        self._several_kinds |= len(kinds) > 1
        return self._statistics.of(next(iter(kinds.values()), []))

    # -- columns -------------------------------------------------------------------------------

    def _figures(self, rows: Sequence[_Row], tops: Sequence[int], phase: str | None) -> list[Figures]:
        """The columns of numbers that are not empty."""
        counts = parameters_in(self._data, self._scopes, tops)
        figures = []
        scopes = [self._scopes.rows[scope] for row in rows if not row.own for scope in row.scopes]
        if any(len(scope.calls) > 1 for scope in scopes):  # else the facts below say: each called once
            figures.append(Figures("calls", _plain([self._calls(row) for row in rows]), spare=2))
        if counts.total:
            cells = [self._parameters(row) for row in rows]
            figures.append(Figures("params", _plain(cells), count_text(counts.total), spare=1))
        if counts.trainable != counts.total:
            cells = [self._trainable(row) for row in rows]
            figures.append(Figures("trainable", _plain(cells), count_text(counts.trainable), spare=4))
        for title, column, text, belongs, spare in _TALLIED:
            total = self._sum(column, tops)
            if total and (belongs == phase if phase else belongs != "recompute"):
                own, whole = getattr(self._costs.own, column), getattr(self._costs.total, column)
                amounts = [int((own if row.own else whole)[list(row.scopes)].sum()) for row in rows]
                cells = [text(amount) if amount else "" for amount in amounts]
                title = _HOST_NAMES.get(column, title) if self._use else title
                name = _FULL_NAMES.get(column, title)
                figures.append(Figures(title, _plain(cells), text(total), 0 if phase else spare, name))
        return figures + (self._statistics_figures(rows, tops, phase) if self._statistics else [])

    def _statistics_figures(
        self, rows: Sequence[_Row], tops: Sequence[int], phase: str | None
    ) -> list[Figures]:
        """Mean and deviation of outputs, and how many elements are not finite, if any."""
        spreads = [each.spread if each else ("", "") for each in map(self._outputs, rows)]
        figures = [Figures(_SPREAD, _aligned(spreads), spare=3)] if any(mean for mean, _ in spreads) else []
        for each in (phase,) if phase else PHASES:  # the first phase that has any: it began there
            counts = nonfinite_counts(self._data, self._scopes, each)
            if any(counts.in_scopes(tops)) and nonfinite_reported(self._index):
                self._wrong_in = each
                pairs = [counts.in_scopes(row.scopes, own=row.own) for row in rows]
                return [*figures, Figures(_WRONG, [_nonfinite_cell(nans, infs) for nans, infs in pairs])]
        return figures

    def _sum(self, column: str, tops: Sequence[int]) -> int:
        amounts = getattr(self._costs.total, column)
        return sum(int(amounts[top]) for top in tops)

    def fit(
        self, rows: Sequence[_Row], tops: Sequence[int], phase: str | None, room: int | None
    ) -> FittedTable:
        """The table in ``room`` columns."""
        names = [partial(self._name, row) for row in rows]
        shapes = [partial(self._shapes, row) for row in rows]
        return fit_table(names, shapes, self._figures(rows, tops, phase), room)

    # -- facts ---------------------------------------------------------------------------------

    def facts(self, tops: Sequence[int]) -> list[Line]:
        """The totals of the table."""
        counts = parameters_in(self._data, self._scopes, tops)
        lines = [_fact("modules", self._call_facts(tops))] if self._data.modules else []
        whole = list(tops) == self._scopes.children(-1)
        foreign = foreign_parameters_text(self._data) if whole else ""
        if counts.total or foreign:
            own = _parameter_facts(counts) if counts.total else []
            lines.append(_fact("parameters", own, foreign and f"{foreign} to no module above"))
        flops = [("forward", "flops"), ("backward", "backward_flops"), ("recomputed", "recompute_flops")]
        rest = {"host time": [("optimizer", self._costs.optimizer_time)], "device time": []}
        if self._use:
            outside = ("outside every op", self._use.unowned)
            rest["device time"] = [("optimizer", self._costs.optimizer_device_time), outside]
        times = [
            [("recomputed" if name == "recompute" else name, time) for name, time in parts]
            for parts in (self._costs.time_parts(tops), self._costs.time_parts(tops, "device_"))
        ]
        counted = [(name, self._sum(column, tops)) for name, column in flops]
        kinds = (("FLOPs", count_text, counted), ("host time", time_text, times[0]),
                 ("device time", time_text, times[1]))  # fmt: skip
        for title, text, amounts in kinds:
            amounts += rest.get(title, []) if whole else []
            texts = [f"{name} {text(amount)}" for name, amount in amounts if amount]
            missed = uncounted_text(uncounted(self._data, self._scopes, tops)) if title == "FLOPs" else ""
            if missed:
                lines.append(_fact(title, texts, missed))
            else:
                rows = fact_lines("", texts, 0, WIDTH - _MARGIN)
                lines += [_fact("" if at else title, [row.text]) for at, row in enumerate(rows)]
        if self._use:
            lines += [_fact("device", [text]) for text in self._use.texts()]
        compiled = compiled_text(self._data)
        if compiled:
            lines.append(_fact("compiled", [f"{compiled}, which is in no other time here"]))
        memory = self._sum("memory", tops)
        if memory:
            texts = [f"made by forward ops {bytes_text(memory)}", *self._peak(tops), *self._device()]
            lines.append(_fact("memory", texts))
        return lines

    def notes(self, table: FittedTable, room: int | None) -> list[Line]:
        """Which columns were dropped, and what the short forms in the table mean."""
        rows = [cell if isinstance(cell, tuple) else (cell,) for row in table.grid.rows for cell in row]
        cells = [span.text for spans in rows for span in spans if span.text]
        legend = key(cells)
        if any(_SEVERAL.match(text) for text in cells):
            legend.append("0…N: layers that look alike, their sums")
        if any(text.startswith("(") and text.endswith(")") for text in cells):
            legend.append("(N): counted above")
        titles = {column.title for column in table.grid.columns}
        if _SPREAD in titles:
            calls = "calls like the first" if self._several_kinds else "all calls"
            legend.append(f"{_SPREAD}: of what came out, {calls}")
        if _WRONG in titles:
            legend.append(f"{_WRONG}: in the results of {self._wrong_in} ops")
        dropped = [", ".join(table.dropped), str(_WIDER)] if table.dropped else []
        limit = _NO_LIMIT if room is None else room
        elsewhere = wrap_text(note, limit - _MARGIN) if (note := other_threads(self._data)) else []
        return [
            *(_fact("" if at else "threads", [], text) for at, text in enumerate(elsewhere)),
            *fact_lines("no room for", dropped, _MARGIN, limit),
            *fact_lines("key", legend, _MARGIN, limit),
        ]

    def _call_facts(self, tops: Sequence[int]) -> list[str]:
        scopes = [scope for top in tops for scope in self._scopes.rows[top : self._scopes.rows[top].end]]
        whole = list(tops) == self._scopes.children(-1)
        brief = brief_modules(self._data) if whole else {}
        single = {module for same in brief.values() for module in same}
        scopes = [scope for scope in scopes if scope.module not in single]
        called = {scope.module for scope in scopes if scope.calls or scope.backward_calls}
        if not called:
            return ["none called"]
        besides = [f"besides {brief_modules_text(brief)}"] if brief else []
        counts = [len(scope.calls) for scope in scopes if scope.calls]
        backward = sum(scope.backward_calls for scope in scopes)
        if max(counts, default=0) <= 1 and not backward:
            return [f"{len(counts)}, each called once", *besides]
        more = [f"{backward:,} in backward passes"] if backward else []
        return [f"{len(called):,}", f"calls {sum(counts):,}", *more, *besides]

    def _peak(self, tops: Sequence[int]) -> list[str]:
        """The peak of all modules together, where the recording knows when memory was freed."""
        if not len(self._data.allocations) or list(tops) != self._scopes.children(-1):
            return []
        held = held_memory(self._data)
        return [f"peak {bytes_text(held.peak(held.devices[0]).nbytes)}"] if held.devices else []

    def _device(self) -> list[str]:
        devices = {meta.device for meta in self._data.metas}
        return [f"all on {next(iter(devices))}"] if len(devices) == 1 and devices != {"cpu"} else []


def ops_text(ops: OwnOps | None, room: int = OPS_ROOM) -> str:
    """The names of ops with how often each ran, cut to ``room`` columns: ``softmax, @ ×2, …``."""
    if ops is None:
        return "own parameters"
    counts: dict[str, int] = {}
    for name, count in ops.counts.items():
        bare = name.rpartition(".")[2] if name.startswith(("torch.", "Tensor.", "F.")) else name
        counts[bare] = counts.get(bare, 0) + count
    text = ""
    for number, (name, count) in enumerate(counts.items()):
        part = (", " if text else "") + printable(name) + (f" ×{count}" if count > 1 else "")
        rest = len(counts) - number
        if text and columns(text + part) > room - (5 if rest > 1 else 0):
            return f"{text}, +{rest}"
        text += part
    return text


def _parameter_facts(counts: Parameters) -> list[str]:
    parts = [f"{counts.total:,} ({bytes_text(counts.bytes)})", f"trainable {counts.trainable:,}"]
    if counts.trainable != counts.total:
        parts.append(f"not trainable {counts.total - counts.trainable:,}")
    if counts.buffers:
        parts.append(f"buffers {counts.buffers:,}")
    return parts


def _fact(title: str, parts: Sequence[str], warning: str = "") -> Line:
    between = " · " if parts and warning else ""
    return line((f"{title:<{_MARGIN}}", "dim"), " · ".join(parts), between, (warning, "warn"), hang=_MARGIN)


def _aligned(spreads: Sequence[tuple[str, str]]) -> list[Cell]:
    """Means and deviations with every ``±`` in one column."""
    right = max(columns(deviation) for _, deviation in spreads)
    cells: list[Cell] = []
    for mean, deviation in spreads:
        rest = f" ± {deviation:<{right}}" if deviation else " " * (right + 3 if right else 0)
        style = dict(WRONG).get(mean, "")
        cells.append(Span(mean + rest if mean else "", style))
    return cells


def _plain(texts: Sequence[str]) -> list[Cell]:
    return [Span(text) for text in texts]


def _nonfinite_cell(nans: int, infs: int) -> Cell:
    """``14 NaN 3 Inf``, in highlighted spans."""
    spans = [
        Span(f"{count_text(count)} {name}", style)
        for count, (name, style) in zip((nans, infs), WRONG, strict=True)
        if count
    ]
    return (spans[0], Span(" "), spans[1]) if len(spans) == 2 else spans[0] if spans else Span("")
