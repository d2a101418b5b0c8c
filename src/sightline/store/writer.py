"""``save``: write a trace as a bundle, or replace the bundle at that path, atomically.

New shards are written first, under new names; then the database is written to a temporary file and renamed,
which is the moment at which the bundle changes; the old bundle's shards are removed last. Wherever a save is
interrupted, a reader gets the whole old bundle or the whole new one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from sightline import _version
from sightline.data.dtypes import nbytes_of
from sightline.data.trace_data import TraceData
from sightline.errors import CaptureError, InvalidTrace, SightlineError, UsageError
from sightline.notation import bytes_text
from sightline.store import bundle_schema as schema
from sightline.store import checks, json_codec
from sightline.store.checked_database import Database, dump_json, source_label, texts_checksum
from sightline.store.column_codec import encode
from sightline.store.damage import Damage
from sightline.store.disk_sink import DiskSink
from sightline.store.environment import environment_of
from sightline.store.json_codec import parse_json
from sightline.store.shard_files import ShardInstall, sync
from sightline.store.shards.shard_file import is_shard
from sightline.store.soundness import sound_part, warn_if_unsound
from sightline.store.sources import SourceText, collect_sources

#: The parts of ``info`` that belong to the environment.
PRIVATE: Final = ("torch", "python", "pid")


def save(
    data: TraceData, path: str | os.PathLike[str], *, source: bool = True, environment: bool = True
) -> str:
    """Write a trace to the bundle at ``path``; returns one line that summarizes it.

    ``source=False`` leaves out the text of the source files, ``environment=False`` versions, host and command
    line. An existing bundle is replaced atomically, whatever recording it holds; any other folder that is not
    empty is refused.

    Of a recording that contradicts itself the sound part is written, and a warning says so.

    >>> import tempfile
    >>> from sightline.store.reader import load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(load(folder), "run.sight")
    Traceback (most recent call last):
    sightline.errors.UsageError: ... is no sightline recording: it is an empty folder.
    """
    data = sound_part(data)
    line = save_columns(data, WholeColumns(data), path, source=source, environment=environment)
    warn_if_unsound(data, str(path))
    return line


class WholeColumns:
    """The columns of a `TraceData`, in chunks."""

    def __init__(self, data: TraceData) -> None:
        self._data = data

    def size(self, kind: str, name: str) -> int:
        """The length of a column; of offsets, the number of lists."""
        return len(self._column(kind, name)) - name.endswith("_offsets")

    def _column(self, kind: str, name: str) -> Any:
        return self._data.storages if kind == "storages" else getattr(getattr(self._data, kind), name)

    def checked_chunks(self, kind: str, name: str, counts: Mapping[str, int]) -> Iterator[Any]:
        """The chunks of a column after it passed its check; offsets as lengths of the lists."""
        column = self._column(kind, name)
        if kind != "storages":
            column = np.ascontiguousarray(column, dtype=schema.columns_of(kind)[name])
            checks.check_column(kind, name, column, counts)
        if name == "end_op":
            checks.check_spans(self._data.calls.first_op, column, counts)
        column = np.diff(column) if name.endswith("_offsets") else column
        for at in range(0, len(column), schema.CHUNK_ROWS):
            yield column[at : at + schema.CHUNK_ROWS]


class DiskColumns:
    """The columns of a recording that was assembled on disk; its frames are in memory."""

    def __init__(self, sink: DiskSink, data: TraceData) -> None:
        self._sink = sink
        self._whole = WholeColumns(data)

    def size(self, kind: str, name: str) -> int:
        """The length of a column; of offsets, the number of lists."""
        return self._whole.size(kind, name) if kind == "frames" else self._sink.size(kind, name)

    def checked_chunks(self, kind: str, name: str, counts: Mapping[str, int]) -> Iterator[Any]:
        """The chunks of a column, each after it passed its check."""
        if kind == "frames":
            yield from self._whole.checked_chunks(kind, name, counts)
            return
        at = 0
        for block in self._sink.blocks(kind, name):
            if kind != "storages" and not name.endswith("_offsets"):
                checks.check_block(kind, name, block, at, counts)
            yield block
            at += len(block)


Columns = WholeColumns | DiskColumns


def save_columns(
    data: TraceData, columns: Columns, path: str | os.PathLike[str], *, source: bool = True,
    environment: bool = True, sweep: Sequence[str] = (),
) -> str:  # fmt: skip
    """`save` for columns that need not be in memory; ``data`` has the small tables.

    ``sweep`` are files in the folder to remove once the bundle is complete.
    """
    folder = Path(path)
    if not sweep:
        _check_folder(folder)
    install = ShardInstall(folder / schema.TENSORS)
    temporary = folder / f".{schema.DATABASE}.{os.getpid()}-{os.urandom(4).hex()}.part"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        shards = install.install(data.captures, data.store)
        sources = collect_sources(data) if source else {}
        saved_environment = environment_of(data) if environment else {}
        counts = _write(temporary, data, columns, shards, sources, saved_environment, private=environment)
        with exclusive_lock(folder):
            before = _shards_of(folder / schema.DATABASE)
            os.replace(temporary, folder / schema.DATABASE)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            install.undo()
        if isinstance(error, OSError | sqlite3.Error) and not isinstance(error, SightlineError):
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CaptureError(f"{folder} could not be written: {why.rstrip('.')}.") from error
        raise
    with contextlib.suppress(OSError):  # not every system can do that
        sync(folder)  # the new name is on the disk too
    old = [*sweep, *(f"{schema.TENSORS}/{name}" for name in before - set(shards))]
    for name in old:
        with contextlib.suppress(OSError):  # a file that stays is ignored
            (folder / name).unlink(missing_ok=True)
    return _summary(folder, data, counts, sources, saved_environment)


def _check_folder(folder: Path) -> None:
    """Refuse a path where something other than a bundle is."""
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
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes, where the system has locks.

    Without locks, two saves at the same moment may leave shards that belong to no bundle.
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
    """The names of the shards of the bundle that is about to be replaced; no names if it cannot be read."""
    if not database.exists():
        return set()
    try:
        opened = Database(database)
    except SightlineError:
        return set()
    try:
        with opened.guard():
            names = [parse_json(text) for text in opened.texts("shards")]
        return {name for name in names if isinstance(name, str) and is_shard(name)}
    except SightlineError:
        return set()
    finally:
        opened.close()


def _write(
    path: Path, data: TraceData, columns: Columns, shards: list[str], sources: Mapping[str, SourceText],
    environment: dict[str, Any], *, private: bool,
) -> dict[str, int]:  # fmt: skip
    """Write a whole database; returns how many rows its tables have."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # only its owner reads it
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # No journal: an unfinished file is removed.
        for pragma in (f"page_size = {schema.PAGE}", "journal_mode = OFF", "synchronous = OFF",
                       "locking_mode = EXCLUSIVE", f"application_id = {schema.APPLICATION_ID}",
                       f"user_version = {schema.VERSION}"):  # fmt: skip
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("BEGIN")
        for statement in schema.TABLES.values():
            connection.execute(statement)
        try:
            counts, sums = _write_tables(connection, data, columns, shards, sources)
        except Damage as why:
            raise InvalidTrace(f"This recording contradicts itself and cannot be saved: {why}.") from None
        left_out = () if private else PRIVATE
        now = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {
            "counts": dump_json(counts),
            "revision": dump_json(schema.REVISION),
            "info": json_codec.dumps({key: value for key, value in data.info.items() if key not in left_out}),
            "written": dump_json({"by": f"sightline {_version.__version__}", "at": now}),
            **({"environment": json_codec.dumps(environment)} if environment else {}),
        }
        sums |= {f"facts.{name}": zlib.crc32(text.encode()) for name, text in facts.items()}
        facts["sums"] = dump_json(sums)
        connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        connection.execute("COMMIT")
    finally:
        connection.close()
    sync(path)
    return counts


