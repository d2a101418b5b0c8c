"""``load``: a bundle as a `TraceData` whose columns and tables are read on first use.

Opening reads the header, the schema and the counts. A column or a small table is decoded and checked the
first time a view reads it, and then stays in memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.data import trace_data as d
from sightline.data.source_files import SourceFiles
from sightline.errors import UsageError
from sightline.patterns import close_names
from sightline.store import bundle_schema as schema
from sightline.store import checks, json_codec
from sightline.store.checked_database import Database
from sightline.store.column_codec import decode
from sightline.store.damage import Damage, quoted
from sightline.store.journal import JOURNAL
from sightline.store.limits import check_text_size
from sightline.store.paths import holds_recording
from sightline.store.recovery import open_journal
from sightline.store.shard_files import ListedShards
from sightline.store.shards.shard_file import is_shard

Array = NDArray[Any]


def load(path: str | os.PathLike[str]) -> LoadedTrace:
    """Open a bundle, or one database of it; columns and tables are read on first use.

    A recording whose process was killed, or is still running, is only a journal, which is read at once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(folder)
    Traceback (most recent call last):
    sightline.errors.UsageError: ... is no sightline recording: it is an empty folder.
    """
    path = Path(path)
    if path.is_dir():
        database = path / schema.DATABASE
        if not database.exists() and (path / JOURNAL).exists():
            return UnfinishedTrace.from_journal(path / JOURNAL)
        if not database.exists():
            why = f"there is no {schema.DATABASE} in it" if any(path.iterdir()) else "it is an empty folder"
            raise UsageError(f"{path} is no sightline recording: {why}.")
        return LoadedTrace.from_database(Database(database))
    if not path.exists():
        try:
            others = {other.stem: other for other in path.parent.iterdir() if holds_recording(other)}
        except OSError:
            others = {}
        near = close_names(path.stem, others, 1)
        hint = f"; did you mean {others[near[0]]}?" if near else "."
        raise UsageError(f"There is no recording {path}{hint}")
    if path.name == JOURNAL:
        return UnfinishedTrace.from_journal(path)
    return LoadedTrace.from_database(Database(path))


class _LazyColumns:
    """Columns that are decoded when they are first read; a mixin for each class of columns.

    Instances are created without ``__init__``, which stays the dataclass's, so that `dataclasses.replace`
    gives plain columns.
    """

    def __len__(self) -> int:
        rows = self.__dict__.get("_rows")
        return len(next(iter(self.__dict__.values()))) if rows is None else rows

    def __getattr__(self, name: str) -> Array:
        # Called only where an attribute is missing: on the first read of a column, or for a wrong name.
        kind, read = self.__dict__.get("_kind"), self.__dict__.get("_read")
        if kind is None or read is None or name not in schema.columns_of(kind):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        column: Array = read(kind, name)
        self.__dict__[name] = column
        return column

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {type(self).__name__}>"


#: Each class of columns with the mixin.
_LAZY: Final = {
    kind: type(f"Loaded{base.__name__}", (_LazyColumns, base), {}) for kind, base in schema.KINDS.items()
}


class LoadedTrace(d.TraceData):
    """A `TraceData` from a bundle, with ``sources`` and ``environment``; it can be closed.

    It is created by ``from_database``; ``__init__`` stays the dataclass's, for `dataclasses.replace`.
    """

    @classmethod
    def from_database(cls, database: Database) -> LoadedTrace:
        """The trace in a database."""
        trace = cls.__new__(cls)
        attributes: dict[str, Any] = {"_database": database, "path": database.path}
        for kind, lazy in _LAZY.items():
            columns: Any = object.__new__(lazy)
            columns.__dict__.update(_kind=kind, _rows=database.counts[kind], _read=trace._column)
            attributes[kind] = columns
        with database.guard():
            attributes["store"] = _shard_store(database)
        trace.__dict__.update(attributes)  # the dataclass is frozen
        return trace

    def close(self) -> None:
        """Close the file; columns and tables that were not read yet cannot be read any more."""
        self._database.close()

    def close_with(self, owner: object) -> None:
        """Close the file when ``owner`` is gone, also while rows are kept: these open it again to be read."""
        database = self.__dict__.get("_database")  # a changed copy has none
        if database is not None:
            weakref.finalize(owner, database.suspend).atexit = False

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of rows of each table, without reading any."""
        return self._database.counts

    @property
    def sources(self) -> Mapping[str, str]:
        """The text of the source files that were saved, by their names."""
        return self.source_lines.texts or {}

    def __getattr__(self, name: str) -> Any:
        # Called only where an attribute is missing: on the first read of a small table.
        reader = _TABLES.get(name)
        if reader is None or "_database" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self._database.guard():
            table = reader(self._database)
        self.__dict__[name] = table
        return table

    def __repr__(self) -> str:
        if "_database" not in self.__dict__:
            return f"<LoadedTrace: {len(self.ops)} ops, {len(self.calls)} module calls>"
        counts = self._database.counts
        return f"<LoadedTrace {self.path}: {counts['ops']} ops, {counts['calls']} module calls>"

    path: Path  #: of the database
    _database: Database

    def _column(self, kind: str, name: str) -> Array:
        database = self._database
        with database.guard():
            column = _read_column(database, kind, name)
            checks.check_column(kind, name, column, database.counts)
            if kind == "calls" and name in ("first_op", "end_op"):
                first, end = (column if name == each else _read_column(database, kind, each)
                              for each in ("first_op", "end_op"))  # fmt: skip
                checks.check_spans(first, end, database.counts)
            check_text_size(self, kind, name, column, database.size)
        return column


