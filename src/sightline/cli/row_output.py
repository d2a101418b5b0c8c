"""Rows as a table for people, or as JSON lines or CSV for programs, written one by one.

A row is a plain dict. A table takes its widths from the first rows; on a terminal longer cells that come
later are cut, on a pipe nothing is, and such a cell moves the rest of its row. JSON has one object per line.
No string reaches the output raw: JSON escapes all but ASCII, CSV and tables write control characters as
``\\x1b``.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, TypeVar

import click

from sightline.cli.screen import Screen
from sightline.convert.encoding import csv_cell, json_text
from sightline.views.rendering import Line, Span, cut, cut_end, printable, width
from sightline.views.table_layout import narrow_columns

F = TypeVar("F", bound=Callable[..., Any])
Row = Mapping[str, Any]

_MEASURED_ROWS: Final = 200  #: rows that decide how wide a table's columns are
_GAP: Final = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, and the text of a row in it."""

    title: str
    text: Callable[[Row], str]
    style: str = ""
    right: bool = False  #: numbers are set flush right, and are never cut
    least: int = 10  #: columns that a text keeps when it is cut for a terminal
    spare: int = 0  #: the higher, the sooner it is dropped for lack of room; 0 stays
    end: bool = False  #: cut at the beginning: the end of a path matters more
    widest: int = 0  #: columns that a text further down may need


def format_options(function: F) -> F:
    """``--json`` and ``--csv``, as the argument ``form``: "table", "json" or "csv"."""
    as_json = click.option("--json", "form", flag_value="json", help="JSON lines: one object per row.")
    as_csv = click.option("--csv", "form", flag_value="csv", help="CSV with a header.")
    return as_json(as_csv(function))


def write_rows(form: str | None, rows: Iterable[Row], names: Sequence[str], columns: Sequence[Column],
          screen: Screen) -> None:  # fmt: skip
    """Write rows in one of the forms; ``names`` are those of JSON and CSV, ``columns`` of the table."""
    if form == "json":
        for row in rows:
            sys.stdout.write(json_text({name: row[name] for name in names}, spaced=True) + "\n")
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([csv_cell(row[name]) for name in names] for row in rows)
    else:
        screen.show(table(rows, columns, screen.room))


def table(rows: Iterable[Row], columns: Sequence[Column], room: int | None = None) -> Iterator[Line]:
    """The lines of a table; with ``room`` at most that wide, if possible.

    >>> shape = Column("shape", lambda row: row["shape"])
    >>> [line.text for line in table([{"shape": "f32[2, 3]"}], [Column("id", lambda row: "7"), shape])]
    ['id  shape', '─────────────', '7   f32[2, 3]']
    """
    rest = iter(rows)
    measured = [[column.text(row) for column in columns] for row in islice(rest, _MEASURED_ROWS)]
    widths = [
        max(width(column.title), column.widest, *(width(printable(texts[at])) for texts in measured), 0)
        for at, column in enumerate(columns)
    ]
    if room is not None:
        widths = narrow_columns(widths, columns, room)
    rule = "─" * (sum(size + len(_GAP) for size in widths if size >= 0) - len(_GAP))
    yield _table_line([column.title for column in columns], columns, widths, room, "dim")
    yield Line((Span(rule, "dim"),))
    for texts in chain(measured, ([column.text(row) for column in columns] for row in rest)):
        yield _table_line(texts, columns, widths, room)


def _table_line(texts: Sequence[str], columns: Sequence[Column], widths: Sequence[int], room: int | None,
          style: str | None = None) -> Line:  # fmt: skip
    spans: list[Span] = []
    gap = ""
    for text, column, size in zip(texts, columns, widths, strict=True):
        if size < 0:
            continue
        if room is None or column.right:
            text = printable(text)
        else:
            text = cut_end(text, size) if column.end else cut(text, size)
        pad = " " * (size - width(text))
        shown = Span(text, column.style if style is None else style)
        spans += [Span(gap + pad), shown] if column.right else [Span(gap), shown]
        gap = _GAP if column.right else pad + _GAP
    return Line(tuple(spans))
