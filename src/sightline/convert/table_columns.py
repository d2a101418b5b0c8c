"""The tables of a recording: what ``sightline sql`` asks and what CSV, JSON and Parquet hold.

A table is a list of columns, a column a function that reads some rows of it. So a query reads only the
columns it mentions, and a file is written a batch at a time. What the tables and columns are called is an
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
    """A column: how it is called, what it holds, and how some of its rows are read. None is nothing."""

    name: str
    type: Type
    about: str
    read: Reader


@dataclass(frozen=True, slots=True)
class Table:
    """A table: what its rows are, its columns, and how many rows there are."""

    name: str
    about: str
    columns: tuple[Column, ...]
    count: Callable[[TableContext], int]

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def batches(
        self, context: TableContext, columns: Sequence[Column] | None = None
    ) -> Iterator[list[list[Any]]]:
        """The columns asked for, some rows at a time: one list per column."""
        count = self.count(context)
        for first in range(0, count, BATCH):
            rows = np.arange(first, min(first + BATCH, count))
            yield [column.read(context, rows) for column in columns or self.columns]


def _listed(column: NDArray[Any]) -> list[Any]:
    items: list[Any] = column.tolist()
    return items


def row_id(_: TableContext, rows: Rows) -> list[Any]:
    """The position of a row."""
    return _listed(rows)


def number(column: Callable[[TableContext], NDArray[Any]]) -> Reader:
    """Numbers as they are."""
    return lambda context, rows: column(context)[rows].tolist()


def reference(column: Callable[[TableContext], NDArray[Any]]) -> Reader:
    """Ids and counts, of which -1 is none."""

    def read(context: TableContext, rows: Rows) -> list[Any]:
        ids = column(context)[rows]
        found = ids.astype(object)
        found[ids < 0] = None
        return _listed(found)

    return read


def flag(column: Callable[[TableContext], NDArray[Any]], bit: int) -> Reader:
    """Whether a bit is set."""
    return lambda context, rows: ((column(context)[rows] & bit) != 0).tolist()


def real(column: Callable[[TableContext], NDArray[Any]]) -> Reader:
    """Floats; NaN is none, as SQL has it."""

    def read(context: TableContext, rows: Rows) -> list[Any]:
        values = column(context)[rows]
        found = values.astype(object)
        found[np.isnan(values)] = None
        return _listed(found)

    return read


def choice(names: Sequence[str], column: Callable[[TableContext], NDArray[Any]]) -> Reader:
    """One of a few words, by its number."""
    words = np.array(names, dtype=object)
    return lambda context, rows: words[column(context)[rows]].tolist()


def looked_up(
    items: Callable[[TableContext], Objects], column: Callable[[TableContext], NDArray[Any]]
) -> Reader:
    """Texts by id; -1 is none. The texts are worked out once per recording."""
    return lambda context, rows: _listed(context.cached(items)[column(context)[rows]])


def plain(items: Callable[[TableContext], Sequence[Any]], read: Callable[[Any], Any]) -> Reader:
    """A field of a small table of records."""
    return lambda context, rows: [read(items(context)[row]) for row in rows.tolist()]


def tensor_lists(lists: Callable[[TableContext, Rows], Lists]) -> Reader:
    """Lists of tensors as they are written: ``f32[2, 8], f32[8]``."""

    def read(context: TableContext, rows: Rows) -> list[Any]:
        tensors = lists(context, rows)
        texts = context.metas[context.raw.values.meta[tensors.items]].tolist()
        return [", ".join(part) for part in tensors.split(texts)]

    return read