class UnfinishedTrace(LoadedTrace):
    """A recording whose process was killed, or is still running, up to its last batch."""

    @classmethod
    def from_journal(cls, path: Path) -> UnfinishedTrace:
        """The trace in a journal, which is read completely."""
        opened = open_journal(path)
        trace = cls.__new__(cls)
        trace.__dict__.update(vars(opened.data))  # the dataclass is frozen
        lines = SourceFiles(opened.sources)
        trace.__dict__.update(path=path, source_lines=lines, environment=opened.environment)
        return trace

    def close(self) -> None:
        """Do nothing: the journal is closed already."""

    def close_with(self, owner: object) -> None:
        """Do nothing, as `close`."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of rows of each table."""
        small = ("storages", "modules", "codes", "metas", "forms", "names", "steps", "captures")
        tables = (*schema.KINDS, *small)
        return {name: len(getattr(self, name)) for name in tables}


def _read_column(database: Database, kind: str, name: str) -> Array:
    """A column from its chunks; offsets are stored as lengths. One that the file is too old for is -1."""
    dtype = "<i8" if kind == "storages" else schema.columns_of(kind)[name]
    rows = database.counts["storages" if kind == "storages" else schema.length_name(kind, name)]
    offsets = name.endswith("_offsets")
    database.budget.take(f"{kind}/{name}", (rows + offsets) * np.dtype(dtype).itemsize)
    if schema.came_later(kind, name, database.revision):
        return np.full(rows, -1, dtype=dtype)
    column = np.zeros(rows + offsets, dtype=dtype)
    target = column[1:] if offsets else column
    at = 0
    for number, (count, data) in enumerate(database.chunks(kind, name, rows)):
        target[at : at + count] = decode(data, count, dtype, at, f"{kind}/{name}/{number}")
        at += count
    if offsets:
        if len(target) and target.min() < 0:
            raise Damage(f"{kind}/{name} has lists of a negative length")
        np.cumsum(target, out=target)
    return column


def _shard_store(database: Database) -> ListedShards | None:
    """The store of the captured tensors, if there are any."""
    if not database.counts["captures"]:
        return None
    names: dict[str, None] = {}
    for text in database.texts("shards"):
        name = json_codec.parse_json(text)
        if not isinstance(name, str) or not is_shard(name) or name in names:
            raise Damage(f"{quoted(name)} is no name of a shard")
        names[name] = None
    return ListedShards(database.path.parent / schema.TENSORS, list(names))


