"""Columns of SQL and of files that the schema declares: their names, types, descriptions and readers."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from sightline.convert.table_columns import Column, choice, flag, lookup, number, real, reference
from sightline.schema import columns as schema
from sightline.schema.columns import COLUMN_TABLES

#: Names of tables and columns in SQL that differ from those of the schema.
_TABLE_NAMES: Final = {"calls": "module_calls"}
_NAMES: Final = {
    ("calls", "index"): "number", ("calls", "module"): "module_id", ("calls", "order"): "completed",
    ("frames", "column"): "first_column", ("values", "offset"): "storage_offset",
}  # fmt: skip
#: Tables whose ids mean nothing to a reader of SQL: other columns say what they hold.
_INTERNAL: Final = ("forms", "metas", "codes")


def with_stored(table: str, *columns: Column | str) -> tuple[Column, ...]:
    """Columns of a table; a text is a column of the schema, and those that are not mentioned come last."""
    every = {
        column.name: column
        for declared in COLUMN_TABLES[table].declared.values()
        for column in _stored(declared)
    }
    chosen = [every[column] if isinstance(column, str) else column for column in columns]
    names = {column.name for column in chosen}
    return (*chosen, *(column for column in every.values() if column.name not in names))


def _stored(declared: schema.Column) -> Iterator[Column]:
    """The columns for a column of the schema: none for an internal one, one for each flag."""
    meaning, read = declared.meaning, attrgetter(f"raw.{declared.table}.{declared.name}")
    name = _NAMES.get((declared.table, declared.name), declared.name)
    about = meaning.about
    if meaning.lists or declared.is_flat or meaning.target in _INTERNAL:
        return
    if meaning.flags is not None:
        for each, bit in meaning.flags.items():
            yield Column(each, "boolean", "", flag(read, bit))
    elif meaning.choices:
        yield Column(name, "text", about, choice(meaning.choices, read))
    elif meaning.target == "names":
        yield Column(name, "text", about, lookup(lambda context: context.names, read))
    elif meaning.target:
        target = _TABLE_NAMES.get(meaning.target, meaning.target)
        yield Column(name, "integer", f"→ {target}.id, {about}", reference(read))
    elif declared.dtype == "<f8":
        yield Column(name, "real", about, real(read))
    else:
        suffix = f"_{meaning.unit}" if meaning.unit == "ns" else ""
        yield Column(f"{name}{suffix}", "integer", about, (reference if meaning.optional else number)(read))
