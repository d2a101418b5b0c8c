"""``load``: a bundle as a `TraceData` that reads what is asked for, when it is asked for.

Opening reads the header, the schema and the counts. A column is decoded, and checked, the first time a view
touches it; so are the small tables. What is read stays read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.errors import UsageError
from sightline.trace import data as d
from sightline.trace.bundle import checks, json_codec, schema
from sightline.trace.bundle.column_codec import decode
from sightline.trace.bundle.database import Database
from sightline.trace.bundle.journal import JOURNAL
from sightline.trace.bundle.limits import check_written
from sightline.trace.bundle.recovery import open_journal
from sightline.trace.bundle.schema import Damage, shown
from sightline.trace.bundle.shard_files import ListedShards
from sightline.trace.shards import is_shard
from sightline.trace.source_lines import SourceLines

Array = NDArray[Any]


def load(path: str | os.PathLike[str]) -> LoadedTrace:
    """Open a bundle, or one database of it; nothing is read yet that no view has asked for.

    Of a recording whose process was killed, or is still running, there is only a journal: it is read at once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(folder)
    Traceback (most recent call last):
    sightline.errors.UsageError: ... is no sightline recording: it is an empty folder.
    """
    given = Path(path)
    if given.is_dir():
        database = given / schema.DATABASE
        if not database.exists() and (given / JOURNAL).exists():
            return CutOff.of_journal(given / JOURNAL)
        if not database.exists():
            why = f"there is no {schema.DATABASE} in it" if any(given.iterdir()) else "it is an empty folder"
            raise UsageError(f"{given} is no sightline recording: {why}.")
        return LoadedTrace.of(Database(database))
    if not given.exists():
        raise UsageError(f"There is no recording {given}{_near(given)}")
    if given.name == JOURNAL:
        return CutOff.of_journal(given)
    return LoadedTrace.of(Database(given))


def _near(missing: Path) -> str:
    """The end of a sentence: which recording beside it may have been meant."""
    try:
        beside = {path.stem: path for path in missing.parent.iterdir() if _is_recording(path)}
    except OSError:
        beside = {}
    near = get_close_matches(missing.stem, beside, 1)
    return f"; did you mean {beside[near[0]]}?" if near else "."


def _is_recording(path: Path) -> bool:
    return any((path / name).exists() for name in (schema.DATABASE, JOURNAL))


class _LazyColumns:
    """Columns that are decoded when they are first read; mixed into each class of columns.

    Made without ``__init__``, which stays that of the dataclass: `dataclasses.replace` gives plain columns.
    """

    def __len__(self) -> int:
        rows = self.__dict__.get("_rows")
        return len(next(iter(self.__dict__.values()))) if rows is None else rows

    def __getattr__(self, name: str) -> Array:
        # Reached only for what is not there yet: the first read of a column, or a name that is none.
        kind, read = self.__dict__.get("_kind"), self.__dict__.get("_read")
        if kind is None or read is None or name not in schema.columns_of(kind):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        column: Array = read(kind, name)
        self.__dict__[name] = column
        return column

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {type(self).__name__}>"


#: Each class of columns, lazy.
_LAZY: Final = {
    kind: type(f"Loaded{base.__name__}", (_LazyColumns, base), {}) for kind, base in schema.KINDS.items()
}


class LoadedTrace(d.TraceData):
    """A `TraceData` out of a bundle. It also has ``sources`` and ``environment``, and can be closed.

    It is made by ``of``; ``__init__`` stays that of the dataclass, for `dataclasses.replace`.
    """

    @classmethod
    def of(cls, database: Database) -> LoadedTrace:
        """The trace in a database."""
        made = cls.__new__(cls)
        given: dict[str, Any] = {"_database": database, "path": database.path}
        for kind, lazy in _LAZY.items():
            given[kind] = object.__new__(lazy)
            given[kind].__dict__.update(_kind=kind, _rows=database.counts[kind], _read=made._column)
        with database.guard():
            given["store"] = _store(database)
        made.__dict__.update(given)  # past the frozen dataclass
        return made

    def close(self) -> None:
        """Let go of the file; what was not read yet can no longer be."""
        self._database.close()

    @property
    def counts(self) -> Mapping[str, int]:
        """How many rows each table has, without reading any."""
        return self._database.counts

    @property
    def sources(self) -> Mapping[str, str]:
        """The text of the source files that were saved, by their names."""
        return self.source_lines.texts or {}

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not there yet: the first read of a small table.
        reader = _TABLES.get(name)
        if reader is None or "_database" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self._database.guard():
            found = reader(self._database)
        self.__dict__[name] = found
        return found

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
            check_written(self, kind, name, column, database.size)
        return column


class CutOff(LoadedTrace):
    """A recording whose process was killed, or is still running: everything up to its last batch."""

    @classmethod
    def of_journal(cls, path: Path) -> CutOff:
        """The trace in a journal; all of it is read."""
        opened = open_journal(path)
        made = cls.__new__(cls)
        made.__dict__.update(vars(opened.data))  # past the frozen dataclass
        lines = SourceLines(opened.sources)
        made.__dict__.update(path=path, source_lines=lines, environment=opened.environment)
        return made

    def close(self) -> None:
        """Nothing is open."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How many rows each table has."""
        tables = (
            *schema.KINDS,
            "storages",
            "modules",
            "codes",
            "metas",
            "forms",
            "names",
            "steps",
            "captures",
        )
        return {name: len(getattr(self, name)) for name in tables}


