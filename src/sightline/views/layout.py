"""Fitting views to the screen: prose is wrapped, tables shrink or drop the columns that are missed least."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from sightline.views.outline import (
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
from sightline.views.outline import width as columns
from sightline.views.shapes import FULL, RESULT, SHORT, SHORTEST

NARROWEST: Final = 60  #: nothing is made to fit fewer columns
_GAP: Final = 2  #: columns between those of a table
_LEAST: Final = 6  #: what a text keeps where there is no room at all
_WORDS: Final = re.compile(r"\s*\S+|\s+")


class Cuttable(Protocol):
    """A column of a table, as far as its width goes."""

    @property
    def right(self) -> bool: ...
    @property
    def least(self) -> int: ...
    @property
    def spare(self) -> int: ...


def fitted(blocks: Iterable[Block], room: int) -> list[Block]:
    """The blocks in ``room`` columns, as far as they can be."""
    room = max(room, NARROWEST)
    made: list[Block] = []
    for block in blocks:
        made += broken(block, room) if isinstance(block, Line) else [_fitted_grid(block, room)]
    return made


def broken(block: Line, room: int) -> list[Line]:
    """A line as several, broken between words, if it is prose and has no room.

    >>> [made.text for made in broken(Line((Span("facts one two three"),), hang=6), 12)]
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


def narrowed(widths: Sequence[int], columns: Sequence[Cuttable], room: int) -> list[int]:
    """How wide each column is in a table of ``room`` columns in all; -1 for those that are left out."""
    made = list(widths)
    least = [
        size if column.right or not column.least else min(size, column.least)
        for size, column in zip(widths, columns, strict=True)
    ]
    kept = list(range(len(made)))
    while _total([least[at] for at in kept]) > room and any(columns[at].spare for at in kept):
        gone = max(kept, key=lambda at: columns[at].spare)
        kept.remove(gone)
        made[gone] = -1
    texts = [at for at in kept if not columns[at].right]
    if texts and _total([least[at] for at in kept]) > room:
        least = [min(size, _LEAST) for size in least]
    over = _total([made[at] for at in kept]) - room
    while over > 0 and texts:
        giving = max(texts, key=lambda at: made[at] - least[at])
        if made[giving] <= least[giving]:
            break
        made[giving] -= 1
        over -= 1
    return made


def grid_width(table: Grid) -> int:
    """Columns a table takes."""
    return _total(column_widths(table))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * max(len(widths) - 1, 0)


def _fitted_grid(table: Grid, room: int) -> Grid:
    widths = column_widths(table)
    if _total(widths) <= room:
        return table
    made = narrowed(widths, table.columns, room)
    kept = [at for at, size in enumerate(made) if size >= 0]

    def row(cells: Sequence[Cell]) -> tuple[Cell, ...]:
        return tuple(_shortened(cells[at], made[at], table.columns[at].end) for at in kept)

    columns = tuple(replace(table.columns[at], title=cut(table.columns[at].title, made[at])) for at in kept)
    return Grid(columns, tuple(map(row, table.rows)), row(table.footer) if table.footer else ())


def _shortened(cell: Cell, room: int, end: bool) -> Cell:
    """A cell in the room there is, with ``…`` where something is missing."""
    if cell_width(cell) <= room:
        return cell
    if isinstance(cell, Span):
        return Span((cut_end if end else cut)(cell.text, room), cell.style)
    return shortened(cell, room)


def shortened(spans: Sequence[Span], room: int) -> tuple[Span, ...]:
    """Spans in the room there is, with ``…`` where something is missing."""
    if cell_width(tuple(spans)) <= room:
        return tuple(spans)
    kept: list[Span] = []
    for span in spans:
        wide = cell_width(span)
        if wide >= room:  # nothing may follow without a sign that something is missing
            return (*kept, Span(cut(span.text + " ", room), span.style))
        kept.append(span)
        room -= wide
    return tuple(kept)


_NO_LIMIT: Final = 10_000
OPS_ROOM: Final = 40  #: op names are cut here: the longest list must not set the width of the table
_OPS_GOOD: Final = 32  #: below this, shapes are written shorter to make room for op names
_OPS_LEAST: Final = 24  #: where room is short
_LEAST_NAME: Final = 22  #: columns are not cut narrower than this as long as a column can go
_LEAST_SHAPES: Final = 16
_MISSED: Final = 4
_LONG_NAME, _LONG_SHAPES = 28, 24  #: no column goes because of names or shapes longer than this

