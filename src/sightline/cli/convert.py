"""``sightline convert``: a recording as a file for another tool."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from sightline.cli.command import (
    Command,
    examples,
    filter_options,
    open_recording,
    printable_text,
    recording_argument,
)
from sightline.cli.screen import progress_bar
from sightline.errors import UsageError
from sightline.notation import bytes_text

if TYPE_CHECKING:
    from sightline.convert.table_columns import Table
    from sightline.data.index import Index

FORMATS: Final = ("perfetto", "csv", "json", "parquet")
#: The format of each suffix; ``.json`` alone can be either of two.
_SUFFIXES: Final = {
    **{f".{format}": format for format in FORMATS if format != "json"},
    ".perfetto.json": "perfetto",
    ".trace.json": "perfetto",
}


@click.command(
    "convert",
    cls=Command,
    epilog=examples(
        "sightline convert run.sight -o run.perfetto.json.gz   # open it in ui.perfetto.dev",
        "sightline convert run.sight -o run.json --to perfetto",
        "sightline convert run.sight -o ops.csv --table ops",
        "sightline convert run.sight -o tables --to parquet    # a folder, a file per table",
        "sightline convert run.sight -o run.json --to json",
    ),
)
@recording_argument
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    required=True,
    type=click.Path(),
    help="The file to write, or a folder for several tables.",
)
@click.option(
    "--to", "format", type=click.Choice(FORMATS), help="The format.  [default: from the suffix of OUT]"
)
@click.option(
    "--table",
    "tables",
    metavar="NAME",
    multiple=True,
    help="Only this table (csv, json, parquet); can be repeated. `sightline sql FILE` lists them.",
)
@filter_options("step")
@click.option("--force", is_flag=True, help="Replace existing files.")  # fmt: skip
def command(
    recording: str, output: str, format: str | None, tables: tuple[str, ...], step: str | None, force: bool
) -> None:
    """Write a recording for another tool: Perfetto, CSV, JSON, Parquet.

    perfetto is a timeline in Chrome's JSON: modules, ops, phases, steps and memory. csv and parquet are a
    folder with a file per table, or one table in a file; json is all tables in one document. A file
    whose name ends in .gz is compressed. Files are written atomically.
    """
    from sightline.convert.table_files import check_format, count_rows

    target = Path(output)
    try:
        format, chosen = _format_and_tables(target, format, tables)
    except UsageError as error:  # the options are wrong, not the recording
        raise click.UsageError(printable_text(str(error))) from None
    check_format(format)
    _check_target(target, Path(recording), force)
    trace = open_recording(recording, step)
    index = trace.index
    with progress_bar("writing") as progress:
        if format == "perfetto":
            trace.to_perfetto().save(target, progress)
            files = [target]
        else:
            files = _write_files(index, format, chosen, target, progress)
    size = sum(path.stat().st_size for path in files if path.is_file())
    many = f"{len(files)} files, " if len(files) > 1 else ""
    rows = f"{count_rows(index, chosen):,} rows" if chosen else f"{len(index.ops):,} ops"
    click.echo(f"Wrote {printable_text(output)}: {many}{rows}, {bytes_text(size)}.", err=True)


def _format_and_tables(target: Path, format: str | None, names: Sequence[str]) -> tuple[str, list[Table]]:
    """The format, by default that of the suffix, and the tables to write.

    For a file of one table its name can be the name of the file.
    """
    from sightline.convert.tables import ALIASES, TABLES

    name = target.name.lower().removesuffix(".gz")
    format = format or next((each for suffix, each in _SUFFIXES.items() if name.endswith(suffix)), None)
    if format is None and name.endswith(".json"):
        raise UsageError(f"{target.name} can be a timeline or plain tables: add --to perfetto or --to json.")
    if format is None:
        raise UsageError(
            f"The format of {target.name} is unknown: add --to {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        )
    if format == "perfetto":
        if names:
            raise UsageError("A timeline has no tables: --table goes with csv, json and parquet.")
        return format, []
    if not names and _is_file(target, format):
        stem = target.name.partition(".")[0]
        names = [stem]
        if ALIASES.get(stem, stem) not in TABLES:
            raise UsageError(
                f"{target.name} holds one table: choose it with --table, or give a folder for all of them."
            )
    unknown = next((name for name in names if ALIASES.get(name, name) not in TABLES), None)
    if unknown is not None:
        raise UsageError(f"There is no table {unknown!r}; there are {', '.join(TABLES)}.")
    chosen = [TABLES[ALIASES.get(name, name)] for name in dict.fromkeys(names)] or list(TABLES.values())
    if len(chosen) > 1 and _is_file(target, format):
        raise UsageError(f"{target.name} holds one table, not {len(chosen)}: give a folder instead.")
    return format, chosen


def _is_file(target: Path, format: str) -> bool:
    """Whether the name is that of one file, for a format that can also write a folder."""
    return (
        format != "json"
        and not target.is_dir()
        and target.name.lower().removesuffix(".gz").endswith(f".{format}")
    )


def _check_target(target: Path, source: Path, force: bool) -> None:
    """Raise if the target is in the recording, or would replace files without ``--force``."""
    real, recording = os.path.realpath(target), os.path.realpath(source)
    if real == recording or real.startswith(recording + os.sep):
        raise UsageError(f"{target} is in the recording itself: write it somewhere else.")
    if target.is_dir():
        if any(target.iterdir()) and not force:
            raise UsageError(
                f"{target} is there and not empty: --force replaces its files of the same names."
            )
    elif target.is_file() and not force:
        raise UsageError(f"{target} is there already: --force replaces it.")


def _write_files(index: Index, format: str, tables: list[Table], target: Path,
             progress: Callable[[int, int], None]) -> list[Path]:  # fmt: skip
    """Write the files, and return their paths."""
    from sightline.convert import table_files

    total, rows = table_files.count_rows(index, tables), 0

    def done(more: int) -> None:
        nonlocal rows
        rows += more
        progress(rows, total)

    if format == "json":
        table_files.to_json(index, tables, target, done)
        return [target]
    if _is_file(target, format):
        table_files.TABLE_WRITERS[format](index, tables[0], target, done)
        return [target]
    table_files.to_folder(index, tables, target, format, done)
    return [target / f"{table.name}.{format}" for table in tables]