def _read_column(database: Database, kind: str, name: str) -> Array:
    """A column out of its chunks; offsets are kept as lengths."""
    dtype = "<i8" if kind == "storages" else schema.columns_of(kind)[name]
    rows = database.counts["storages" if kind == "storages" else schema.length_name(kind, name)]
    offsets = name.endswith("_offsets")
    database.budget.take(f"{kind}/{name}", (rows + offsets) * np.dtype(dtype).itemsize)
    column = np.zeros(rows + offsets, dtype=dtype)
    target = column[1:] if offsets else column
    at = 0
    for number, (held, data) in enumerate(database.chunks(kind, name, rows)):
        target[at : at + held] = decode(data, held, dtype, at, f"{kind}/{name}/{number}")
        at += held
    if offsets:
        if len(target) and target.min() < 0:
            raise Damage(f"{kind}/{name} has lists of a negative length")
        np.cumsum(target, out=target)
    return column


def _store(database: Database) -> ListedShards | None:
    """Where the tensors are, if any were kept."""
    if not database.counts["captures"]:
        return None
    names: dict[str, None] = {}
    for text in database.texts("shards"):
        name = json_codec.parsed(text)
        if not isinstance(name, str) or not is_shard(name) or name in names:
            raise Damage(f"{shown(name)} is no name of a shard")
        names[name] = None
    return ListedShards(database.path.parent / schema.TENSORS, list(names))


def _rows(table: str, kind: type[Any]) -> Callable[[Database], list[Any]]:
    return lambda database: [json_codec.load(kind, text) for text in database.texts(table)]


def _names(database: Database) -> list[str]:
    names = [json_codec.parsed(text) for text in database.texts("names")]
    if not all(type(name) is str for name in names):
        raise Damage("its names are no texts")
    return names


def _files(database: Database) -> dict[str, d.FileInfo]:
    found = {}
    for text in database.texts("files"):
        file, *seen = _pair(text)
        if "\0" in file:
            raise Damage(f"{shown(file)} cannot be the name of a file")
        os.fsencode(file)  # what views ask the system about must be a name, and not an error
        found[file] = json_codec.load(d.FileInfo, json_codec.dumps(seen))
    return found


def _schemas(database: Database) -> dict[str, tuple[str, ...]]:
    found = {}
    for text in database.texts("schemas"):
        name, *arguments = _pair(text)
        if not all(type(argument) is str for argument in arguments):
            raise Damage(f"the arguments of {shown(name)} are no names")
        found[name] = tuple(arguments)
    return found


def _pair(text: str) -> list[Any]:
    given = json_codec.parsed(text)
    if not isinstance(given, list) or not given or type(given[0]) is not str:
        raise Damage(f"{shown(text)} has no name")
    return given


def _modules(database: Database) -> list[d.ModuleInfo]:
    found = [json_codec.load(d.ModuleInfo, text) for text in database.texts("modules")]
    checks.check_modules(found)
    return found


def _metas(database: Database) -> list[d.TensorMeta]:
    found = [json_codec.load(d.TensorMeta, text) for text in database.texts("metas")]
    checks.check_metas(found)
    return found


def _steps(database: Database) -> list[d.StepInfo]:
    found = [json_codec.load(d.StepInfo, text) for text in database.texts("steps")]
    checks.check_steps(found, database.counts)
    return found


def _captures(database: Database) -> list[d.CaptureInfo]:
    found = [json_codec.load(d.CaptureInfo, text) for text in database.texts("captures")]
    checks.check_captures(found, database.counts)
    return found


def _fact(name: str) -> Callable[[Database], dict[str, Any]]:
    def read(database: Database) -> dict[str, Any]:
        found = json_codec.loads(database.facts[name]) if name in database.facts else {}
        if not isinstance(found, dict) or not all(type(key) is str for key in found):
            raise Damage(f"its fact {name!r} is none")
        return found

    return read


def _info(database: Database) -> dict[str, Any]:
    info = _fact("info")(database)
    checks.check_info(info)
    return info


class Sources(Mapping[str, str]):
    """The source files in a bundle, each read when it is asked for."""

    def __init__(self, database: Database, found: dict[str, tuple[int, int]]) -> None:
        self._database = database
        self._found = found  # the id and the size of each

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __getitem__(self, file: str) -> str:
        """The text of a file, its lines ending in a newline."""
        id, size = self._found[file]
        with self._database.guard():
            return self._database.source(id, size)


def _source_lines(database: Database) -> SourceLines:
    listed = database.sources()
    found = {file: (id, size) for file, _, size, id in listed}
    return SourceLines(Sources(database, found), [file for file, whole, _, _ in listed if whole])


_TABLES: Final[dict[str, Callable[[Database], Any]]] = {
    "modules": _modules,
    "codes": _rows("codes", d.CodeInfo),
    "files": _files,
    "metas": _metas,
    "forms": lambda database: [json_codec.load_form(text) for text in database.texts("forms")],
    "names": _names,
    "storages": lambda database: _read_column(database, *schema.STORAGES),
    "schemas": _schemas,
    "info": _info,
    "steps": _steps,
    "captures": _captures,
    "source_lines": _source_lines,
    "environment": _fact("environment"),
}

__all__ = ["LoadedTrace", "Sources", "load"]
