"""``summary()``: the table of what each module did and what it cost.

One row per module in the order they first ran, and one row for the operations a container runs itself,
between its submodules: nothing is left out, so the rows inside a module add up to its own numbers. What an
earlier row has counted already, a shared parameter, stands in parentheses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sightline.analysis.cost import Costs, Parameters, cost_of, parameters_in
from sightline.analysis.scopes import OUTSIDE, OwnOps, own_ops
from sightline.analysis.select import Selection, nearest
from sightline.errors import NothingMatched
from sightline.notation import bytes_text, count_text, time_text
from sightline.patterns import path_matches
from sightline.trace.data import ModuleInfo, TraceData
from sightline.views.outline import Cell, Column, Grid, Line, Span, View, cut, grid, line, printable
from sightline.views.outline import width as columns
from sightline.views.shapes import FULL, SHORT, SHORTEST, Exchange, Exchanges

if TYPE_CHECKING:
    from sightline.api import Trace

_OPS_ROOM: Final = 40  #: op names are cut here: the longest list must not set the width of the table
_OPS_LEAST: Final = 32  #: below this, shapes are written shorter to make room for op names
_NO_LIMIT: Final = 10_000
_LEAST_NAME: Final = 22  #: columns are not cut narrower than this; the table sticks out instead
_LEAST_SHAPES: Final = 20
_GOOD_SHAPES: Final = 28  #: shapes are more worth than class names, up to here

#: Costs that come from the tally: title, column, how it is written, the phases it belongs to.
_TALLIED: Final[tuple[tuple[str, str, Callable[[float], str], str], ...]] = (
    ("FLOPs", "flops", count_text, "forward"),
    ("bwd", "backward_flops", count_text, "backward"),
    ("FLOPs again", "recompute_flops", count_text, "recompute"),
    ("time", "time", time_text, "forward"),
    ("bwd", "backward_time", time_text, "backward"),
    ("time again", "recompute_time", time_text, "recompute"),
    ("memory", "memory", bytes_text, "forward"),
)


def summary(
    trace: Trace, *, module: str | None = None, depth: int | None = None, phase: str | None = None,
    width: int | None = 100,
) -> View:  # fmt: skip
    """The cost table of a trace; ``width`` is the columns it has, None for all it wants."""
    Selection(module=module, depth=depth, phase=phase)  # says what is wrong with a filter, if anything is
    table = _Table(trace)
    tops = table.tops(module)
    rows = [row for top in tops for row in table.rows(top, depth)]
    return View((table.laid_out(rows, tops, phase, width), line(), *table.facts(tops)))


@dataclass(frozen=True, slots=True)
class _Row:
    """One row: the scope it is about, and whether it is about the scope's own part only."""

    scope: int
    own: bool
    prefix: str


