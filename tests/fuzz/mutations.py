"""Damage that is thought out: files that pass every checksum and still say what no recorder would."""

from __future__ import annotations

import json
import random
import sqlite3
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sightline.store import bundle_schema as schema
from sightline.store.column_codec import decode, encode
from sightline.store.journal import HEAD, JOURNAL

INTEGERS = (0, 1, -1, 2, 7, -2, 63, 127, 128, -128, 255, 1 << 15, (1 << 31) - 1, -(1 << 31), 1 << 40, 1 << 62,
            (1 << 63) - 1, -(1 << 63), 1 << 63, 1 << 70)  # fmt: skip
FLOATS = (0.0, -0.0, 1e308, -1e308, 5e-324, 0.1)
TEXTS = ("", "\ud800", "\udcff/x.py", "\0", "\x1b[31m", "=cmd|' /C calc'!A0", "../../etc/passwd", "a.b.c",
         "…", "x" * 3000, "é" * 40, "\u202e", "<script>", "\n\n", "0", "None", "$1", "{", "%s", "float32",
         "cuda:0", "/dev/stdin", "*args", "a=b", "self")  # fmt: skip


def other(value: Any, chance: random.Random) -> Any:
    """Something else in the place of a piece of JSON, mostly of the same type: more of it gets through."""
    if chance.random() < 0.1:
        return chance.choice([True, None, 0, 1.5, "x", [], {}, [value], {"t": [value]}])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice([*INTEGERS, value + 1, value - 1, -value])
    if isinstance(value, float):
        return chance.choice(FLOATS)
    if isinstance(value, str):
        return chance.choice([*TEXTS, value * 2, value[:-1], value + "\ud800"])
    if isinstance(value, list):
        more = [chance.choice(value)] if value else [0]
        return chance.choice([[], value * 2, value * 300, value[:-1], value + more, value[::-1]])
    return chance.choice([{}, {"x": 1}, {"t": [value]}, {"t": []}, {"y": "x"}, {"i": "0x" + "f" * 5000}])


def somewhere(value: Any, chance: random.Random) -> Any:
    """The same piece of JSON with one thing in it changed."""
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [somewhere(part, chance) if place == at else part for place, part in enumerate(value)]
    if isinstance(value, dict) and value and chance.random() < 0.9:
        at = chance.choice(list(value))
        return {key: somewhere(part, chance) if key == at else part for key, part in value.items()}
    if isinstance(value, str) and value[:1] in "[{" and chance.random() < 0.8:  # JSON inside JSON
        try:
            return json.dumps(somewhere(json.loads(value), chance))
        except ValueError:
            pass
    return other(value, chance)


def flipped(raw: bytes, chance: random.Random) -> bytes:
    """A file with some of its bits flipped, cut short, or with a part of it somewhere else."""
    made = bytearray(raw)
    way = chance.random()
    if way < 0.7:
        for _ in range(chance.choice([1, 1, 2, 8, 64])):
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    elif way < 0.85:
        del made[chance.randrange(len(made)) :]
    else:
        start, end, to = sorted(chance.randrange(len(made)) for _ in range(3))
        made[to : to + end - start] = made[start:end]
    return bytes(made)


def numbers(column: Any, chance: random.Random) -> Any:
    """A column with other numbers in some of its rows."""
    made = column.copy()
    for _ in range(chance.choice([1, 1, 3, 20])):
        if len(made):
            at = chance.randrange(len(made))
            if made.dtype.kind == "f":
                made[at] = chance.choice([*FLOATS, float("nan"), float("inf"), float("-inf")])
            else:
                limits = np.iinfo(made.dtype)
                near = [int(made[at]) + 1, int(made[at]) - 1, int(chance.choice(made.tolist()))]
                number = chance.choice([*INTEGERS, *near, len(made), len(made) - 1])
                made[at] = min(max(number, int(limits.min)), int(limits.max))
    return made


# -- bundles ---------------------------------------------------------------------------------------------


def _raw(path: Path, chance: random.Random) -> None:
    database = path / schema.DATABASE
    database.write_bytes(flipped(database.read_bytes(), chance))


def _shard(path: Path, chance: random.Random) -> None:
    shards = sorted((path / schema.TENSORS).glob("*.safetensors"))
    if shards:
        shard = chance.choice(shards)
        shard.write_bytes(flipped(shard.read_bytes(), chance))


def _texts(connection: sqlite3.Connection, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 2, 5, 12])):
        table = chance.choice(schema.TEXTS)
        rows = connection.execute(f"SELECT id, data FROM {table}").fetchall()
        if rows:
            id, text = chance.choice(rows)
            changed = json.dumps(somewhere(json.loads(text), chance))
            connection.execute(f"UPDATE {table} SET data = ? WHERE id = ?", (changed, id))


def _facts(connection: sqlite3.Connection, chance: random.Random) -> None:
    name = chance.choice(["info", "info", "info", "counts", "environment", "written"])
    row = connection.execute("SELECT data FROM facts WHERE name = ?", (name,)).fetchone()
    if row is not None:
        changed = json.dumps(somewhere(json.loads(row[0]), chance))
        connection.execute("UPDATE facts SET data = ? WHERE name = ?", (changed, name))