def _write_tables(
    connection: sqlite3.Connection, data: TraceData, columns: Columns, shards: list[str],
    sources: Mapping[str, SourceText],
) -> tuple[dict[str, int], dict[str, int]]:  # fmt: skip
    """Write every table; returns how many rows each has, and the checksums of the texts."""
    texts = {
        "names": [json_codec.dumps(name) for name in data.names],
        "codes": [json_codec.dump(code) for code in data.codes],
        "files": [json_codec.dumps([file, info.mtime_ns, info.size]) for file, info in data.files.items()],
        "metas": [json_codec.dump(meta) for meta in data.metas],
        "forms": [json_codec.dump_form(form) for form in data.forms],
        "schemas": [json_codec.dumps([name, *arguments]) for name, arguments in data.schemas.items()],
        "modules": [json_codec.dump(module) for module in data.modules],
        "steps": [json_codec.dump(step) for step in data.steps],
        "captures": [json_codec.dump(info) for info in data.captures],
        "shards": [json_codec.dumps(name) for name in shards],
    }
    counts = {name: len(rows) for name, rows in texts.items()} | {"sources": len(sources)}
    for kind in schema.KINDS:
        counts[kind] = columns.size(kind, next(iter(schema.columns_of(kind))))
    counts["storages"] = columns.size(*schema.STORAGES)
    for kind in ("ops", "calls"):
        counts |= {f"{kind}.{name}": columns.size(kind, name) for name in ("inputs", "outputs")}
    checks.check_modules(data.modules)
    checks.check_metas(data.metas)
    checks.check_steps(data.steps, counts)
    checks.check_captures(data.captures, counts)
    for kind in schema.KINDS:
        for name in schema.columns_of(kind):
            _write_column(connection, columns, kind, name, counts)
    _write_column(connection, columns, *schema.STORAGES, counts)
    for table, rows in texts.items():
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", enumerate(rows))  # noqa: S608  # ours
    labels: list[str] = []
    for id, (file, source) in enumerate(sources.items()):
        raw = source.text.encode("utf-8", "surrogatepass")
        name, whole, size = json_codec.dumps(file), int(source.whole), len(raw)
        row = (id, name, whole, size, zlib.compress(raw))
        connection.execute("INSERT INTO sources VALUES (?, ?, ?, ?, ?)", row)
        labels.append(source_label(name, whole, size))
    sums = {table: texts_checksum(rows) for table, rows in texts.items()}
    return counts, {**sums, "sources": texts_checksum(labels)}


