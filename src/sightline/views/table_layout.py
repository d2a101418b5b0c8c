"""Layout for the width of the screen: prose is wrapped, tables shrink or drop their least useful columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from sightline.views.inputs_outputs import FULL, RESULT, SHORT, SHORTEST
from sightline.views.rendering import (
    Block,
    Cell,
    Column,
    Grid,
    Line,
    Span,
    cell_width,
    column_widths,
    cut,
    cut_end,
    grid,
    printable,
    width,
)

NARROWEST: Final = 60  #: views do not shrink below this
_GAP: Final = 2  #: columns between those of a table
_MIN_TEXT: Final = 6  #: a text is never cut shorter than this
_WORDS: Final = re.compile(r"\s*\S+|\s+")


class Cuttable(Protocol):
    """How wide a column of a table is, and how far it may shrink."""

    @property
    def right(self) -> bool: ...
    @property
    def least(self) -> int: ...
    @property
    def spare(self) -> int: ...


def fit_blocks(blocks: Iterable[Block], room: int) -> list[Block]:
    """The blocks in ``room`` columns, as far as possible."""
    room = max(room, NARROWEST)
    result: list[Block] = []
    for block in blocks:
        result += wrap_line(block, room) if isinstance(block, Line) else [_fit_grid(block, room)]
    return result


def wrap_line(block: Line, room: int) -> list[Line]:
    """A line as several, broken between words, if it is prose and too long.

    >>> [part.text for part in wrap_line(Line((Span("facts one two three"),), hang=6), 12)]
    ['facts one', '      two', '      three']
    """
    if block.hang < 0 or width(block.text) <= room:
        return [block]
    lines: list[Line] = []
    spans: list[Span] = []
    prefix, used = block.prefix, width(block.prefix)
    start = True
    for span in block.spans:
        for word in _WORDS.findall(printable(span.text)):
            if not start and used + width(word) > room and word.strip():
                lines.append(Line(tuple(spans), prefix))
                prefix, spans, used = " " * block.hang, [], block.hang
                word = word.lstrip()
            word = cut(word, max(room - used, 2))
            spans.append(Span(word, span.style))
            used += width(word)
            start = start and not word.strip()
    return [*lines, Line(tuple(spans), prefix)]


def narrow_columns(widths: Sequence[int], columns: Sequence[Cuttable], room: int) -> list[int]:
    """The width of each column in a table of ``room`` columns in all; -1 for those that are dropped."""
    fitted = list(widths)
    least = [
        size if column.right or not column.least else min(size, column.least)
        for size, column in zip(widths, columns, strict=True)
    ]
    kept = list(range(len(fitted)))
    while _total([least[at] for at in kept]) > room and any(columns[at].spare for at in kept):
        dropped = max(kept, key=lambda at: columns[at].spare)
        kept.remove(dropped)
        fitted[dropped] = -1
    texts = [at for at in kept if not columns[at].right]
    if texts and _total([least[at] for at in kept]) > room:
        least = [min(size, _MIN_TEXT) for size in least]
    over = _total([fitted[at] for at in kept]) - room
    while over > 0 and texts:
        widest = max(texts, key=lambda at: fitted[at] - least[at])
        if fitted[widest] <= least[widest]:
            break
        fitted[widest] -= 1
        over -= 1
    return fitted


def grid_width(table: Grid) -> int:
    """The width of a table in columns."""
    return _total(column_widths(table))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * max(len(widths) - 1, 0)


def _fit_grid(table: Grid, room: int) -> Grid:
    widths = column_widths(table)
    if _total(widths) <= room:
        return table
    widths = narrow_columns(widths, table.columns, room)
    kept = [at for at, size in enumerate(widths) if size >= 0]

    def cell(cells: Sequence[Cell], at: int) -> Cell:
        cell, room = cells[at], widths[at]
        if cell_width(cell) <= room:
            return cell
        if isinstance(cell, Span):
            return Span((cut_end if table.columns[at].end else cut)(cell.text, room), cell.style)
        return _cut_spans(cell, room)

    def row(cells: Sequence[Cell]) -> tuple[Cell, ...]:
        return tuple(cell(cells, at) for at in kept)

    titles = (cut(table.columns[at].title, widths[at]) for at in kept)
    columns = tuple(replace(table.columns[at], title=title) for at, title in zip(kept, titles, strict=True))
    return Grid(columns, tuple(map(row, table.rows)), row(table.footer) if table.footer else ())


def _cut_spans(spans: Sequence[Span], room: int) -> tuple[Span, ...]:
    """Spans cut to ``room`` columns, with ``…`` where something is missing."""
    if cell_width(tuple(spans)) <= room:
        return tuple(spans)
    kept: list[Span] = []
    for span in spans:
        size = cell_width(span)
        if size >= room:  # the space makes `cut` add the sign that something is missing
            return (*kept, Span(cut(span.text + " ", room), span.style))
        kept.append(span)
        room -= size
    return tuple(kept)


_NO_LIMIT: Final = 10_000
OPS_ROOM: Final = 40  #: op names are cut here, so that the longest list does not set the table's width
_OPS_GOOD: Final = 32  #: below this, shapes are written shorter to make room for op names
_OPS_MIN: Final = 24  #: where room is short
_MIN_NAME: Final = 22  #: names are not cut shorter than this as long as a column can be dropped
_MIN_SHAPES: Final = 16
_USEFUL: Final = 4  #: columns with at most this ``spare`` are dropped last
_LONG_NAME, _LONG_SHAPES = 28, 24  #: no column is dropped for names or shapes longer than this

#: The cell of a name in a number of columns, with the class of the module or without.
Name = Callable[[int, bool], tuple[Span, ...]]
#: The text of an exchange at a brevity, in a number of columns.
Shapes = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class Figures:
    """A column of numbers."""

    title: str
    cells: Sequence[Cell]
    total: str = ""
    spare: int = 0  #: the higher, the sooner it is dropped; 0 stays
    name: str = ""  #: its name in the list of dropped columns, if not its title

    @property
    def width(self) -> int:
        return max(width(self.title), width(self.total), *(cell_width(cell) for cell in self.cells), 0)


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table for a width, and the names of the columns that were dropped."""

    grid: Grid
    dropped: tuple[str, ...]