def _columns(connection: sqlite3.Connection, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 1, 2, 4])):
        rows = connection.execute(
            "SELECT kind, name, number, rows, data FROM chunks WHERE rows > 0"
        ).fetchall()
        kind, name, number, count, data = chance.choice(rows)
        dtype = "<i8" if kind == "storages" else schema.columns_of(kind)[name]
        label = f"{kind}/{name}/{number}"
        column = np.asarray(decode(data, count, dtype, 0, label)).astype(dtype)
        changed = encode(numbers(column, chance), 0, label)
        connection.execute(
            "UPDATE chunks SET data = ? WHERE kind = ? AND name = ? AND number = ?",
            (changed, kind, name, number),
        )


def _sources(connection: sqlite3.Connection, chance: random.Random) -> None:
    rows = connection.execute("SELECT id, file, data FROM sources").fetchall()
    if rows:
        id, file, data = chance.choice(rows)
        way = chance.randrange(4)
        if way == 0:
            connection.execute("UPDATE sources SET size = ? WHERE id = ?", (chance.choice(INTEGERS[:-2]), id))
        elif way == 1:
            changed = json.dumps(other(json.loads(file), chance))
            connection.execute("UPDATE sources SET file = ? WHERE id = ?", (changed, id))
        else:
            text = bytearray(zlib.decompress(data)) or bytearray(b" ")
            for _ in range(3):
                text[chance.randrange(len(text))] = chance.choice(b"\n\0\xff([{:\"'x ")
            connection.execute("UPDATE sources SET data = ? WHERE id = ?", (zlib.compress(bytes(text)), id))


def _signed(connection: sqlite3.Connection) -> None:
    """Checksums that say all is well."""
    sums = json.loads(connection.execute("SELECT data FROM facts WHERE name = 'sums'").fetchone()[0])
    for table in schema.TEXTS:
        sums[table] = 0
        for (text,) in connection.execute(f"SELECT data FROM {table} ORDER BY id"):
            sums[table] = zlib.crc32(text.encode(), sums[table])
    for name, text in connection.execute("SELECT name, data FROM facts WHERE name != 'sums'").fetchall():
        sums[f"facts.{name}"] = zlib.crc32(text.encode())
    connection.execute("UPDATE facts SET data = ? WHERE name = 'sums'", (json.dumps(sums),))


_INSIDE: tuple[Callable[[sqlite3.Connection, random.Random], None], ...] = (
    _texts, _texts, _texts, _columns, _columns, _columns, _facts, _sources,
)  # fmt: skip


def alter_bundle(path: Path, chance: random.Random) -> None:
    """Damage a bundle in one of many ways."""
    way = chance.random()
    if way < 0.15:
        _raw(path, chance)
        return
    if way < 0.2:
        _shard(path, chance)
        return
    connection = sqlite3.connect(path / schema.DATABASE, isolation_level=None)
    try:
        connection.execute("BEGIN")
        chance.choice(_INSIDE)(connection, chance)
        _signed(connection)
        connection.execute("COMMIT")
    finally:
        connection.close()


# -- journals --------------------------------------------------------------------------------------------


def _frames(raw: bytes) -> list[tuple[dict[str, Any], list[bytes]]]:
    found, at = [], len(HEAD)
    while at < len(raw):
        _, length, _, _ = struct.unpack_from("<4sIII", raw, at)
        rest = raw[at + 16 : at + 16 + length]
        (size,) = struct.unpack_from("<I", rest)
        head = json.loads(zlib.decompress(rest[4 : 4 + size]))
        place, streams = 4 + size, []
        for _, _, held in head["streams"]:
            streams.append(rest[place : place + held])
            place += held
        found.append((head, streams))
        at += 16 + length
    return found


def _framed(head: dict[str, Any], streams: list[bytes]) -> bytes:
    packed = zlib.compress(json.dumps(head).encode(), 1)
    rest = struct.pack("<I", len(packed)) + packed + b"".join(streams)
    return struct.pack("<4sIII", b"SGJB", len(rest), zlib.crc32(rest), 0) + rest


def alter_journal(path: Path, chance: random.Random) -> None:
    """Damage a journal in one of many ways."""
    journal = path / JOURNAL
    raw = journal.read_bytes()
    way = chance.random()
    if way < 0.2:
        journal.write_bytes(flipped(raw, chance))
        return
    frames = _frames(raw)
    at = chance.randrange(len(frames))
    head, streams = frames[at]
    if way < 0.3:
        chance.shuffle(frames)
    elif way < 0.35:
        frames.insert(at, frames[at])
    elif way < 0.4:
        del frames[at]
    elif way < 0.7 or not streams:
        changed = somewhere(head, chance)
        frames[at] = (changed if isinstance(changed, dict) else {}, streams)
    else:
        which = chance.randrange(len(streams))
        name, count, _ = head["streams"][which]
        dtype = np.float64 if str(name).endswith("floats") else np.int64
        changed = numbers(np.frombuffer(zlib.decompress(streams[which]), dtype=dtype), chance)
        streams = [*streams]
        streams[which] = zlib.compress(changed.tobytes(), 1)
        listed = [list(each) for each in head["streams"]]
        listed[which] = [name, count, len(streams[which])]
        frames[at] = ({**head, "streams": listed}, streams)
    journal.write_bytes(HEAD + b"".join(_framed(*frame) for frame in frames))
