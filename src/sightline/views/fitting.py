"""Blocks on a screen that is narrower than they are: prose is wrapped, tables give up what is least missed.

A table loses its spare columns first, then the ends of its texts; numbers are never cut. Source lines stay as
they are written. For `View.within`, and for the tables of the command line, which are written row by row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from sightline.views.outline import (
    Block,
    Cell,
    Grid,
    Line,
    Span,
    cell_width,
    column_widths,
    cut,
    cut_end,
    printable,
    width,
)

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
