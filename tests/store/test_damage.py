"""Files that are cut short, altered, foreign, newer or hostile: one sentence each, no crash, no hang."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sightline.api import Trace
from sightline.data import trace_data as d
from sightline.data.validate import validate
from sightline.errors import DamagedFile, InvalidTrace
from sightline.store import bundle_schema as schema
from sightline.store import checks, load
from sightline.store.column_codec import encode
from sightline.store.shard_files import ListedShards
from tests.builders import make_trace
from tests.growth import calls_of
from tests.store.bundles import all_views, altered, captured, saved


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that no test may change."""
    return saved(captured(), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy.sight"))


def read_everything(path: Path) -> None:
    """Touch every column and table, and draw every view."""
    data = load(path)
    for kind in schema.KINDS:
        for name in schema.columns_of(kind):
            getattr(getattr(data, kind), name)
    for table in ("storages", "info", "environment", *schema.TEXTS[:-1]):
        getattr(data, table)
    for file in data.sources:
        data.sources[file]
    all_views(Trace(data))


def refused(path: Path) -> str:
    with pytest.raises(DamagedFile) as error:
        read_everything(path)
    text = str(error.value)
    assert str(path / "rank0.db") in text
    assert text.endswith(".")
    assert len(text) < len(str(path)) + 250
    assert text.isprintable()
    return text


def test_cut_short_anywhere(bundle: Path, copy: Path) -> None:
    whole = (bundle / "rank0.db").read_bytes()
    offsets = {0, 1, 15, 16, 99, 100, 107, 108, 511, 512, 4095, 4096, len(whole) - 1, len(whole) - 4096}
    for offset in sorted(offsets | set(range(0, len(whole), 2999))):
        (copy / "rank0.db").write_bytes(whole[:offset])
        with pytest.raises(DamagedFile, match=r"cut short|not a database"):
            load(copy)


def test_flipped_bits_are_found_or_do_no_harm(bundle: Path, copy: Path) -> None:
    whole = (bundle / "rank0.db").read_bytes()
    chance = random.Random(0)
    found = 0
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(chance.choice([1, 1, 1, 8, 64])):
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        (copy / "rank0.db").write_bytes(raw)
        try:
            read_everything(copy)
        except DamagedFile:
            found += 1
    assert found > 100  # the rest hit free space in pages


def test_validate_reads_every_column(bundle: Path) -> None:
    data = load(bundle)
    with contextlib.suppress(InvalidTrace):  # it was made by hand
        validate(data)
    for kind in schema.KINDS:
        assert set(schema.columns_of(kind)) <= set(vars(getattr(data, kind)))
    assert {"storages", "info", *schema.TEXTS[:-1]} <= set(vars(data))


def test_overwritten_pages_are_found(bundle: Path, copy: Path) -> None:
    whole = (bundle / "rank0.db").read_bytes()
    chance = random.Random(1)
    pages = len(whole) // schema.PAGE
    for page in range(pages):
        raw = bytearray(whole)
        other = chance.randrange(pages) * schema.PAGE
        raw[page * schema.PAGE : (page + 1) * schema.PAGE] = whole[other : other + schema.PAGE]
        (copy / "rank0.db").write_bytes(raw)
        with contextlib.suppress(DamagedFile):
            read_everything(copy)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "x.sight"
    path.mkdir()
    (path / "rank0.db").write_bytes(b"hello" * 1000)
    assert "no sightline recording: it is not a database" in refused(path)
    (path / "rank0.db").unlink()
    other = sqlite3.connect(path / "rank0.db")
    other.execute("CREATE TABLE t(x)")
    other.commit()
    other.close()
    assert "another program's database" in refused(path)


def test_a_newer_format_asks_for_an_update(copy: Path) -> None:
    altered(copy, f"PRAGMA user_version = {schema.VERSION + 1}")
    assert "was written by a newer sightline (format 2; this one reads up to 1)" in refused(copy)


def declared_later(monkeypatch: pytest.MonkeyPatch, table: str, name: str) -> None:
    """As if a column had been declared after everything that is on disk was written."""
    columns = schema.KINDS[table].declared
    column = columns[name]
    later = replace(column, meaning=replace(column.meaning, since=schema.REVISION + 1))
    monkeypatch.setitem(columns, name, later)


def test_a_column_that_was_declared_later_is_missing_in_every_row(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(copy, "DELETE FROM chunks WHERE kind = 'ops' AND name = 'thread'")
    assert "ops/thread has 0 rows" in refused(copy)
    declared_later(monkeypatch, "ops", "thread")
    data = load(copy)
    assert data.ops.thread.tolist() == [-1] * len(data.ops)
    assert {op.thread for op in Trace(data).ops} == {-1}


@pytest.mark.parametrize("revision", ["0", '"1"', "null", "[]"])
def test_a_revision_that_is_none(copy: Path, revision: str) -> None:
    altered(copy, f"UPDATE facts SET data = '{revision}' WHERE name = 'revision'")
    assert "the revision of its columns is malformed" in refused(copy)


def test_a_bundle_without_a_revision_is_of_the_first(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered(copy, "DELETE FROM facts WHERE name = 'revision'", "DELETE FROM chunks WHERE name = 'thread'")
    declared_later(monkeypatch, "ops", "thread")
    assert set(load(copy).ops.thread.tolist()) == {-1}


@pytest.mark.parametrize("added", sorted(schema.ADDED))
def test_an_older_bundle_without_a_table_opens(added: str, copy: Path) -> None:
    connection = sqlite3.connect(copy / "rank0.db")
    ((text,),) = connection.execute("SELECT data FROM facts WHERE name = 'counts'")
    connection.close()
    counts = json.loads(text)
    del counts[added]
    altered(copy, f"DELETE FROM chunks WHERE kind = '{added}'")
    altered(copy, "UPDATE facts SET data = ? WHERE name = 'counts'", values=(json.dumps(counts),))
    data = load(copy)
    assert len(getattr(data, added)) == 0
    assert Trace(data).ops[0].device_duration is None


def test_a_file_that_is_still_being_written_says_so(copy: Path) -> None:
    (copy / "rank0.db-wal").write_bytes(b"x")
    assert "was not closed: rank0.db-wal lies beside it" in refused(copy)


def test_a_pipe_or_folder_is_not_waited_for(copy: Path) -> None:
    (copy / "rank0.db").unlink()
    os.mkfifo(copy / "rank0.db")
    assert "not a regular file" in refused(copy)
    (copy / "rank0.db").unlink()
    (copy / "rank0.db").mkdir()
    assert "not a regular file" in refused(copy)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW evil AS SELECT 1",
        "CREATE TRIGGER evil AFTER INSERT ON names BEGIN SELECT load_extension('x'); END",
        "CREATE TABLE evil(x)",
        "CREATE INDEX evil ON names(data)",
        "CREATE VIRTUAL TABLE evil USING fts5(x)",
    ],
)
def test_nothing_but_our_tables(statement: str, copy: Path) -> None:
    altered(copy, statement)
    text = refused(copy)
    assert "which is no table of a bundle" in text or "list of tables was altered" in text


def test_a_table_that_is_a_view(copy: Path) -> None:
    altered(
        copy,
        "DROP TABLE names",
        "CREATE VIEW names AS WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i+1 FROM n) SELECT i AS id, "
        "'x' AS data FROM n",
    )
    assert "it holds the view 'names'" in refused(copy)


def test_a_missing_table(copy: Path) -> None:
    altered(copy, "DROP TABLE forms")
    assert "it has no table 'forms'" in refused(copy)


def count(name: str, number: Any) -> Callable[[Path], Path]:
    def change(path: Path) -> Path:
        connection = sqlite3.connect(path / "rank0.db")
        ((text,),) = connection.execute("SELECT data FROM facts WHERE name = 'counts'")
        connection.close()
        counts = json.loads(text)
        counts[name] = number
        return altered(path, "UPDATE facts SET data = ? WHERE name = 'counts'", values=(json.dumps(counts),))

    return change


def column(kind: str, name: str, change: Callable[[Any], Any]) -> Callable[[Path], Path]:
    """A column with other numbers in it, its checksum made to fit."""

    def forge(path: Path) -> Path:
        values = np.array(getattr(getattr(load(path), kind), name))
        if name.endswith("_offsets"):
            values = np.diff(values)
        forged = change(values)
        chunk = encode(forged, 0, f"{kind}/{name}/0")
        statement = f"UPDATE chunks SET data = ? WHERE kind = '{kind}' AND name = '{name}'"
        return altered(path, statement, values=(chunk,))

    return forge


def text(table: str, row: int, data: Any) -> Callable[[Path], Path]:
    data = data if isinstance(data, str | bytes | int | None) else json.dumps(data)
    return sql(f"UPDATE {table} SET data = ? WHERE id = {row}", data)


def sql(statement: str, *values: Any) -> Callable[[Path], Path]:
    return lambda path: altered(path, statement, values=values)


def set_at(row: int, number: int) -> Callable[[Any], Any]:
    def change(values: Any) -> Any:
        values[row] = number
        return values

    return change


HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "huge count": (count("ops", 1 << 39), "a file of"),
    "absurd count": (count("ops", 1 << 80), "no valid count of ops"),
    "negative count": (count("ops", -1), "no valid count of ops"),
    "count that is none": (count("frames", "many"), "no valid count of frames"),
    "huge flat count": (count("ops.inputs", 1 << 39), "a file of"),
    "huge table": (count("names", 1 << 39), "a file of"),
    "one op more": (count("ops", 64), "ops/name has|rows"),
    "one name more": (count("names", 1), "points at|names has more than the 1 rows"),
    "no counts": (sql("UPDATE facts SET data = '[]' WHERE name = 'counts'"), "no valid count"),
    "id beyond": (column("ops", "frame", set_at(3, 1 << 30)), "ops/frame of row 3 points at"),
    "id below": (column("ops", "name", set_at(3, -2)), "ops/name of row 3 points at -2"),
    "level": (column("ops", "level", set_at(0, 2)), "ops/level of row 0"),
    "phase": (column("calls", "phase", set_at(0, 100)), "calls/phase of row 0"),
    "kind": (column("values", "kind", set_at(0, -1)), "values/kind of row 0"),
    "own parent": (column("frames", "parent", set_at(2, 2)), "frames/parent of row 2 does not point back"),
    "circle": (column("calls", "parent", set_at(1, 2)), "calls/parent of row 1 does not point back"),
    "forward": (column("ops", "forward", set_at(0, 5)), "does not point back"),
    "base": (column("values", "base", set_at(0, 0)), "does not point back"),
    "ops of a call": (column("calls", "end_op", set_at(0, 1 << 30)), "invalid range"),
    "call that ends first": (column("calls", "end_op", set_at(0, -5)), "invalid range"),
    "negative list": (column("ops", "input_offsets", set_at(0, -5)), "negative length"),
    "long list": (column("ops", "input_offsets", set_at(0, 500)), "does not fit"),
    "overflowing lists": (column("ops", "input_offsets", set_at(0, 1 << 62)), "does not fit"),
    "rows": (sql("UPDATE chunks SET rows = 99999999999 WHERE name = 'line'"), "more than"),
    "no rows": (sql("UPDATE chunks SET rows = 0 WHERE name = 'line'"), "more than|rows"),
    "rows that are none": (sql("UPDATE chunks SET rows = 'x' WHERE name = 'line'"), "rows"),
    "chunk of text": (sql("UPDATE chunks SET data = 'x' WHERE name = 'line'"), "no chunk 0"),
    "chunk of zeros": (
        sql("UPDATE chunks SET data = zeroblob(100) WHERE name = 'line'"), "altered"
    ),
    "no chunk": (sql("DELETE FROM chunks WHERE name = 'line'"), "frames/line has 0 rows"),
    "chunk twice": (
        sql("INSERT INTO chunks SELECT kind, name, 1, rows, data FROM chunks WHERE name = 'line'"
        ),
        "more than",
    ),
    "null": (text("names", 0, None), "no text 0"),
    "bytes": (text("names", 0, b"\xff\xfe"), "no text 0"),
    "bad utf-8": (
        sql("UPDATE names SET data = CAST(x'ff22' AS TEXT) WHERE id = 0"), "UTF-8|damaged"
    ),
    "number": (text("names", 0, "1"), "not all texts"),
    "no json": (text("forms", 0, "{"), "not valid JSON"),
    "deep json": (text("forms", 0, "[" * 50_000), "not valid JSON"),
    "deep form": (text("forms", 0, "[[" + "[" * 200 + "]" * 200 + "],null]"), "too deep"),
    "row number": (sql("UPDATE names SET id = 1000 WHERE id = 0"), "no text 0"),
    "module": (text("modules", 0, ["", [""], "Net", "net", 0, "", True, 0, []]), "module 0 is inside itself"),
    "lost module": (text("modules", 0, ["", [""], "Net", "net", 99, "", True, 0, []]), "not there"),
    "shape": (text("metas", 0, [[-1], None, "float32", "cpu", "strided", 4, "Tensor"]), "negative size"),
    "capture": (
        text("captures", 0, ["", "fc", "o", 0, 0, "output", "", 99999, [2], "float32", True]),
        "invalid description",
    ),
    "role": (
        text("captures", 0, ["", "fc", "o", 0, 0, "\x1b[31m", "", 1, [2], "float32", True]),
        "invalid description",
    ),
    "shard that is none": (text("shards", 0, "null"), "no name of a shard"),
    "shard twice": (text("shards", 1, '"000000.safetensors"'), "no name of a shard"),
    "shard elsewhere": (text("shards", 0, '"../../../etc/passwd"'), "no name of a shard"),
    "info": (sql("UPDATE facts SET data = '[1]' WHERE name = 'info'"), "'info' is malformed"),
    "fault count": (
        sql("""UPDATE facts SET data = '{"d":[["fault_count","many"]]}' WHERE name = 'info'"""
        ),
        "'fault_count'",
    ),
    "source bomb": (
        sql("UPDATE sources SET data = ?", zlib.compress(bytes(200 << 20))),
        "source 0 cannot be read",
    ),
    "source size": (sql("UPDATE sources SET size = 99999999999"), "source 0 is malformed"),
    "escape codes": (text("forms", 0, "\x1b[31mred\x07"), "not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str, copy: Path) -> None:
    forge, why = HOSTILE[name]
    said = refused(forge(copy))
    assert any(part in said for part in why.split("|")), said
    assert "\x1b" not in said


def test_after_a_fault_the_rest_can_still_be_read(copy: Path) -> None:
    data = load(column("ops", "frame", set_at(3, 1 << 30))(copy))
    for _ in range(2):
        with pytest.raises(DamagedFile):
            data.ops.frame  # noqa: B018
    assert len(data.ops.name) == len(data.ops)


def test_names_that_are_sql_or_escape_codes_are_text(tmp_path: Path) -> None:
    trace = make_trace()
    trace.data.names[:2] = ["'; DROP TABLE ops; --", "\x1b[2J\0"]
    assert load(saved(trace, tmp_path)).names[:2] == trace.data.names[:2]


def test_chains_too_long_to_be_followed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_LINKS", 3)
    assert "too long to be followed" in refused(copy)


def test_a_damaged_or_missing_shard_is_said_when_it_is_read(copy: Path) -> None:
    shard = next((copy / "tensors").glob("*.safetensors"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[: len(raw) // 2])
    data = load(copy)
    assert data.captures
    assert data.store is not None
    with pytest.raises(DamagedFile, match="is damaged"):
        data.store.read(data.captures[0].key)
    shard.unlink()
    data = load(copy)
    assert data.store is not None
    with pytest.raises(DamagedFile, match="is missing: it was lost, or another recording saved over"):
        data.store.read(data.captures[0].key)


def test_a_tree_of_tables_that_runs_in_circles(bundle: Path, copy: Path) -> None:
    raw = bytearray((bundle / "rank0.db").read_bytes())
    for page in range(1, len(raw) // schema.PAGE):  # every table becomes a page whose children are itself
        start = page * schema.PAGE
        if raw[start] == 0x0D:
            raw[start : start + 12] = struct.pack(">BHHHBI", 5, 0, 200, 3000, 0, page + 1)
            for cell in range(200):
                struct.pack_into(">H", raw, start + 12 + 2 * cell, 3000)
            raw[start + 3000 : start + 3005] = struct.pack(">IB", page + 1, 1)
    (copy / "rank0.db").write_bytes(raw)
    assert calls_of(lambda: refused(copy)) < 100_000  # each page once, not each way to it


def test_many_shards_are_looked_at_once_each(tmp_path: Path) -> None:
    path = saved(captured(), tmp_path)
    connection = sqlite3.connect(path / schema.DATABASE, isolation_level=None)
    connection.execute("BEGIN")
    rows = ((number, json.dumps(f"{number:06d}.safetensors")) for number in range(100_000))
    connection.executemany("INSERT OR REPLACE INTO shards VALUES (?, ?)", rows)
    counts = json.loads(connection.execute("SELECT data FROM facts WHERE name = 'counts'").fetchone()[0])
    counts["shards"] = 100_000
    connection.execute("UPDATE facts SET data = ? WHERE name = 'counts'", (json.dumps(counts),))
    connection.execute("COMMIT")
    connection.close()
    store = load(altered(path)).store
    assert isinstance(store, ListedShards)
    assert len(store.names()) == 100_000  # it took minutes when each was compared with all


def deep_tree(depth: int) -> d.TraceData:
    """A recording of one call of each module in a tree without branches."""
    data = make_trace(1).data
    modules = [replace(data.modules[0], parent=at - 1, root=0, path="", aliases=()) for at in range(depth)]
    columns = {
        name: np.resize(getattr(data.calls, name), depth).astype(dtype)
        for name, dtype in schema.columns_of("calls").items()
    }
    for name in ("input_offsets", "output_offsets"):
        columns[name] = np.zeros(depth + 1, dtype=np.int64)
    for name in ("inputs", "outputs"):
        columns[name] = np.zeros(0, dtype=np.int32)
    columns |= {"module": np.arange(depth, dtype=np.int32), "parent": np.arange(-1, depth - 1)}
    columns |= {"first_op": np.zeros(depth, dtype=np.int32), "end_op": np.full(depth, len(data.ops))}
    columns |= {"phase": np.zeros(depth, dtype=np.int8), "frame": np.full(depth, -1)}
    return replace(data, modules=modules, calls=type(data.calls)(**columns))


def test_modules_are_so_deep_and_no_deeper(copy: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="call 2 ends after its parent"):  # its times are made up
        trace = Trace(load(saved(Trace(deep_tree(1500)), tmp_path)))
    for view in (trace.summary(), trace.code(), trace.call_order(), trace.log(), trace.source()):
        assert str(view)
    with pytest.warns(UserWarning, match="references that lead nowhere are left out"):
        deeper = Trace(load(saved(Trace(deep_tree(30_000)), tmp_path)))
    assert {module.parent for module in deeper.data.modules} == {-1}
    flat = [replace(each, parent=-1) for each in deep_tree(5000).modules]
    with pytest.warns(UserWarning, match="references that lead nowhere are left out"):
        longer = Trace(load(saved(Trace(replace(deep_tree(5000), modules=flat)), tmp_path)))
    assert np.flatnonzero(longer.data.calls.parent == -1).tolist() == [0, 4000]
    for trace in (deeper, longer):
        for view in (trace.summary(), trace.code(), trace.call_order(), trace.log(), trace.source()):
            assert str(view)
