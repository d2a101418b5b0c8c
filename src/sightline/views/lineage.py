"""``t.lineage(value)``: what a value came from, the most recent op first.

    $105 f32[2, 4, 3]   torch.log      return torch.log(y)   net.py:34  Net
    $104 f32[2, 4, 3]   F.linear       y = self.head(x)      net.py:33  head
         parameters head.weight f32[3, 8], head.bias f32[3]
    $100 f32[2, 4, 8]   +              return x + h          net.py:24  blocks.1
    ├ $98 f32[2, 4, 8]  Tensor.relu_   h.relu_()             net.py:23  blocks.1
    │     in place on $97

Each line is made from the next. What branches off stands between, indented; a branch that ends in a value
further down says so: ``↓ $93``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sightline.analysis.find_value import find_value
from sightline.analysis.lineage import DEPTH, MOST, Lineage, Making, lineage_of
from sightline.notation import position_text, value_text
from sightline.trace.index import Frame, Index, Value
from sightline.trace.user_frames import statistics_text
from sightline.views.outline import Line, Span, View, cut, line, printable, width

if TYPE_CHECKING:
    from sightline.api import Trace

WIDTH: Final = 100
_GAP: Final = "  "
_CODE: Final = 24  #: the source line has what the other columns leave, but this at least
_CODE_LEAST: Final = 12  #: on a narrow terminal this, or nothing: the other columns say more
_NAMED: Final = 4  #: as many values are named one by one
_MARKS: Final = {"backward": "⟵ ", "recompute": "↺ "}


@dataclass(frozen=True)
class LineageView(View):
    """The text of a lineage, and the lineage itself: ``.nodes``, ``.edges`` and ``.to_networkx()``."""

    lineage: Lineage = field(repr=False)

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """Every value told of, as plain data."""
        return self.lineage.nodes

    @property
    def edges(self) -> list[dict[str, Any]]:
        """From each value to those made from it, as plain data."""
        return self.lineage.edges

    def to_networkx(self) -> Any:
        """A ``networkx.DiGraph`` of value ids."""
        return self.lineage.to_networkx()

    def __repr__(self) -> str:
        return str(self)


def lineage(
    trace: Trace, value: Any, *, depth: int | None = None, ops: str | None = None, everything: bool = False,
    more: str = "everything=True shows it",
) -> LineageView:  # fmt: skip
    """What a value came from; see `Trace.lineage` for the options."""
    wanted = find_value(trace.index, value)
    row = wanted.value
    index = row._data  # a row of an earlier snapshot belongs to that one
    most = MOST if depth is None else None
    told = lineage_of(index, row.id, depth=DEPTH if depth is None else depth, ops=ops, most=most,
                      everything=everything)  # fmt: skip
    head = [] if wanted.set_by is None else [_set_text(str(value), wanted.set_by)]

    foot = [] if not told.left_out else [_left_out(told.left_out, more)]

    def made(room: int) -> list[Line]:
        return [*head, *lineage_lines(told, room), *foot]

    return LineageView(tuple(made(WIDTH)), told, fit=made)


def _left_out(count: int, more: str) -> Line:
    """That some values are taken as they are."""
    values = f"{count:,} value{'' if count == 1 else 's'}"
    return line((f"# left out: what made {values}, outside the model; {more}", "dim"), hang=2)


def _set_text(name: str, frame: Frame) -> Line:
    """Which line gave a variable the value that is told of."""
    code = cut(frame.code, WIDTH - width(name) - width(frame.position) - 20)
    return line((name, "title"), " was last set at ", (frame.position, "dim"), ": ", (code, "code"), hang=5)


def lineage_lines(told: Lineage, room: int) -> list[Line]:
    """The lines of a lineage, at most ``room`` columns wide."""
    if not told.makings:
        value = told.index.values[told.value]
        alone = [Span(value_text(value.id)), Span(f" {value}", "shape"), Span(f"  {_leaf_text(value)}")]
        numbers = statistics_text(value)
        return [Line((*alone, *([Span(f"{_GAP}{numbers}", _style(value))] if numbers else [])), hang=5)]
    return _Text(told, room).lines()


@dataclass(frozen=True, slots=True)
class _Row:
    """One making about to be written: how far in, and its cells."""

    first: str  #: what its own line begins with
    rest: str  #: what its notes begin with
    making: Making
    value: str
    op: str
    place: str


class _Text:
    """A lineage as lines of columns, each as wide as needed and there is room for."""

    def __init__(self, told: Lineage, room: int) -> None:
        self._told = told
        self._room = room
        self._index: Index = told.index
        self._rows = list(self._laid())
        columns = [
            [row.first + row.value for row in self._rows],
            [row.op for row in self._rows],
            [row.place for row in self._rows],
            [printable(row.making.module) for row in self._rows],
        ]
        self._widths = [max(map(width, column)) for column in columns]
        needed = max(width(printable(row.making.code)) for row in self._rows)
        gaps = len(_GAP) * (sum(have > 0 for have in self._widths) - (not needed))
        least = min(needed, _CODE) if room >= WIDTH else 0
        giving = [0, 1, 3] if sum(self._widths[2:3]) < room - _CODE_LEAST else [0, 1, 2, 3]
        while sum(self._widths) + gaps > room - least:  # the widest gives way, but never the line number
            widest = max(giving, key=lambda at: self._widths[at])
            if self._widths[widest] <= 0:
                break
            self._widths[widest] -= 1
        left = room - sum(self._widths) - gaps
        self._code = min(needed, left) if left >= min(needed, _CODE_LEAST) else 0

    def lines(self) -> list[Line]:
        made = []
        for row in self._rows:
            made.append(self._line(row))
            made += self._notes(row)
        return made

    def _laid(self) -> Iterator[_Row]:
        """The makings in the order they are told, each branch before what the trunk goes on with."""
        stack = [(0, "", "")]
        while stack:
            at, first, rest = stack.pop()
            making = self._told.makings[at]
            place = position_text(making.file, making.line).rpartition("/")[2] if making.file else ""
            yield _Row(first, rest, making, self._values(making), self._op(making), printable(place))
            for number, child in reversed(list(enumerate(making.children))):
                trunk = number == len(making.children) - 1
                stack.append((child, rest, rest) if trunk else (child, f"{rest}├ ", f"{rest}│ "))

    def _values(self, making: Making) -> str:
        """``$26,$27 f32[2, 4, 8]``: what was made, with the looks of the first."""
        ids = sorted(making.values)
        if len(ids) > 2 and ids[-1] - ids[0] == len(ids) - 1:
            told = f"{value_text(ids[0])}…{value_text(ids[-1])}"
        else:
            told = ",".join(value_text(value) for value in making.values[:3])
            told += f"+{len(ids) - 3}" if len(ids) > 3 else ""
        return printable(f"{told} {self._index.values[making.values[0]]}")

    def _op(self, making: Making) -> str:
        if making.call >= 0:
            return printable(f"{making.name} (module)")
        mark = "" if making.name.endswith(" backward") else _MARKS.get(making.phase, "")
        return printable(mark + (making.name or "view"))

    def _line(self, row: _Row) -> Line:
        value, op, place, module = self._widths
        shown = cut(row.first + row.value, value)[len(row.first) :]
        ids, _, looks = shown.partition(" ")
        cells = [
            (
                width(row.first + shown),
                value,
                [Span(ids, "title"), Span(f" {looks}" if looks else "", "shape")],
            ),
            *(
                (width(text), room, [Span(text, style)])
                for text, room, style in (
                    (cut(row.op, op), op, "op"),
                    (cut(row.making.code, self._code), self._code, "code"),
                    (cut(row.place, place), place, "dim"),
                    (_tail(row.making.module, module), module, "module"),
                )
                if room
            ),
        ]
        spans: list[Span] = []
        for used, room, texts in cells:
            spans += [*texts, Span(" " * (room - used) + _GAP)]
        return Line(tuple(spans[:-1]), row.first)

    def _notes(self, row: _Row) -> list[Line]:
        """What else there is to say: numbers, memory shared, and inputs without a line of their own."""
        making = row.making
        indent = row.rest + " " * 5
        groups = [self._names(making), self._numbers(making), self._sharing(making), *self._inputs(making)]
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

    def _names(self, making: Making) -> list[Span]:
        names = (self._index.values[id].name for id in making.values)
        return [Span(name, "title") for name in names if name][:_NAMED]

    def _numbers(self, making: Making) -> Iterator[Span]:
        for id in making.values[:_NAMED]:
            value = self._index.values[id]
            text = statistics_text(value)
            if text:
                yield Span(f"{value_text(id)}: {text}" if len(making.values) > 1 else text, _style(value))

    def _sharing(self, making: Making) -> list[Span]:
        """Which memory is not its own."""
        shared = self._shared(making)
        if shared is None:
            return []
        how = "view of" if self._index.values[making.values[0]].previous is None else "in place on"
        return [Span(f"{how} {_value_name(shared)}", "dim")]

    def _shared(self, making: Making) -> Value | None:
        """What the first value made was before an in-place op, or else the input it is a view of."""
        value = self._index.values[making.values[0]]
        given = {*making.sources, *making.leaves, *making.cut, *making.saved}
        base = value.previous or value.base
        while base is not None and base.id not in given:  # made inside the same call
            base = base.previous or base.base
        return value.previous or base

    def _inputs(self, making: Making) -> Iterator[list[Span]]:
        """The inputs without a line below: leaves, what the backward pass read, what is further back."""
        shared = self._shared(making)
        told = -1 if shared is None else shared.id
        leaves = [self._index.values[id] for id in making.leaves if id != told]
        for kind in dict.fromkeys(leaf.kind for leaf in leaves):
            yield list(_leaves(kind, [leaf for leaf in leaves if leaf.kind == kind]))
        below = {id for child in making.children for id in self._told.makings[child].values}
        yield self._listed("↓ ", [id for id in making.sources if id not in below and id != told])
        yield self._listed("saved ", making.saved)
        if making.cut:
            many = "op" if making.before == 1 else "ops"
            names = ", ".join(value_text(id) for id in making.cut[:_NAMED])
            more = f" and {len(making.cut) - _NAMED} more" if len(making.cut) > _NAMED else ""
            yield [Span(f"… {making.before:,} {many} before {names}{more}", "dim")]

    def _listed(self, word: str, ids: Sequence[int]) -> list[Span]:
        names = [_value_name(self._index.values[id]) for id in ids[:_NAMED]]
        return [
            *(Span(f"{'' if at else word}{name}", "dim") for at, name in enumerate(names)),
            *_more(len(ids)),
        ]


def _leaves(kind: str, alike: Sequence[Value]) -> Iterator[Span]:
    """``parameters fc.weight f32[3, 8], fc.bias f32[3]``; with their numbers where they were taken."""
    word = kind if len(alike) == 1 else _plural(kind)
    for number, leaf in enumerate(alike[:_NAMED]):
        text = f"{'' if number else word + ' '}{_value_name(leaf)} {leaf}"
        numbers = statistics_text(leaf)
        bad = leaf.stats is not None and not leaf.stats.finite
        style = "error" if bad else "warn" if kind in ("external", "evicted") else ""
        yield Span(f"{text} ({numbers})" if numbers else text, style)
    yield from _more(len(alike))


def _more(count: int) -> Iterator[Span]:
    if count > _NAMED:
        yield Span(f"{count - _NAMED} more", "dim")


def _value_name(value: Value) -> str:
    """The name of a parameter, else the id."""
    return value.name or value_text(value.id)


def _tail(text: str, room: int) -> str:
    """The end of a path in the room there is: ``…attn.qkv``."""
    text = printable(text)
    return text if width(text) <= room else "…" + text[len(text) - room + 1 :]


def _leaf_text(value: Value) -> str:
    return f"{value.kind} {value.name}" if value.name else value.kind


def _plural(kind: str) -> str:
    return kind if kind in ("state", "external", "evicted") else f"{kind}s"


def _style(value: Value) -> str:
    numbers = value.stats
    return "error" if numbers is not None and not numbers.finite else "number"


__all__ = ["LineageView", "lineage", "lineage_lines"]