class _Table:
    """The rows, columns and facts of one summary."""

    def __init__(self, trace: Trace) -> None:
        self._data: TraceData = trace.data
        self._costs: Costs = cost_of(trace.data)
        self._scopes = self._costs.scopes
        self._exchanges = Exchanges(trace.index)
        self._exchanged: dict[int, Exchange] = {}
        self._own_ops = own_ops(trace.data, self._scopes)

    # -- rows ----------------------------------------------------------------------------------

    def tops(self, module: str | None) -> list[int]:
        """The outermost scopes to show."""
        if module is None:
            return self._scopes.children(-1)
        found: list[int] = []
        for id, scope in enumerate(self._scopes.rows):
            inside = bool(found) and id < self._scopes.rows[found[-1]].end
            if not inside and scope.module != OUTSIDE and _meant(self._data.modules[scope.module], module):
                found.append(id)
        if not found:
            known = nearest(module, (path for info in self._data.modules for path in info.aliases))
            raise NothingMatched(f"module={module!r} matches no module of this trace{known}")
        return found

    def rows(self, scope: int, depth: int | None, lead: str = "", inner: str = "") -> list[_Row]:
        """A scope's own row, then those of its submodules and its own ops in the order they ran."""
        parts = [part for part in self._parts(scope) if part == scope or not self._too_deep(part, depth)]
        rows = [_Row(scope, self._scopes.rows[scope].module == OUTSIDE, lead)]
        if parts == [scope]:  # its submodules are too deep to be shown: then it stands for all of it
            return rows
        for part in parts:
            last = part == parts[-1]
            prefix = inner + ("└ " if last else "├ ")
            if part == scope:
                rows.append(_Row(scope, True, prefix))
            else:
                rows += self.rows(part, depth, prefix, inner + ("  " if last else "│ "))
        return rows

    def _parts(self, scope: int) -> list[int]:
        """What a scope consists of, in order: its submodules, and itself for its own part."""
        placed = [((*self._scopes.rows[child].position, 0), child) for child in self._scopes.children(scope)]
        own = self._own_ops.get(scope)
        if placed and (own or self._costs.parameters[scope].own):
            placed.append(((own.first if own else -1, -1, 1), scope))
        return [part for _, part in sorted(placed)]

    def _too_deep(self, scope: int, depth: int | None) -> bool:
        path = self._data.modules[self._scopes.rows[scope].module].path
        return depth is not None and bool(path) and path.count(".") + 1 > depth

    # -- cells ---------------------------------------------------------------------------------

    def _name(self, row: _Row, room: int) -> tuple[Span, ...]:
        """The first cell; the names of a container's own ops take as much room as there is."""
        scope = self._scopes.rows[row.scope]
        lead = Span(row.prefix, "dim")
        if row.own:
            mark = "· outside: " if scope.module == OUTSIDE else "· "
            names = ops_text(self._own_ops.get(row.scope), room - len(row.prefix) - len(mark))
            return (lead, Span(mark), Span(names, "op"))
        info = self._data.modules[scope.module]
        if not info.path:
            return (lead, Span(info.type, "module"))
        at_home = scope.parent >= 0 and self._scopes.rows[scope.parent].module == info.parent
        name = info.path.rpartition(".")[2] if at_home and row.prefix else info.path
        others = [path for path in info.aliases if path != info.path]
        shared = f" shared: {', '.join(others)}" if others else ""
        return (lead, Span(name, "module"), Span(f" ({info.type})", "dim"), Span(shared, "warn"))

    def _calls(self, row: _Row) -> str:
        return "" if row.own or self._only_holds(row.scope) else str(len(self._scopes.rows[row.scope].calls))

    def _only_holds(self, scope: int) -> bool:
        """Whether submodules of it were called and it was not, like a `ModuleList`."""
        rows = self._scopes.rows
        return not rows[scope].calls and any(inner.calls for inner in rows[scope : rows[scope].end])

    def _shapes(self, row: _Row, brevity: int) -> str:
        if row.own or self._only_holds(row.scope):
            return ""
        calls = self._scopes.rows[row.scope].calls
        if row.scope not in self._exchanged:
            self._exchanged[row.scope] = self._exchanges.of(calls)
        return self._exchanged[row.scope].text(brevity) if calls else "not called"

    def _parameters(self, row: _Row) -> str:
        counts = self._costs.parameters[row.scope]
        total, new = (counts.own, counts.own_new) if row.own else (counts.total, counts.total_new)
        if new == total:
            return count_text(total) if total else ""
        return f"({count_text(total)})" if not new else f"{count_text(new)} (+{count_text(total - new)})"

    def _trainable(self, row: _Row) -> str:
        counts = self._costs.parameters[row.scope]
        total = counts.own if row.own else counts.total
        return count_text(counts.own_trainable if row.own else counts.trainable) if total else ""

    # -- columns -------------------------------------------------------------------------------

    def _numbers(
        self, rows: Sequence[_Row], tops: Sequence[int], phase: str | None
    ) -> list[tuple[str, list[str], str]]:
        """The columns of numbers that have any: title, cells, total."""
        counts = parameters_in(self._data, self._scopes, tops)
        found = []
        calls = [self._calls(row) for row in rows]
        if not set(calls) <= {"", "0", "1"}:  # else the facts below say that each was called once
            found.append(("calls", calls, ""))
        if counts.total:
            found.append(("params", [self._parameters(row) for row in rows], count_text(counts.total)))
        if counts.trainable != counts.total:
            found.append(("trainable", [self._trainable(row) for row in rows], count_text(counts.trainable)))
        for title, column, text, belongs in _TALLIED:
            total = self._sum(column, tops)
            if total and (belongs == phase if phase else belongs != "recompute"):
                own, whole = getattr(self._costs.own, column), getattr(self._costs.total, column)
                amounts = [int((own if row.own else whole)[row.scope]) for row in rows]
                found.append((title, [text(amount) if amount else "" for amount in amounts], text(total)))
        return found

    def _sum(self, column: str, tops: Sequence[int]) -> int:
        amounts = getattr(self._costs.total, column)
        return sum(int(amounts[top]) for top in tops)

    def laid_out(
        self, rows: Sequence[_Row], tops: Sequence[int], phase: str | None, room: int | None
    ) -> Grid:
        """The table in the room there is: shapes are written shorter first, then cells are cut."""
        numbers = self._numbers(rows, tops, phase)
        taken = sum(2 + max(map(columns, (title, total, *cells))) for title, cells, total in numbers)
        left = None if room is None else room - taken - 2
        names = [self._name(row, _OPS_LEAST) for row in rows]
        shapes: list[str] = []
        for brevity in (FULL, SHORT, SHORTEST):
            shapes = [self._shapes(row, brevity) for row in rows]
            if left is None or _widest(names) + _widest(shapes) <= left:
                break
        else:
            for_names, for_shapes = _shares(_widest(names), _widest(shapes), left or 0)
            names = [_cut(self._name(row, for_names), for_names) for row in rows]
            return _grid(names, [cut(shape, for_shapes) for shape in shapes], numbers)
        spare = _NO_LIMIT if left is None else min(left - _widest(shapes), _OPS_ROOM)
        return _grid([self._name(row, spare) for row in rows], shapes, numbers)

    # -- facts ---------------------------------------------------------------------------------

    def facts(self, tops: Sequence[int]) -> list[Line]:
        """What the table adds up to, in words."""
        counts = parameters_in(self._data, self._scopes, tops)
        made = [_fact("modules", self._call_facts(tops))] if self._data.modules else []
        if counts.total:
            made.append(_fact("parameters", _parameter_facts(counts)))
        flops = [("forward", "flops"), ("backward", "backward_flops"), ("recomputed", "recompute_flops")]
        times = [("forward", "time"), ("backward", "backward_time"), ("recomputed", "recompute_time")]
        for title, text, parts in (("FLOPs", count_text, flops), ("host time", time_text, times)):
            amounts = [(name, self._sum(column, tops)) for name, column in parts]
            if title == "host time" and list(tops) == self._scopes.children(-1):
                amounts.append(("optimizer", self._costs.optimizer_time))
            told = [f"{name} {text(amount)}" for name, amount in amounts if amount]
            if told:
                made.append(_fact(title, told))
        memory = self._sum("memory", tops)
        if memory:
            made.append(_fact("memory", [f"made by forward ops {bytes_text(memory)}", *self._device()]))
        return made

    def _call_facts(self, tops: Sequence[int]) -> list[str]:
        scopes = [scope for top in tops for scope in self._scopes.rows[top : self._scopes.rows[top].end]]
        counts = [len(scope.calls) for scope in scopes if scope.calls]
        if max(counts, default=0) <= 1:
            return [f"{len(counts)}, each called once"]
        return [str(len({scope.module for scope in scopes if scope.calls})), f"calls {sum(counts):,}"]

    def _device(self) -> list[str]:
        devices = {meta.device for meta in self._data.metas}
        return [f"all on {next(iter(devices))}"] if len(devices) == 1 and devices != {"cpu"} else []


