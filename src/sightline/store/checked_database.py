"""A database of a bundle, opened without trusting anything in it.

The header is checked before SQLite opens the file, so that one that is foreign, newer or cut short gets one
clear sentence. The schema must be exactly ours, so no view, trigger or default of the file ever runs; every
value is checked for its type, every length against what the file can hold. Nothing is written.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Final

from sightline.errors import DamagedFile
from sightline.store import bundle_schema as schema
from sightline.store.damage import Damage, damage_reported, escaped, quoted, require_regular_file
from sightline.store.json_codec import is_integer, parse_json
from sightline.store.limits import Budget, inflate, json_cost

_MAGIC: Final = b"SQLite format 3\x00"
_LEAF: Final = 0x0D  #: the type of a table's page without child pages
_BESIDE: Final = ("-wal", "-journal")
_MOST_ROWS: Final = 1 << 40
_ROW: Final = 200  #: bytes of memory for a row of a small table besides its text
#: How many databases are kept open; of more, those opened first are opened again for each query.
_MOST_OPEN: Final = 128
_open: Final[list[weakref.ref[Database]]] = []


class Database:
    """One database, read only; it stays open where another is saved over it, until it is suspended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.guard():
            self.size = _check_header(path)
            self.budget = Budget(self.size)
            self._file = path.absolute()  # the program may change its working folder
            self._identity = _identity(path)
            self._connection: sqlite3.Connection | None = _connect(self._file, self.size)
            self._close = weakref.finalize(self, self._connection.close)
            self._closed = False
            self._lock = threading.Lock()
            try:
                self._check_schema()
                self._read_facts()
            except BaseException:
                self._close()
                raise
        _open.append(weakref.ref(self))
        if len(_open) > _MOST_OPEN:
            held = [
                one
                for one in (reference() for reference in tuple(_open))
                if one is not None and one._close.alive
            ]
            for first in held[:-_MOST_OPEN]:
                first.suspend()
            _open[:] = map(weakref.ref, held[-_MOST_OPEN:])

    def guard(self) -> AbstractContextManager[None]:
        """Turn every error while reading into `DamagedFile` with one sentence."""
        return damage_reported(self.path)

    def close(self) -> None:
        """Close the file; tables that were not read yet cannot be read any more."""
        self._closed = True
        self._close()

    def suspend(self) -> None:
        """Close the file; it is opened again for each query, if it is still the same."""
        with self._lock:
            self._connection = None
            self._close()

    def texts(self, table: str) -> list[str]:
        """Every text of a table, in order."""
        count, room = self.counts[table], self.size
        texts: list[str] = []
        checksum = cost = 0
        query = f"SELECT id, data FROM {table} ORDER BY id LIMIT ?"  # noqa: S608  # a name of ours
        with self._rows(query, count + 1) as rows:
            for id, text in rows:
                if id != len(texts) or not isinstance(text, str):
                    raise Damage(f"{table} has no text {len(texts)}")
                room -= len(text)
                if len(texts) >= count or room < 0:
                    raise Damage(f"{table} has more than the {count} rows it should have")
                texts.append(text)
                cost += json_cost(text) + _ROW
                self.budget.take(f"its table {table!r}", cost)
                checksum = zlib.crc32(text.encode(), checksum)
        if len(texts) != count:
            raise Damage(f"{table} has {len(texts)} rows, not {count}")
        if checksum != self._sums.get(table):
            raise Damage(f"{table} was altered")
        return texts

    def chunks(self, kind: str, name: str, rows: int) -> list[tuple[int, bytes]]:
        """The chunks of a column: the number of rows and the bytes of each; they have ``rows`` together."""
        left, room = rows, self.size
        parts: list[tuple[int, bytes]] = []
        query = "SELECT number, rows, data FROM chunks WHERE kind = ? AND name = ? ORDER BY number"
        with self._rows(query, kind, name) as chunks:
            for number, count, data in chunks:
                if number != len(parts) or not isinstance(data, bytes):
                    raise Damage(f"{kind}/{name} has no chunk {len(parts)}")
                room -= len(data)
                if not is_integer(count) or not 0 < count <= left or room < 0:
                    raise Damage(f"{kind}/{name} has more than the {rows} rows it should have")
                parts.append((count, data))
                left -= count
        if left:
            raise Damage(f"{kind}/{name} has {rows - left} rows, not {rows}")
        return parts

    def sources(self) -> list[tuple[str, bool, int, int]]:
        """The source files: name, whether it is whole, its size, and the id of its row."""
        sources: list[tuple[str, bool, int, int]] = []
        labels: list[str] = []
        total = 0
        count = self.counts["sources"]
        query = "SELECT id, file, whole, size FROM sources ORDER BY id LIMIT ?"
        with self._rows(query, count + 1) as rows:
            for id, file, whole, size in rows:
                if id != len(sources) or not isinstance(file, str) or not is_integer(size):
                    raise Damage(f"source {len(sources)} is malformed")
                name = parse_json(file)
                total += size
                if not isinstance(name, str) or not 0 <= size <= 4 * schema.MAX_SOURCE or id >= count:
                    raise Damage(f"source {len(sources)} is malformed")
                if total > 4 * schema.MAX_SOURCES:
                    raise Damage("its sources are too large")
                sources.append((name, whole == 1, size, id))
                labels.append(source_label(file, whole, size))
        if len(sources) != count:
            raise Damage(f"it has {len(sources)} sources, not {count}")
        if self._sums.get("sources", -1) not in (-1, texts_checksum(labels)):  # older files have no checksum
            raise Damage("the names of its sources were altered")
        return sources

    def source(self, id: int, size: int) -> str:
        """The text of a source file; ``size`` is in bytes."""
        with self._rows("SELECT data FROM sources WHERE id = ?", id) as rows:
            data = next(rows, (None,))[0]
        text = inflate(data, size) if isinstance(data, bytes) else None
        if text is None:
            raise Damage(f"the text of source {id} cannot be read")
        self.budget.take(f"the text of source {id}", 2 * size + 64 * text.count(b"\n"))
        return text.decode("utf-8", "surrogatepass")

    @contextmanager
    def _rows(self, query: str, *values: Any) -> Iterator[Iterator[tuple[Any, ...]]]:
        """The rows of a query; one thread at a time, and the cursor is always closed."""
        with self._lock, self._connected() as connection:
            cursor = connection.execute(query, values)
            try:
                yield cursor
            finally:
                cursor.close()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """The connection; of a suspended database a new one."""
        if self._connection is not None or self._closed:
            if self._connection is None:
                raise Damage("it was closed")
            yield self._connection
            return
        _check_header(self._file)
        if _identity(self._file) != self._identity:
            raise Damage("it was replaced after it was opened")
        with closing(_connect(self._file, self.size)) as connection:
            yield connection

    def _check_schema(self) -> None:
        tables = set()
        with self._rows("SELECT type, name, sql FROM sqlite_master LIMIT 64") as rows:
            for kind, name, sql in rows:
                if kind == "index" and name in schema.INDEXES and sql is None:
                    continue
                if kind != "table" or schema.TABLES.get(name) != sql:
                    raise Damage(
                        f"it holds the {escaped(kind)} {quoted(name)}, which is no table of a bundle"
                    )
                tables.add(name)
        for name in schema.TABLES:
            if name not in tables:
                raise Damage(f"it has no table {name!r}")

    def _read_facts(self) -> None:
        """Read and check the facts, the revision and the counts."""
        facts: dict[str, str] = {}
        with self._rows("SELECT name, data FROM facts LIMIT 64") as rows:
            for name, data in rows:
                if not isinstance(name, str) or not isinstance(data, str):
                    raise Damage("its facts are malformed")
                facts[name] = data
        for name in ("counts", "sums", "info"):
            if name not in facts:
                raise Damage(f"it has no fact {name!r}")
        sums = parse_json(facts["sums"])
        self._sums: dict[str, Any] = sums if isinstance(sums, dict) else {}
        for name, data in facts.items():
            if name != "sums" and zlib.crc32(data.encode()) != self._sums.get(f"facts.{name}"):
                raise Damage(f"its fact {quoted(name)} was altered")
        revision = parse_json(facts.get("revision", "1"))
        if not is_integer(revision) or revision < 1:
            raise Damage("the revision of its columns is malformed")
        self.facts, self.revision = facts, int(revision)
        stated = parse_json(facts["counts"])
        counts: dict[str, int] = {}
        for name in schema.COUNTS:
            count: Any = stated.get(name) if isinstance(stated, dict) else None
            if count is None and name in schema.ADDED:
                count = 0
            if not is_integer(count) or not 0 <= count < _MOST_ROWS:
                raise Damage(f"it has no valid count of {name}")
            counts[name] = count
        needed = schema.decoded_bytes(counts)
        if needed > schema.allowed_bytes(self.size):
            raise Damage(
                f"it claims {needed} bytes of columns, more than a file of {self.size} bytes can hold"
            )
        for name in ("sources", *schema.TEXTS):
            if counts[name] > self.size:
                raise Damage(
                    f"it claims {counts[name]} {name}, more than a file of {self.size} bytes can hold"
                )
        self.counts = counts


