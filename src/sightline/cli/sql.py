"""``sightline sql``: query a recording in SQL, read-only."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

import click

from sightline.cli.command import Command, examples, filter_options, open_recording, recording_argument
from sightline.cli.row_output import Column, Row, format_options, write_rows
from sightline.cli.screen import Screen, progress_bar, screen_options
from sightline.views.rendering import Block, line, printable, width

if TYPE_CHECKING:
    from sightline.convert.query import Query
    from sightline.data.index import Index

_ROWS: Final = 1000  #: of a table for people, without --limit
_SAMPLE_ROWS: Final = 200  #: rows that decide whether a column is of numbers
_CUT: Final = 10  #: columns that a text keeps where there is little room
_GRACE: Final = 2.0  #: seconds that a query may exceed its time limit
#: A sum over rows that contain each other.
_COUNTS_TWICE: Final = re.compile(
    r"\b(?:sum|total|avg)\s*\(\s*(?:\w+\.)?(?:duration_ns|device_ns)\s*\).*\bfrom\s+(?:ops|module_calls|calls)\b",
    re.IGNORECASE | re.DOTALL,
)
#: Words of a query that chooses rows which do not.
_ONE_LEVEL: Final = re.compile(r"\b(?:level|depth|parent|name\s*=|module\s*=|device_work)\b", re.IGNORECASE)


@click.command(
    "sql",
    cls=Command,
    epilog=examples(
        "sightline sql run.sight                  # the tables",
        "sightline sql run.sight --tables         # with the meaning of each column",
        'sightline sql run.sight "select name, sum(exclusive_ns) from ops group by 1 order by 2 desc"',
        'sightline sql run.sight "select * from stats join vals on vals.id = stats.value where nans > 0"',
        'sightline sql run.sight "select * from module_calls" --csv > calls.csv',
        "sightline sql run.sight - < query.sql",
    ),
)
@recording_argument
@click.argument("query", required=False)
@filter_options("step")
@click.option("--tables", is_flag=True, help="List the tables with all their columns.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="The longest time a query may take.",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    default=None,
    help=f"At most N rows; 0 for all.  [default: {_ROWS} in a table, all as JSON or CSV]",
)
@format_options
@screen_options
def command(recording: str, query: str | None, step: str | None, tables: bool, timeout: float,
            limit: int | None, form: str | None, screen: Screen) -> None:  # fmt: skip
    """Query a recording in SQL, read-only.

    QUERY is one SELECT in the SQL of SQLite, or - to read it from standard input. The tables it mentions are
    built in memory: nothing can be changed, attached or loaded. Without a query the tables are listed.
    """
    index = open_recording(recording, step).index
    if query is None or tables:
        screen.show(list(_table_list(index, tables)))
        return
    from sightline.convert.query import Query

    text = sys.stdin.read() if query == "-" else query
    most = limit if limit is not None else _ROWS if form is None else 0
    if _COUNTS_TWICE.search(text) and not _ONE_LEVEL.search(text):
        click.echo(
            "duration_ns and device_ns of a row include the rows inside it: sum exclusive_ns.", err=True
        )
    with progress_bar("tables") as progress:
        select = Query(index, text, seconds=timeout, progress=progress)
        with _time_limit(select, timeout), select:
            _write(select, form, most, screen)


def _write(select: Query, form: str | None, most: int, screen: Screen) -> None:
    """Write the rows, at most ``most`` of them, as JSON, CSV, or a table; on a narrow terminal as records."""
    names = list(map(printable, select.names))
    rows = (  # bytes as SQL writes them
        {
            name: f"x'{item.hex()}'" if isinstance(item, bytes) else item
            for name, item in zip(names, row, strict=True)
        }
        for row in select.rows
    )
    shown = islice(rows, most) if most else rows
    sample = list(islice(shown, _SAMPLE_ROWS))
    columns = _columns(names, sample)
    widths = [max(len(each.title), *(len(each.text(row)) for row in sample), 0) for each in columns]
    least = sum(size if each.right else min(size, _CUT) for size, each in zip(widths, columns, strict=True))
    if form is None and screen.room is not None and least + 2 * (len(columns) - 1) > screen.room:
        screen.show(_records(chain(sample, shown), columns))
    else:
        write_rows(form, chain(sample, shown), names, columns, screen)
    if not sample and form is None:
        click.echo("No rows.", err=True)
    if most and next(rows, None) is not None:
        click.echo(f"These are the first {most:,} rows; --limit 0 shows all.", err=True)


def _records(rows: Iterable[Row], columns: Sequence[Column]) -> Iterator[Block]:
    """Rows with too many columns for a terminal, each as a list of its own."""
    wide = max(width(column.title) for column in columns)
    for number, row in enumerate(rows, 1):
        yield line((f"── row {number} " + "─" * 20, "dim"))
        for column in columns:
            pad = " " * (wide - width(column.title) + 2)
            yield line((column.title, "dim"), pad, (column.text(row), column.style))


def _plain_row(row: Row) -> Row:
    """A row as text and numbers: bytes as SQL writes them."""
    return {name: f"x'{item.hex()}'" if isinstance(item, bytes) else item for name, item in row.items()}


def _columns(names: Sequence[str], sample: Sequence[Row]) -> list[Column]:
    """The columns of a table; those with numbers only are aligned right."""

    def reader(name: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            item = row[name]
            if item is None:
                return "null"
            return f"{item:.6g}" if isinstance(item, float) else str(item)

        return text

    columns = []
    for name in names:
        values = [row[name] for row in sample if row[name] is not None]
        numeric = bool(values) and all(isinstance(value, int | float) for value in values)
        columns.append(Column(name, reader(name), "number" if numeric else "", right=numeric))
    return columns


def _table_list(index: Index, columns: bool) -> Iterable[Block]:
    """The tables, each with the number of its rows, its description and its columns."""
    from sightline.convert.context import TableContext
    from sightline.convert.tables import ALIASES, TABLES

    context = TableContext(index)
    others = {name: alias for alias, name in ALIASES.items()}
    for table in TABLES.values():
        count = table.count(context)
        also = f", also {others[table.name]}" if table.name in others else ""
        yield line((table.name, "title"), f"  {count:,} row{'' if count == 1 else 's'}{also}: {table.about}")
        names = [column.name for column in table.columns]
        if columns:
            wide = max(map(len, names))
            for column in table.columns:
                yield line(f"  {column.name:<{wide}}  ", (f"{column.type:<7}", "dim"), f"  {column.about}")
        else:
            yield from (line((text, "dim"), prefix="  ") for text in textwrap.wrap(", ".join(names), 97))


@contextlib.contextmanager
def _time_limit(select: Query, seconds: float) -> Iterator[None]:
    """End the process if SQLite does not return: inside a single function it never checks the time."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            if select.spent > seconds + _GRACE:
                sys.stderr.write(f"Error: The query took longer than {seconds:g} s and was stopped.\n")
                sys.stderr.flush()
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