#: The cell of a name in so much room, with the class of the module or without.
Name = Callable[[int, bool], tuple[Span, ...]]
#: The text of an exchange at some brevity, in so much room.
Shapes = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class Figures:
    """A column of numbers."""

    title: str
    cells: Sequence[Cell]
    total: str = ""
    spare: int = 0  #: the higher, the sooner it goes; up to ``_MISSED`` only where there is no room, 0 stays
    name: str = ""  #: what it is called where it is not in the table, if not by its title

    @property
    def width(self) -> int:
        return max(columns(self.title), columns(self.total), *(cell_width(cell) for cell in self.cells), 0)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A table that has room, and the names of the columns that had none."""

    grid: Grid
    left_out: tuple[str, ...]


def fitted_columns(
    names: Sequence[Name], shapes: Sequence[Shapes], figures: Sequence[Figures], room: int | None
) -> Fitted:
    """The table in ``room`` columns; None for all it wants."""
    kept = list(figures)
    if room is None:
        texts = [shape(FULL, _NO_LIMIT) for shape in shapes]
        return _made([name(_NO_LIMIT, True) for name in names], texts, kept, figures)
    bare = _widest([name(_OPS_LEAST, False) for name in names])
    shortest = [shape(SHORTEST, _NO_LIMIT) for shape in shapes]
    wanted = min(bare, _LONG_NAME) + min(_widest_text(shortest), _LONG_SHAPES)
    needed = min(bare, _LEAST_NAME) + min(_widest_text(shortest), _LEAST_SHAPES)
    for size, missed in ((wanted, _MISSED), (needed, 0)):
        while _left(room, kept) < size and any(each.spare > missed for each in kept):
            kept.remove(max(kept, key=lambda each: each.spare))
    left = _left(room, kept)
    whole = _widest([name(_OPS_GOOD, True) for name in names])
    for brevity in (FULL, SHORT, SHORTEST):
        texts = [shape(brevity, _NO_LIMIT) for shape in shapes]
        if whole + _widest_text(texts) <= left:
            spare = max(whole, min(left - _widest_text(texts), OPS_ROOM))
            return _made([name(spare, True) for name in names], texts, kept, figures)
    results = _widest_text([shape(RESULT, _NO_LIMIT) for shape in shapes])  # what came out is not cut
    least = max(_LEAST_SHAPES, min(results, _LONG_SHAPES))
    for_shapes = min(_widest_text(shortest), max(least, left - min(bare, _LONG_NAME)))
    for_names = max(min(bare, _LEAST_NAME), left - for_shapes)
    for_shapes = max(_LEAST_SHAPES, left - for_names)
    texts = [shape(SHORTEST, for_shapes) for shape in shapes]
    for_names = max(for_names, left - _widest_text(texts))
    return _made([_fitting(name, for_names) for name in names], texts, kept, figures)


def _left(room: int, figures: Sequence[Figures]) -> int:
    """The columns that names and shapes have together."""
    return room - 2 - sum(2 + each.width for each in figures)


def _fitting(name: Name, room: int) -> tuple[Span, ...]:
    """A name with its class where both have room, else without; at last cut."""
    spans = name(room, True)
    return spans if cell_width(spans) <= room else shortened(name(room, False), room)


def _made(
    names: Sequence[Cell], shapes: Sequence[str], kept: Sequence[Figures], all: Sequence[Figures]
) -> Fitted:
    shaped = any(shapes)
    titles = [Column("module", least=14), *([Column("input → output", least=12)] if shaped else [])]
    titles += [Column(each.title, right=True) for each in kept]
    rows: list[list[Cell]] = []
    for at, name in enumerate(names):
        cells: list[Cell] = [name, *([Span(shapes[at], "shape")] if shaped else [])]
        rows.append([*cells, *(each.cells[at] for each in kept)])
    foot: list[Cell] = [Span("total", "title"), *([Span("")] if shaped else [])]
    table = grid(titles, rows, [*foot, *(Span(each.total, "title") for each in kept)])
    return Fitted(table, tuple(each.name or each.title for each in all if each not in kept))


def _widest(cells: Sequence[Cell]) -> int:
    return max(map(cell_width, cells), default=0)


def _widest_text(texts: Sequence[str]) -> int:
    return max((columns(printable(text)) for text in texts), default=0)
