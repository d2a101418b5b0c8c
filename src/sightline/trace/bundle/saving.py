"""``save``: a trace becomes a bundle, or takes the place of the one that was there, in one step.

New shards come first, under names of their own; the database is written beside the old one and then takes its
name, which is the one moment at which the bundle changes; shards of the old one go last. Whatever ends a save
half-way, a reader finds the whole old bundle or the whole new one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from sightline import _version
from sightline.errors import CaptureError, InvalidTrace, SightlineError, UsageError
from sightline.notation import bytes_text
from sightline.trace.bundle import checks, plain, records, schema
from sightline.trace.bundle.columns import encode
from sightline.trace.bundle.database import Database, checksum_of, dump_json
from sightline.trace.bundle.environment import environment_of
from sightline.trace.bundle.plain import parsed
from sightline.trace.bundle.schema import Damage
from sightline.trace.bundle.sources import SourceText, gather
from sightline.trace.bundle.tensorfiles import Placing
from sightline.trace.data import TraceData
from sightline.trace.dtypes import nbytes_of
from sightline.trace.shards import is_shard

#: What ``info`` says of where a recording was made.
_PRIVATE: Final = ("torch", "python", "pid")

Chunk = tuple[str, str, int, int, bytes]


def save(
    data: TraceData, path: str | os.PathLike[str], *, source: bool = True, environment: bool = True
) -> str:
    """Write a trace to the bundle at ``path``; returns one line that says what went in.

    ``source=False`` leaves out the text of the source files, ``environment=False`` versions, host and command
    line. A bundle that is there already is replaced; any other folder with something in it is refused.

    >>> import tempfile
    >>> from sightline.trace.bundle.loading import load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(load(folder), "run.sight")
    Traceback (most recent call last):
    sightline.errors.UsageError: ... is no sightline recording: there is no rank0.db in it.
    """
    folder = Path(path)
    _check_folder(folder)
    placing = Placing(folder / schema.TENSORS)
    temporary = folder / f".{schema.DATABASE}.{os.getpid()}-{os.urandom(4).hex()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shards = placing.place(data.captures, data.store)
        sources = gather(data) if source else {}
        told = environment_of(data) if environment else {}
        _write(temporary, data, shards, sources, told, keep_private=environment)
        with _alone(folder):
            before = _shards_of(folder / schema.DATABASE)
            os.replace(temporary, folder / schema.DATABASE)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            placing.undo()
        if isinstance(error, OSError | sqlite3.Error) and not isinstance(error, SightlineError):
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CaptureError(f"{folder} could not be written: {why.rstrip('.')}.") from error
        raise
    _sync_folder(folder)
    for name in before - set(shards):
        with contextlib.suppress(OSError):  # it stays, and nobody looks at it
            (folder / schema.TENSORS / name).unlink(missing_ok=True)
    return _said(folder, data, sources, told)


def _check_folder(folder: Path) -> None:
    """Refuse to put a bundle where something else is."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a recording is saved to a folder, such as run.sight.")
    if folder.is_dir() and not (folder / schema.DATABASE).exists():
        others = [name for name in os.listdir(folder) if name != schema.TENSORS and not name.startswith(".")]
        if others:
            raise UsageError(
                f"{folder} is a folder with other things in it, such as {min(others)!r}; "
                f"save to a new one, such as {folder / 'run.sight'}."
            )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time, where a system can do that.

    Elsewhere a save that is overtaken at this moment may leave shards that nobody looks at.
    """
    try:
        import fcntl

        number = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _shards_of(database: Path) -> set[str]:
    """The shards of the bundle that is about to be replaced; none of one that cannot be read."""
    if not database.exists():
        return set()
    try:
        opened = Database(database)
    except SightlineError:
        return set()
    try:
        with opened.guard():
            names = [parsed(text) for text in opened.texts("shards")]
        return {name for name in names if isinstance(name, str) and is_shard(name)}
    except SightlineError:
        return set()
    finally:
        opened.close()


def _write(
    path: Path, data: TraceData, shards: list[str], sources: Mapping[str, SourceText], told: dict[str, Any],
    *, keep_private: bool,
) -> None:  # fmt: skip
    """A whole database under a name that nobody reads."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # No journal: a file that is not finished is thrown away.
        for pragma in (f"page_size = {schema.PAGE}", "journal_mode = OFF", "synchronous = OFF",
                       "locking_mode = EXCLUSIVE", f"application_id = {schema.APPLICATION_ID}",
                       f"user_version = {schema.VERSION}"):  # fmt: skip
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("BEGIN")
        for statement in schema.TABLES.values():
            connection.execute(statement)
        try:
            counts, sums = _write_tables(connection, data, shards, sources)
        except Damage as why:
            raise InvalidTrace(f"This recording contradicts itself and cannot be saved: {why}.") from None
        private = () if keep_private else _PRIVATE
        facts = {
            "counts": dump_json(counts),
            "info": plain.dumps({key: value for key, value in data.info.items() if key not in private}),
            "written": dump_json(_written()),
            **({"environment": plain.dumps(told)} if told else {}),
        }
        sums |= {f"facts.{name}": zlib.crc32(text.encode()) for name, text in facts.items()}
        facts["sums"] = dump_json(sums)
        connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        connection.execute("COMMIT")
        _pad(connection, path, schema.decoded_bytes(counts))
    finally:
        connection.close()
    _sync(path)