def fit_table(
    names: Sequence[Name], shapes: Sequence[Shapes], figures: Sequence[Figures], room: int | None
) -> FittedTable:
    """The table in ``room`` columns; None for no limit."""
    kept = list(figures)
    if room is None:
        texts = [shape(FULL, _NO_LIMIT) for shape in shapes]
        return _table([name(_NO_LIMIT, True) for name in names], texts, kept, figures)
    bare = _widest([name(_OPS_MIN, False) for name in names])
    shortest = [shape(SHORTEST, _NO_LIMIT) for shape in shapes]
    comfortable = min(bare, _LONG_NAME) + min(_widest_text(shortest), _LONG_SHAPES)
    needed = min(bare, _MIN_NAME) + min(_widest_text(shortest), _MIN_SHAPES)
    for size, useful in ((comfortable, _USEFUL), (needed, 0)):
        while _text_room(room, kept) < size and any(each.spare > useful for each in kept):
            kept.remove(max(kept, key=lambda each: each.spare))
    left = _text_room(room, kept)
    whole = _widest([name(_OPS_GOOD, True) for name in names])
    for brevity in (FULL, SHORT, SHORTEST):
        texts = [shape(brevity, _NO_LIMIT) for shape in shapes]
        if whole + _widest_text(texts) <= left:
            spare = max(whole, min(left - _widest_text(texts), OPS_ROOM))
            return _table([name(spare, True) for name in names], texts, kept, figures)
    results = _widest_text([shape(RESULT, _NO_LIMIT) for shape in shapes])  # results are not cut
    least = max(_MIN_SHAPES, min(results, _LONG_SHAPES))
    for_shapes = min(_widest_text(shortest), max(least, left - min(bare, _LONG_NAME)))
    for_names = max(min(bare, _MIN_NAME), left - for_shapes)
    for_shapes = max(_MIN_SHAPES, left - for_names)
    texts = [shape(SHORTEST, for_shapes) for shape in shapes]
    for_names = max(for_names, left - _widest_text(texts))
    whole_names = [name(for_names, True) for name in names]
    cells = [
        spans if cell_width(spans) <= for_names else _cut_spans(name(for_names, False), for_names)
        for name, spans in zip(names, whole_names, strict=True)
    ]
    return _table(cells, texts, kept, figures)


def _text_room(room: int, figures: Sequence[Figures]) -> int:
    """The columns that names and shapes have together."""
    return room - 2 - sum(2 + each.width for each in figures)


def _table(
    names: Sequence[Cell], shapes: Sequence[str], kept: Sequence[Figures], figures: Sequence[Figures]
) -> FittedTable:
    has_shapes = any(shapes)
    titles = [Column("module", least=14), *([Column("input → output", least=12)] if has_shapes else [])]
    titles += [Column(each.title, right=True) for each in kept]
    rows: list[list[Cell]] = []
    for at, name in enumerate(names):
        cells: list[Cell] = [name, *([Span(shapes[at], "shape")] if has_shapes else [])]
        rows.append([*cells, *(each.cells[at] for each in kept)])
    foot: list[Cell] = [Span("total", "title"), *([Span("")] if has_shapes else [])]
    table = grid(titles, rows, [*foot, *(Span(each.total, "title") for each in kept)])
    return FittedTable(table, tuple(each.name or each.title for each in figures if each not in kept))


def _widest(cells: Sequence[Cell]) -> int:
    return max(map(cell_width, cells), default=0)


def _widest_text(texts: Sequence[str]) -> int:
    return max((width(printable(text)) for text in texts), default=0)