def _identity(path: Path) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_header(path: Path) -> int:
    """Check the header of a file before SQLite opens it; returns the size of the file."""
    require_regular_file(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(108)
    if len(head) < 108 or not head.startswith(_MAGIC):
        raise DamagedFile(f"{path} is no sightline recording: it is not a database, or was cut short.")
    (page,) = struct.unpack_from(">H", head, 16)
    changes, pages = struct.unpack_from(">II", head, 24)
    (version,) = struct.unpack_from(">I", head, 60)
    application, current = struct.unpack_from(">I", head, 68)[0], struct.unpack_from(">I", head, 92)[0]
    if application != schema.APPLICATION_ID:
        raise DamagedFile(f"{path} is no sightline recording, but another program's database.")
    if version > schema.VERSION:
        raise DamagedFile(
            f"{path} was written by a newer sightline (format {version}; this one reads up to "
            f"{schema.VERSION}): update sightline to open it."
        )
    if version < 1 or page != schema.PAGE or changes != current:
        raise Damage("its header was altered")
    if pages * page != size:
        raise Damage(
            f"it has {size} bytes, not the {pages * page} it should have: it was cut short or altered"
        )
    if head[18:20] != b"\x01\x01":
        raise Damage("it is a database that was still being written to")
    if head[100] != _LEAF:
        raise Damage("its list of tables was altered")  # ours fits a page; a larger one may have cycles
    for end in _BESIDE:
        beside = path.with_name(path.name + end)
        if beside.exists():
            raise DamagedFile(
                f"{path} was not closed: {beside.name} lies beside it, so it is still being written, "
                f"or was when its process was killed."
            )
    return size


def _connect(path: Path, size: int) -> sqlite3.Connection:
    """Open a database read only, with every feature off that a reader does not need."""
    uri = f"{path.as_uri()}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(min(size, (1 << 31) - 1), 1 << 16))
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for name, value in (("trusted_schema", "OFF"), ("cell_size_check", "ON"), ("query_only", "ON"),
                            ("mmap_size", "0"), ("temp_store", "MEMORY")):  # fmt: skip
            connection.execute(f"PRAGMA {name} = {value}").close()
        if hasattr(connection, "setconfig"):  # from Python 3.12 on
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)  # type: ignore[attr-defined]  # same
        connection.set_authorizer(_authorized)
    except BaseException:
        connection.close()
        raise
    return connection


_READABLE: Final = frozenset({*schema.TABLES, "sqlite_master", "sqlite_schema"})


def _authorized(action: int, first: str | None, *_rest: str | None) -> int:
    """Allow selecting from our own tables and nothing else."""
    if action == sqlite3.SQLITE_SELECT or (action == sqlite3.SQLITE_READ and first in _READABLE):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def texts_checksum(texts: list[str]) -> int:
    """The checksum of a table of texts."""
    checksum = 0
    for text in texts:
        checksum = zlib.crc32(text.encode(), checksum)
    return checksum


def source_label(file: str, whole: Any, size: int) -> str:
    """The part of a source file's row that goes into the checksum."""
    return f"{file}/{whole}/{size}/"


def dump_json(value: Any) -> str:
    """Compact JSON for the facts."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