def _write_column(
    connection: sqlite3.Connection, columns: Columns, kind: str, name: str, counts: Mapping[str, int]
) -> None:
    at = 0
    for number, part in enumerate(columns.checked_chunks(kind, name, counts)):
        data = encode(np.ascontiguousarray(part), at, f"{kind}/{name}/{number}")
        connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?)", (kind, name, number, len(part), data))
        at += len(part)


def _summary(
    folder: Path, data: TraceData, counts: Mapping[str, int], sources: Mapping[str, SourceText],
    environment: Mapping[str, Any],
) -> str:  # fmt: skip
    """The line about a bundle: its contents and its size."""
    parts = [_counted(counts["ops"], "op"), _counted(counts["calls"], "module call")]
    if data.captures:
        size = sum(nbytes_of(info.dtype, info.shape) or 0 for info in data.captures)
        parts.append(f"{_counted(len(data.captures), 'captured tensor')} ({bytes_text(size)})")
    whole = sum(text.whole for text in sources.values())
    extras = [f"the text of {_counted(whole, 'source file')}"] if whole else []
    extras += ["versions, host name and command line"] if environment else []
    size = (folder / schema.DATABASE).stat().st_size
    stays = "names, paths, text arguments and errors as they were recorded stay"
    with_ = f"; with {' and '.join(extras)}" if extras else f"; without sources and environment ({stays})"
    return f"{folder}: {', '.join(parts)}{with_}; {bytes_text(size)}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def amend_info(folder: Path, more: dict[str, Any]) -> None:
    """Add to the info of a bundle, if there is one.

    The note of the exception that ended a run is known only after its bundle is written.
    """
    path = folder / schema.DATABASE
    if not path.exists():
        return
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        facts = dict(connection.execute("SELECT name, data FROM facts"))
        info = json_codec.dumps({**json_codec.loads(facts["info"]), **more})
        sums = parse_json(facts["sums"]) | {"facts.info": zlib.crc32(info.encode())}
        for name, text in (("info", info), ("sums", dump_json(sums))):
            connection.execute("UPDATE facts SET data = ? WHERE name = ?", (text, name))
        connection.execute("COMMIT")
    finally:
        connection.close()