def _written() -> dict[str, str]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"by": f"sightline {_version.__version__}", "at": now}


def _write_tables(
    connection: sqlite3.Connection, data: TraceData, shards: list[str], sources: Mapping[str, SourceText]
) -> tuple[dict[str, int], dict[str, int]]:
    """Every table; returns how many rows each has, and the checksums of the texts."""
    texts = _texts(data, shards)
    counts = {name: len(rows) for name, rows in texts.items()} | {"sources": len(sources)}
    counts |= {kind: len(getattr(data, kind)) for kind in schema.KINDS} | {"storages": len(data.storages)}
    for kind, lists in (("ops", data.ops), ("calls", data.calls)):
        counts |= {f"{kind}.inputs": len(lists.inputs), f"{kind}.outputs": len(lists.outputs)}
    checks.check_modules(data.modules)
    checks.check_metas(data.metas)
    checks.check_steps(data.steps, counts)
    checks.check_captures(data.captures, counts)
    checks.check_spans(data.calls.first_op, data.calls.end_op, counts)
    for kind in schema.KINDS:
        connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?, ?)", _columns(data, kind, counts))
    kind, name = schema.STORAGES
    connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?, ?)", _chunks(kind, name, data.storages))
    for table, rows in texts.items():
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", enumerate(rows))  # noqa: S608  # ours
    connection.executemany("INSERT INTO sources VALUES (?, ?, ?, ?, ?)", _source_rows(sources))
    return counts, {table: checksum_of(rows) for table, rows in texts.items()}


def _texts(data: TraceData, shards: list[str]) -> dict[str, list[str]]:
    """The small tables as JSON."""
    found = {
        "names": [plain.dumps(name) for name in data.names],
        "codes": [records.dump(code) for code in data.codes],
        "files": [plain.dumps([file, seen.mtime_ns, seen.size]) for file, seen in data.files.items()],
        "metas": [records.dump(meta) for meta in data.metas],
        "forms": [plain.dump_form(form) for form in data.forms],
        "schemas": [plain.dumps([name, *arguments]) for name, arguments in data.schemas.items()],
        "modules": [records.dump(module) for module in data.modules],
        "steps": [records.dump(step) for step in data.steps],
        "captures": [records.dump(info) for info in data.captures],
        "shards": [plain.dumps(name) for name in shards],
    }
    return {name: found[name] for name in schema.TEXTS}


def _columns(
    data: TraceData, kind: str, counts: Mapping[str, int]
) -> Iterator[tuple[str, str, int, int, bytes]]:
    for name, dtype in schema.columns_of(kind).items():
        column = np.ascontiguousarray(getattr(getattr(data, kind), name), dtype=dtype)
        checks.check_column(kind, name, column, counts)
        yield from _chunks(kind, name, np.diff(column) if name.endswith("_offsets") else column)


def _chunks(kind: str, name: str, column: Any) -> Iterator[Chunk]:
    for number, at in enumerate(range(0, len(column), schema.CHUNK_ROWS)):
        part = column[at : at + schema.CHUNK_ROWS]
        yield kind, name, number, len(part), encode(part, at, f"{kind}/{name}/{number}")


def _source_rows(sources: Mapping[str, SourceText]) -> Iterator[tuple[int, str, int, int, bytes]]:
    for id, (file, (text, whole)) in enumerate(sources.items()):
        raw = text.encode("utf-8", "surrogatepass")
        yield id, plain.dumps(file), int(whole), len(raw), zlib.compress(raw)


def _pad(connection: sqlite3.Connection, path: Path, needed: int) -> None:
    """Make a file large enough for what it decodes to; only one that repeats one op without end needs it."""
    missing = -(-(needed - schema.FREE_BYTES) // schema.GROWTH) - path.stat().st_size
    if missing > 0:
        connection.execute(
            "INSERT INTO chunks VALUES ('', '', 0, 0, zeroblob(?))", (missing + schema.PAGE,)
        ).fetchall()


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Have the new name on the disk, too, where a system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _said(folder: Path, data: TraceData, sources: Mapping[str, SourceText], told: Mapping[str, Any]) -> str:
    parts = [_counted(len(data.ops), "op"), _counted(len(data.calls), "module call")]
    if data.captures:
        size = sum(nbytes_of(info.dtype, info.shape) or 0 for info in data.captures)
        parts.append(f"{_counted(len(data.captures), 'captured tensor')} ({bytes_text(size)})")
    whole = sum(text.whole for text in sources.values())
    kept = [f"the text of {_counted(whole, 'source file')}"] if whole else []
    kept += ["versions, host name and command line"] if told else []
    size = (folder / schema.DATABASE).stat().st_size
    with_ = f"; with {' and '.join(kept)}" if kept else "; without sources and environment"
    return f"{folder}: {', '.join(parts)}{with_}; {bytes_text(size)}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