def _rows(
    table: str, kind: type[Any], check: Callable[[Any, Mapping[str, int]], None] | None = None
) -> Callable[[Database], list[Any]]:
    """A reader of a table of JSON rows, which are checked against the counts of the other tables."""

    def read(database: Database) -> list[Any]:
        rows = [json_codec.load(kind, text) for text in database.texts(table)]
        if check is not None:
            check(rows, database.counts)
        return rows

    return read


def _names(database: Database) -> list[str]:
    names = [json_codec.parse_json(text) for text in database.texts("names")]
    if not all(type(name) is str for name in names):
        raise Damage("its names are not all texts")
    return names


def _files(database: Database) -> dict[str, d.FileInfo]:
    files = {}
    for text in database.texts("files"):
        file, *info = _named_list(text)
        if "\0" in file:
            raise Damage(f"{quoted(file)} cannot be the name of a file")
        os.fsencode(file)  # views pass it to the system, which must not raise
        files[file] = json_codec.load(d.FileInfo, json_codec.dumps(info))
    return files


def _schemas(database: Database) -> dict[str, tuple[str, ...]]:
    schemas = {}
    for text in database.texts("schemas"):
        name, *arguments = _named_list(text)
        if not all(type(argument) is str for argument in arguments):
            raise Damage(f"the arguments of {quoted(name)} are no names")
        schemas[name] = tuple(arguments)
    return schemas


def _named_list(text: str) -> list[Any]:
    """A JSON list that begins with a name."""
    items = json_codec.parse_json(text)
    if not isinstance(items, list) or not items or type(items[0]) is not str:
        raise Damage(f"{quoted(text)} has no name")
    return items


def _fact(
    name: str, check: Callable[[Mapping[str, Any]], None] | None = None
) -> Callable[[Database], dict[str, Any]]:
    """A reader of a dict among the facts."""

    def read(database: Database) -> dict[str, Any]:
        fact = json_codec.loads(database.facts[name]) if name in database.facts else {}
        if not isinstance(fact, dict) or not all(type(key) is str for key in fact):
            raise Damage(f"its fact {name!r} is malformed")
        if check is not None:
            check(fact)
        return fact

    return read


class Sources(Mapping[str, str]):
    """The source files in a bundle, each read on first use."""

    def __init__(self, database: Database, rows: dict[str, tuple[int, int]]) -> None:
        self._database = database
        self._rows = rows  # the id and the size of each

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __getitem__(self, file: str) -> str:
        """The text of a file, its lines ending in a newline."""
        id, size = self._rows[file]
        with self._database.guard():
            return self._database.source(id, size)


def _source_lines(database: Database) -> SourceFiles:
    listed = database.sources()
    rows = {file: (id, size) for file, _, size, id in listed}
    return SourceFiles(Sources(database, rows), [file for file, whole, _, _ in listed if whole])


_TABLES: Final[dict[str, Callable[[Database], Any]]] = {
    "modules": _rows("modules", d.ModuleInfo, lambda rows, _: checks.check_modules(rows)),
    "codes": _rows("codes", d.CodeInfo),
    "files": _files,
    "metas": _rows("metas", d.TensorMeta, lambda rows, _: checks.check_metas(rows)),
    "forms": lambda database: [json_codec.load_form(text) for text in database.texts("forms")],
    "names": _names,
    "storages": lambda database: _read_column(database, *schema.STORAGES),
    "schemas": _schemas,
    "info": _fact("info", checks.check_info),
    "steps": _rows("steps", d.StepInfo, checks.check_steps),
    "captures": _rows("captures", d.CaptureInfo, checks.check_captures),
    "source_lines": _source_lines,
    "environment": _fact("environment"),
}
