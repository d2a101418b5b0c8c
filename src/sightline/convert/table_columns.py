"""`Table` and `Column`: the tables of ``sightline sql`` and of CSV, JSON and Parquet files.

A table is a list of columns, and a column is a function that reads some of its rows. So a query reads only
the columns it mentions, and a file is written a batch at a time. The names of tables and columns are an
interface: ``docs/convert.md`` lists them, and a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sightline.convert.context import Lists, Objects, TableContext

Type = Literal["integer", "real", "text", "boolean"]
Rows = NDArray[np.int64]
Reader = Callable[[TableContext, Rows], list[Any]]

BATCH: Final = 1 << 14  #: rows that are read together


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its type, its meaning, and a function that reads some of its rows. None is null."""

    name: str
    type: Type
    about: str
    read: Reader


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its name, the meaning of its rows, its columns, and how many rows it has."""

    name: str
    about: str
    columns: tuple[Column, ...]
    count: Callable[[TableContext], int]

    def batches(
        self, context: TableContext, columns: Sequence[Column] | None = None
    ) -> Iterator[list[list[Any]]]:
        """Some columns, or all, a batch of rows at a time: one list per column."""
        count = self.count(context)
        for first in range(0, count, BATCH):
            rows = np.arange(first, min(first + BATCH, count))
            yield [column.read(context, rows) for column in columns or self.columns]


def _to_list(column: NDArray[Any]) -> list[Any]:
    items: list[Any] = column.tolist()
    return items


def row_id(_: TableContext, rows: Rows) -> list[Any]:
    """The number of a row."""
    return _to_list(rows)


def number(column: Callable[[TableContext], NDArray[Any]]) -> Reader:
    """Numbers as they are."""
    return lambda context, rows: column(context)[rows].tolist()


def reference(column: Callable[[TableContext], NDArray[Any]]) -> Reader:
    """Ids and counts; a negative one is null."""

    def read(context: TableContext, rows: Rows) -> list[Any]:
        ids = column(context)[rows]
        items = ids.astype(object)
        items[ids < 0] = None
        return _to_list(items)

    return read


def flag(column: Callable[[TableContext], NDArray[Any]], bit: int) -> Reader:
    """Whether a bit is set."""
    return lambda context, rows: ((column(context)[rows] & bit) != 0).tolist()


def real(column: Callable[[TableContext], NDArray[Any]]) -> Reader:
    """Floats; NaN is null, as in SQL."""

    def read(context: TableContext, rows: Rows) -> list[Any]:
        values = column(context)[rows]
        items = values.astype(object)
        items[np.isnan(values)] = None
        return _to_list(items)

    return read


def choice(names: Sequence[str], column: Callable[[TableContext], NDArray[Any]]) -> Reader:
    """One of a few names, by its number; -1, which a recording of before has, is null."""
    array = np.array([*names, None], dtype=object)
    return lambda context, rows: array[column(context)[rows]].tolist()


def lookup(
    items: Callable[[TableContext], Objects], column: Callable[[TableContext], NDArray[Any]]
) -> Reader:
    """Items by id; -1 is null. The items are derived once per recording."""
    return lambda context, rows: _to_list(context.cached(items)[column(context)[rows]])


def record_field(items: Callable[[TableContext], Sequence[Any]], read: Callable[[Any], Any]) -> Reader:
    """A field of each record of a short list."""
    return lambda context, rows: [read(items(context)[row]) for row in rows.tolist()]


def tensor_lists(lists: Callable[[TableContext, Rows], Lists]) -> Reader:
    """Lists of tensors as they are written: ``f32[2, 8], f32[8]``."""

    def read(context: TableContext, rows: Rows) -> list[Any]:
        tensors = lists(context, rows)
        texts = context.metas[context.raw.values.meta[tensors.items]].tolist()
        return [", ".join(part) for part in tensors.split(texts)]

    return read
