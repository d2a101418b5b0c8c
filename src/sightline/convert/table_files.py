"""The tables of a recording as files: CSV, JSON and Parquet, written a batch of rows at a time."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from sightline._version import __version__
from sightline.convert.atomic_files import atomic_folder, atomic_path, atomic_text
from sightline.convert.context import TableContext
from sightline.convert.encoding import csv_cell, json_text, storable
from sightline.convert.table_columns import Table
from sightline.data.index import Index
from sightline.errors import UsageError

#: Called with the number of rows that were written since the last call.
Progress = Callable[[int], None]


def _no_progress(_rows: int) -> None:
    pass


_HUGE: Final = (1 << 63) - 1
NO_PYARROW: Final = "Parquet needs pyarrow, which is not installed: `pip install pyarrow` brings it."


def to_csv(
    index: Index, table: Table, path: str | os.PathLike[str], progress: Progress = _no_progress
) -> None:
    """Write one table as CSV with a header. Null is empty; control characters are written as ``\\x1b``."""
    context = TableContext(index)
    with atomic_text(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in table.columns])
        for batch in table.batches(context):
            cells = [
                items if column.type in ("integer", "real") else list(map(csv_cell, items))
                for column, items in zip(table.columns, batch, strict=True)
            ]
            writer.writerows(zip(*cells, strict=True))
            progress(len(batch[0]))


def to_json(
    index: Index, tables: Sequence[Table], path: str | os.PathLike[str], progress: Progress = _no_progress
) -> None:
    """Write tables as one JSON document, a row per line: ``{"tables": {"ops": [{…}, …], …}}``."""
    context = TableContext(index)
    with atomic_text(path) as file:
        about = json_text({"sightline": __version__, "info": context.raw.info})
        file.write(f'{about[:-1]},"tables":{{\n')
        for number, table in enumerate(tables):
            file.write(f"{',' if number else ''}{json_text(table.name)}:[\n")
            names = [column.name for column in table.columns]
            separator = ""
            for batch in table.batches(context):
                rows = (json_text(dict(zip(names, row, strict=True))) for row in zip(*batch, strict=True))
                file.write(separator + ",\n".join(rows))
                separator = ",\n"
                progress(len(batch[0]))
            file.write("\n]\n" if separator else "]\n")
        file.write("}}\n")


def to_parquet(
    index: Index, table: Table, path: str | os.PathLike[str], progress: Progress = _no_progress
) -> None:
    """Write one table as Parquet."""
    arrow, parquet = _pyarrow()
    types = {
        "integer": arrow.int64(),
        "real": arrow.float64(),
        "text": arrow.string(),
        "boolean": arrow.bool_(),
    }
    schema = arrow.schema([(column.name, types[column.type]) for column in table.columns])
    context = TableContext(index)
    with atomic_path(path) as part, parquet.ParquetWriter(part, schema, compression="zstd") as writer:
        for batch in table.batches(context):
            arrays = [_array(arrow, items, field.type) for items, field in zip(batch, schema, strict=True)]
            writer.write_batch(arrow.record_batch(arrays, schema=schema))
            progress(len(batch[0]))


def _array(arrow: Any, items: list[Any], type: Any) -> Any:
    try:
        return arrow.array(items, type)
    except (UnicodeError, OverflowError, arrow.ArrowException):
        cells = [storable(item) for item in items]
        if type == arrow.int64():  # of an integer that does not fit, the nearest that does
            cells = [None if item is None else int(min(max(item, -_HUGE), _HUGE)) for item in items]
        return arrow.array(cells, type)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise UsageError(NO_PYARROW) from None
    return pa, parquet


def check_format(format: str) -> None:
    """Raise, before anything is written, if a format needs a package that is not installed."""
    if format == "parquet":
        _pyarrow()


#: The formats with a file for each table.
TABLE_WRITERS: Final = {"csv": to_csv, "parquet": to_parquet}


def to_folder(
    index: Index, tables: Iterable[Table], folder: Path, format: str, progress: Progress = _no_progress
) -> None:
    """Write tables as files of a folder, ``ops.csv`` and so on.

    A new folder appears when all files are written. In an existing folder each file is replaced when it is
    complete, and other files are left alone.
    """
    with atomic_folder(folder) as part:
        for table in tables:
            TABLE_WRITERS[format](index, table, part / f"{table.name}.{format}", progress)


def count_rows(index: Index, tables: Iterable[Table]) -> int:
    """How many rows some tables have together."""
    context = TableContext(index)
    return sum(table.count(context) for table in tables)