def _meant(info: ModuleInfo, pattern: str) -> bool:
    paths = info.aliases or (info.path,)
    return any(path_matches(pattern, path) for path in paths) or (not info.path and info.type == pattern)


def ops_text(ops: OwnOps | None, room: int = _OPS_ROOM) -> str:
    """The names of ops with how often each ran, cut to the room: ``softmax, @ ×2, …``."""
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
    told = [f"{counts.total:,} ({bytes_text(counts.bytes)})", f"trainable {counts.trainable:,}"]
    if counts.trainable != counts.total:
        told.append(f"not trainable {counts.total - counts.trainable:,}")
    if counts.buffers:
        told.append(f"buffers {counts.buffers:,}")
    return told


def _fact(title: str, told: Sequence[str]) -> Line:
    return line((f"{title:<12}", "dim"), " · ".join(told))


def _grid(
    names: Sequence[Cell], shapes: Sequence[str], numbers: Sequence[tuple[str, list[str], str]]
) -> Grid:
    shaped = any(shapes)
    titles = [Column("module"), *([Column("input → output")] if shaped else [])]
    titles += [Column(title, right=True) for title, _, _ in numbers]
    rows: list[list[Cell]] = []
    for at, name in enumerate(names):
        cells: list[Cell] = [name, *([Span(shapes[at], "shape")] if shaped else [])]
        rows.append([*cells, *(Span(column[at]) for _, column, _ in numbers)])
    foot: list[Cell] = [Span("total", "title"), *([Span("")] if shaped else [])]
    return grid(titles, rows, [*foot, *(Span(total, "title") for _, _, total in numbers)])


def _width(text: str | Sequence[Span]) -> int:
    spans = (Span(text),) if isinstance(text, str) else text
    return sum(columns(printable(span.text)) for span in spans)


def _widest(texts: Sequence[str] | Sequence[tuple[Span, ...]]) -> int:
    return max(map(_width, texts), default=0)


def _shares(names: int, shapes: int, room: int) -> tuple[int, int]:
    """How wide the two text columns may be; class names go before sizes."""
    for_shapes = min(shapes, max(_GOOD_SHAPES, room - names))
    for_names = min(names, max(_LEAST_NAME, room - for_shapes))
    return for_names, max(_LEAST_SHAPES, room - for_names)


def _cut(spans: tuple[Span, ...], room: int) -> tuple[Span, ...]:
    """The spans in the room there is, with ``…`` where something is missing."""
    if _width(spans) <= room:
        return spans
    kept: list[Span] = []
    for span in spans:
        wide = _width((span,))
        if wide >= room:  # nothing may follow without a sign that something is missing
            return (*kept, Span(cut(span.text + " ", room), span.style))
        kept.append(span)
        room -= wide
    return tuple(kept)
