"""How the table of ``summary()`` is fitted into the room there is.

First shapes are written shorter, then class names go, then the columns that are least missed, and only then
are texts cut. What was left out is told, so that nobody takes it for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sightline.views.fitting import shortened
from sightline.views.outline import Cell, Column, Grid, Span, cell_width, grid, printable
from sightline.views.outline import width as columns
from sightline.views.shapes import FULL, RESULT, SHORT, SHORTEST

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


def fitted(
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
