"""``t.lineage(value)``: the origin of a value, the most recent op first.

    $105 f32[2, 4, 3]   torch.log      return torch.log(y)   net.py:34  Net
    $104 f32[2, 4, 3]   F.linear       y = self.head(x)      net.py:33  head
         parameters head.weight f32[3, 8], head.bias f32[3]
    $100 f32[2, 4, 8]   +              return x + h          net.py:24  blocks.1
    ├ $98 f32[2, 4, 8]  Tensor.relu_   h.relu_()             net.py:23  blocks.1
    │     in place on $97

Each value was computed from the next. Branches stand in between, indented; a branch that ends in a value
further down shows it: ``↓ $93``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sightline.analysis.lineage import DEPTH, MOST, Lineage, LineageStep, lineage_of
from sightline.analysis.op_text import statistics_text
from sightline.analysis.running_statistics import RunningStatistics
from sightline.analysis.value_names import find_value
from sightline.data.index import Index, Value
from sightline.hints import Hint
from sightline.notation import position_text, value_text
from sightline.views.rendering import WIDTH, Line, Span, View, cut, cut_end, line, printable, width
from sightline.views.source_chain import PHASE_MARKS

_GAP: Final = "  "
_CODE: Final = 24  #: the source line gets the columns that are left, but at least these
_CODE_MIN: Final = 12  #: on a narrow terminal these, or none
_MAX_NAMED: Final = 4  #: how many values are listed by name
_OUTDATED: Final = "updated since it was measured"
_MAX_PATH: Final = 5  #: values of a path that are written out


@dataclass(frozen=True)
class LineageView(View):
    """The text of a lineage, and the lineage itself: ``.nodes``, ``.edges`` and ``.to_networkx()``."""

    lineage: Lineage = field(repr=False)

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """Every value in it, as plain data."""
        return self.lineage.nodes

    @property
    def edges(self) -> list[dict[str, Any]]:
        """From each value to those computed from it, as plain data."""
        return self.lineage.edges

    def to_networkx(self) -> Any:
        """A ``networkx.DiGraph`` of value ids."""
        return self.lineage.to_networkx()

    def __repr__(self) -> str:
        return str(self)


def lineage(
    index: Index, value: Any, *, depth: int | None = None, level: str | None = None, everything: bool = False,
) -> LineageView:  # fmt: skip
    """The origin of a value; see `Trace.lineage` for the options."""
    target = find_value(index, value)
    row = target.value
    most = MOST if depth is None else None
    # A row of an earlier snapshot belongs to that one.
    history = lineage_of(row._data, row.id, depth=DEPTH if depth is None else depth, level=level, most=most,
                         everything=everything)  # fmt: skip
    head, foot = [], []
    if target.set_by is not None:  # the source line that assigned the value to a variable
        name, frame = str(value), target.set_by
        code = cut(frame.code, WIDTH - width(name) - width(frame.position) - 20)
        position = (frame.position, "dim")
        head = [line((name, "title"), " was last set at ", position, ": ", (code, "code"), hang=5)]
    if history.excluded:
        values = f"{history.excluded:,} value{'' if history.excluded == 1 else 's'}"
        text = f"# left out: the origin of {values}, outside the model; {Hint.option('all')} shows it"
        foot = [line((text, "dim"), hang=2)]

    def fit(room: int) -> list[Line]:
        return [*head, *_origin_lines(history, room), *lineage_lines(history, room), *foot]

    return LineageView(tuple(fit(WIDTH)), history, fit=fit)


def _origin_lines(lineage: Lineage, room: int) -> Iterator[Line]:
    """``size 61 first appears at net.py:13, Tensor.unfold of f32[4, 1024]: $59 ← $53``."""
    values = lineage.index.values
    for origin in lineage.origins:
        path = [value_text(value) for value in origin.path]
        chain = " ← ".join(path if len(path) <= _MAX_PATH else [*path[:2], f"{len(path) - 3} more", path[-1]])
        place = position_text(origin.file, origin.line).rpartition("/")[2] if origin.file else ""
        given = ", ".join(dict.fromkeys(str(values[source]) for source in origin.sources))
        producer = f"{origin.name or 'a view'}{f' of {given}' if given else ''}"
        if not origin.name and not origin.sources:
            place, producer = "", f"with {_leaf_text(values[origin.path[-1]])}"
        position = f"{' at' if place else ''} {printable(place)}{', ' if place else ''}"
        head = f"{origin.trait} first appears{position}{producer}"
        yield line((cut(head, max(room - width(chain) - 2, len(place) + 30)), "warn"), f": {chain}", hang=2)


def lineage_lines(lineage: Lineage, room: int) -> list[Line]:
    """The lines of a lineage, at most ``room`` columns wide."""
    if not lineage.steps:
        value = lineage.index.values[lineage.value]
        alone = [Span(value_text(value.id)), Span(f" {value}", "shape"), Span(f"  {_leaf_text(value)}")]
        updated = value.kind == "buffer" and RunningStatistics(lineage.index).updates.get(value.id)
        numbers = _OUTDATED if updated else statistics_text(value)
        return [Line((*alone, *([Span(f"{_GAP}{numbers}", _style(value))] if numbers else [])), hang=5)]
    return _LineageTable(lineage, room).lines()


@dataclass(frozen=True, slots=True)
class _Row:
    """One step: its indentation and its cells."""

    first: str  #: prefix of its own line
    rest: str  #: prefix of its notes
    step: LineageStep
    value: str
    op: str
    place: str


class _LineageTable:
    """A lineage as lines of columns, each as wide as it needs and the room allows."""

    def __init__(self, lineage: Lineage, room: int) -> None:
        self._lineage = lineage
        self._room = room
        self._index: Index = lineage.index
        self._running = RunningStatistics(lineage.index)
        self._rows = list(self._layout())
        columns = [
            [row.first + row.value for row in self._rows],
            [row.op for row in self._rows],
            [row.place for row in self._rows],
            [printable(row.step.module) for row in self._rows],
        ]
        self._widths = [max(map(width, column)) for column in columns]
        needed = max(width(printable(row.step.code)) for row in self._rows)
        gaps = len(_GAP) * (sum(have > 0 for have in self._widths) - (not needed))
        least = min(needed, _CODE) if room >= WIDTH else 0
        shrinkable = [0, 1, 3] if sum(self._widths[2:3]) < room - _CODE_MIN else [0, 1, 2, 3]
        while sum(self._widths) + gaps > room - least:  # the widest shrinks, but not the line number
            widest = max(shrinkable, key=lambda at: self._widths[at])
            if self._widths[widest] <= 0:
                break
            self._widths[widest] -= 1
        left = room - sum(self._widths) - gaps
        self._code = min(needed, left) if left >= min(needed, _CODE_MIN) else 0

    def lines(self) -> list[Line]:
        lines = []
        for row in self._rows:
            lines.append(self._line(row))
            lines += self._notes(row)
        return lines

    def _layout(self) -> Iterator[_Row]:
        """The steps in order, each branch before the trunk goes on."""
        stack = [(0, "", "")]
        while stack:
            at, first, rest = stack.pop()
            step = self._lineage.steps[at]
            place = position_text(step.file, step.line).rpartition("/")[2] if step.file else ""
            op = f"{step.name} (module)"
            if step.call < 0:
                mark = "" if step.name.endswith(" backward") else PHASE_MARKS.get(step.phase, "")
                op = mark + (step.name or "view")
            ids = sorted(step.values)  # $26,$27 f32[2, 4, 8]: the results, with the shape of the first
            if len(ids) > 2 and ids[-1] - ids[0] == len(ids) - 1:
                values = f"{value_text(ids[0])}…{value_text(ids[-1])}"
            else:
                values = ",".join(value_text(value) for value in step.values[:3])
                values += f"+{len(ids) - 3}" if len(ids) > 3 else ""
            values = printable(f"{values} {self._index.values[step.values[0]]}")
            yield _Row(first, rest, step, values, printable(op), printable(place))
            for number, child in reversed(list(enumerate(step.children))):
                trunk = number == len(step.children) - 1
                stack.append((child, rest, rest) if trunk else (child, f"{rest}├ ", f"{rest}│ "))

    def _line(self, row: _Row) -> Line:
        value, op, place, module = self._widths
        shown = cut(row.first + row.value, value)[len(row.first) :]
        ids, _, shape = shown.partition(" ")
        pad = Span(" " * (value - width(row.first + shown)) + _GAP)
        spans = [Span(ids, "title"), Span(f" {shape}" if shape else "", "shape"), pad]
        for text, room, style in (
            (cut(row.op, op), op, "op"),
            (cut(row.step.code, self._code), self._code, "code"),
            (cut(row.place, place), place, "dim"),
            (cut_end(row.step.module, module), module, "module"),
        ):
            if room:
                spans += [Span(text, style), Span(" " * (room - width(text)) + _GAP)]
        return Line(tuple(spans[:-1]), row.first)

    def _notes(self, row: _Row) -> list[Line]:
        """Names, statistics, shared memory, and inputs without a line of their own."""
        step = row.step
        indent = row.rest + " " * 5
        values = [self._index.values[id] for id in step.values]
        names = [Span(value.name, "title") for value in values if value.name][:_MAX_NAMED]
        statistics = []
        for value in values[:_MAX_NAMED]:
            if text := statistics_text(value):
                text = f"{value_text(value.id)}: {text}" if len(values) > 1 else text
                statistics.append(Span(text, _style(value)))
        sharing = []
        shared = self._shared(step)
        if shared is not None:
            how = "view of" if values[0].previous is None else "in place on"
            sharing = [Span(f"{how} {_value_name(shared)}", "dim")]
        groups = [names, statistics, sharing, *self._inputs(step, shared)]
        lines: list[Line] = []
        spans: list[Span] = []
        used = 0
        for group in groups:
            for number, part in enumerate(group):
                part = Span(cut(part.text, self._room - width(indent) - 1), part.style)
                if spans:
                    spans.append(Span(", " if number else "; ", "dim"))
                    used += 2
                if used + width(part.text) >= self._room - width(indent) and spans:
                    lines.append(Line(tuple(spans), indent))
                    spans, used = [], 0
                spans.append(part)
                used += width(part.text)
        return [*lines, Line(tuple(spans), indent)] if spans else lines

    def _shared(self, step: LineageStep) -> Value | None:
        """The version of the first result before an in-place op, or else the input it is a view of."""
        value = self._index.values[step.values[0]]
        inputs = {*step.sources, *step.leaves, *step.cut, *step.saved}
        base = value.previous or value.base
        while base is not None and base.id not in inputs:  # produced inside the same call
            base = base.previous or base.base
        return value.previous or base

    def _inputs(self, step: LineageStep, shared: Value | None) -> Iterator[list[Span]]:
        """The inputs without a line below: leaves, saved values, and those that are further back."""
        shown = -1 if shared is None else shared.id
        leaves = [self._index.values[id] for id in step.leaves if id != shown]
        for kind in dict.fromkeys(leaf.kind for leaf in leaves):
            chosen = [leaf for leaf in leaves if leaf.kind == kind]
            outdated = {leaf.id for leaf in chosen if self._running.is_outdated(leaf.id, step.op)}
            plural = kind if kind in ("state", "external", "evicted") else f"{kind}s"
            prefix = f"{kind if len(chosen) == 1 else plural} "
            spans: list[Span] = []
            for leaf in chosen[:_MAX_NAMED]:  # parameters fc.weight f32[3, 8], fc.bias f32[3]
                text = f"{'' if spans else prefix}{_value_name(leaf)} {leaf}"
                statistics = _OUTDATED if leaf.id in outdated else statistics_text(leaf)
                bad = leaf.stats is not None and not leaf.stats.finite
                style = "error" if bad else "warn" if kind in ("external", "evicted") else ""
                spans.append(Span(f"{text} ({statistics})" if statistics else text, style))
            yield [*spans, *_more(len(chosen))]
        below = {id for child in step.children for id in self._lineage.steps[child].values}
        yield self._list("↓ ", [id for id in step.sources if id not in below and id != shown])
        yield self._list("saved ", step.saved)
        if step.cut:
            many = "op" if step.before == 1 else "ops"
            names = ", ".join(value_text(id) for id in step.cut[:_MAX_NAMED])
            more = f" and {len(step.cut) - _MAX_NAMED} more" if len(step.cut) > _MAX_NAMED else ""
            yield [Span(f"… {step.before:,} {many} before {names}{more}", "dim")]

    def _list(self, prefix: str, ids: Sequence[int]) -> list[Span]:
        names = [_value_name(self._index.values[id]) for id in ids[:_MAX_NAMED]]
        return [
            *(Span(f"{'' if at else prefix}{name}", "dim") for at, name in enumerate(names)),
            *_more(len(ids)),
        ]


def _more(count: int) -> Iterator[Span]:
    if count > _MAX_NAMED:
        yield Span(f"{count - _MAX_NAMED} more", "dim")


def _value_name(value: Value) -> str:
    """The name of a parameter, else the id."""
    return value.name or value_text(value.id)


def _leaf_text(value: Value) -> str:
    return f"{value.kind} {value.name}" if value.name else value.kind


def _style(value: Value) -> str:
    numbers = value.stats
    return "error" if numbers is not None and not numbers.finite else "number"
