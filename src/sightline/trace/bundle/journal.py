"""The journal of a recording that is being written: one frame per batch, added at the end of one file.

``rank0.journal`` is there only while a recording runs, or after its process was killed. A frame is

    4 bytes "SGJB" · length of the rest · CRC-32 of the rest · length of its head · head · streams

The head is deflated JSON: what is new in the small tables, and how long each stream is; the streams are
deflated 64-bit numbers. A frame that is cut short at the end of the file was being written when its process
was killed: everything before it stands. Reading needs no lock, no second file and no write access.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from sightline.trace.assembly.arrays import EMPTY, IntArray
from sightline.trace.assembly.batch import (
    Batch,
    LateRows,
    Operation,
    SourcePosition,
    StepMark,
    Streams,
    Tables,
    ValueUpdate,
)
from sightline.trace.assembly.layout import COUNTS, FLOATS, LANES
from sightline.trace.bundle import json_codec
from sightline.trace.bundle.limits import Budget, json_cost
from sightline.trace.bundle.schema import Damage, shown
from sightline.trace.data import CaptureInfo, CodeInfo, FileInfo, ModuleInfo, TensorMeta
from sightline.trace.forms import Form

JOURNAL: Final = "rank0.journal"
VERSION: Final = 1
_MAGIC: Final = b"SIGHTJNL"
HEAD: Final = _MAGIC + struct.pack("<I", VERSION)
_FRAME: Final = struct.Struct("<4sIII")
_MARK: Final = b"SGJB"
_WINDOW: Final = 1 << 20  #: bytes in which the next frame is looked for at a time
_TRIES: Final = 1000  #: marks that may turn out to begin no frame
_STREAM_COST: Final = 32  #: bytes that a number of a stream takes, with what is assembled from it
_STREAMS: Final = ("ops", "calls", "values", "fresh", "floats", "counts")
_NUMBERS: Final = (
    "outputs", "absent", "nbytes", "late_nbytes", "memory", "device", "alive", "open_ops", "open_calls",
)  # fmt: skip
_LATE: Final = frozenset({*(f"late.{name}" for name in _STREAMS), "outputs", "absent", "late_nbytes"})
#: What a small table adds in one frame.
News = dict[str, list[Any]]


def encode(batch: Batch, news: News, info: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
    """A frame. ``more`` is what only some have: in the first what does not change, and source files."""
    streams = {name: getattr(batch.rows, name) for name in _STREAMS}
    streams |= {f"late.{name}": getattr(batch.late, name) for name in _STREAMS}
    streams |= {name: getattr(batch, name) for name in _NUMBERS}
    packed: list[bytes] = []
    lengths: list[list[Any]] = []
    for name, numbers in streams.items():
        if numbers is not None and (len(numbers) or name == "alive"):
            data = zlib.compress(np.ascontiguousarray(numbers).data.cast("B") if len(numbers) else b"", 1)
            packed.append(data)
            lengths.append([name, int(numbers.size), len(data)])
    told = {
        "streams": lengths, "end": batch.end, "news": news, "info": json_codec.dumps(info),
        "learned": batch.updates, "steps": batch.steps,
        "captures": [json_codec.dump(capture) for capture in batch.captures],
        **(more or {}),
    }  # fmt: skip
    head = zlib.compress(json.dumps(told, separators=(",", ":")).encode(), 1)
    rest = struct.pack("<I", len(head)) + head + b"".join(packed)
    return _FRAME.pack(_MARK, len(rest), zlib.crc32(rest), 0) + rest


def news_of(tables: Tables, since: dict[str, int], operators: Iterable[tuple[int, int, str]],
            flops: Iterable[tuple[Any, ...]]) -> News:  # fmt: skip
    """What is new in the tables; ``since`` says how much was told, and is brought up to date."""
    found: News = {
        "operations": [list(one) for one in tables.operations[since.get("operations", 0) :]],
        "metas": [json_codec.dump(one) for one in tables.metas[since.get("metas", 0) :]],
        "forms": [json_codec.dump_form(one) for one in tables.forms[since.get("forms", 0) :]],
        "places": [list(one) for one in tables.places[since.get("places", 0) :]],
        "codes": [json_codec.dump(one) for one in tables.codes[since.get("codes", 0) :]],
        "modules": [json_codec.dump(one) for one in tables.modules[since.get("modules", 0) :]],
        "files": [
            [file, seen.mtime_ns, seen.size]
            for file, seen in list(tables.files.items())[since.get("files", 0) :]
        ],
        "schemas": [
            [name, *names] for name, names in list(tables.schemas.items())[since.get("schemas", 0) :]
        ],
        "kernels": tables.kernels[since.get("kernels", 0) :],
        "operators": [list(one) for one in operators],
        "flops": [list(one) for one in flops],
    }
    for name in ("operations", "metas", "forms", "places", "codes", "modules", "files", "schemas", "kernels"):
        since[name] = since.get(name, 0) + len(found[name])
    return {name: rows for name, rows in found.items() if rows}


class Journal:
    """The frames of a journal, each read when it is asked for; nothing in them is trusted.

    ``file`` is one that is open already: it can be read even where its name is gone.
    """

    def __init__(self, path: Path | None, pending: Iterable[bytes] = (), file: int = -1) -> None:
        self.path = path
        self.size = 0
        self._file = -1
        self._frames: list[tuple[int, int] | bytes] = []  # where each is, or itself
        self._heads: list[dict[str, Any]] = []
        self.cut_short = False
        self.lost: list[int] = []  #: before which frame one was altered, and is left out
        if path is not None:
            self._file = os.dup(file) if file >= 0 else _opened(path)
            try:
                self._scan()
            except BaseException:
                self.close()
                raise
        for frame in pending:
            self._frames.append(frame[_FRAME.size :])
            self.size += len(frame)
        self._budget = Budget(self.size)

    def __len__(self) -> int:
        return len(self._frames)

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _scan(self) -> None:
        size = os.fstat(self._file).st_size
        head = os.pread(self._file, len(HEAD), 0)
        if len(head) < len(HEAD) or not head.startswith(_MAGIC):
            raise Damage("it is no journal of a recording, or was cut short")
        (version,) = struct.unpack_from("<I", head, len(_MAGIC))
        if version != VERSION:
            raise Damage(
                f"it is a journal of format {version}, and this sightline reads {VERSION}: update it"
            )
        at = len(HEAD)
        while at < size:
            mark, length, checksum, _ = _FRAME.unpack(_padded(os.pread(self._file, _FRAME.size, at)))
            start, end = at + _FRAME.size, at + _FRAME.size + length
            whole = mark == _MARK and end <= size
            if whole and zlib.crc32(os.pread(self._file, length, start)) == checksum:
                self._frames.append((start, length))
                at = end
                continue
            following = self._next_frame(at + 1, size)
            if following is None:  # it was being written, or is the last one
                self.cut_short = True
                break
            self.lost.append(len(self._frames))
            at = following
        self.size = size

    def _next_frame(self, begin: int, size: int) -> int | None:
        """Where a whole frame begins after one that was altered."""
        tries = 0
        for at in range(begin, size, _WINDOW):
            window = os.pread(self._file, _WINDOW + len(_MARK) - 1, at)
            found = window.find(_MARK)
            while found >= 0 and tries < _TRIES:
                tries += 1
                mark = _padded(os.pread(self._file, _FRAME.size, at + found))
                _, length, checksum, _ = _FRAME.unpack(mark)
                start = at + found + _FRAME.size
                if start + length <= size and zlib.crc32(os.pread(self._file, length, start)) == checksum:
                    return at + found
                found = window.find(_MARK, found + 1)
        return None

    def leave_out(self, begin: int) -> None:
        """Forget the frames from one on: what they add to cannot be known without one that was lost."""
        del self._frames[begin:]

    def _data(self, number: int) -> bytes:
        held = self._frames[number]
        return held if isinstance(held, bytes) else os.pread(self._file, held[1], held[0])

    def _head(self, number: int, data: bytes) -> tuple[dict[str, Any], int]:
        (length,) = struct.unpack_from("<I", data)
        reader = zlib.decompressobj()
        try:
            text = reader.decompress(data[4 : 4 + length], Budget(self.size).left)
        except zlib.error:
            raise Damage("a frame cannot be decompressed") from None
        if not reader.eof:
            raise Damage("a frame claims more than a file of its size can hold")
        self._budget.take(f"the head of frame {number}", json_cost(text))
        head = json_codec.parsed(text.decode())
        if not isinstance(head, dict):
            raise Damage("a frame has no head")
        return head, 4 + length

    def heads(self) -> list[dict[str, Any]]:
        """What is in the heads of all frames."""
        return [self._head(number, self._data(number))[0] for number in range(len(self))]

    def batch(self, number: int, only_late: bool = False) -> Batch:
        """A batch; with ``only_late`` nothing but what belongs to earlier ones."""
        data = self._data(number)
        head, at = self._head(number, data)
        found: dict[str, Any] = {}
        for name, count, length in head["streams"]:
            if type(count) is not int or type(length) is not int or count < 0 or length < 0:
                raise Damage(f"a frame claims a stream of {shown(count)} numbers")
            self._budget.take(f"{shown(name)} of frame {number}", count * _STREAM_COST)
            if not only_late or name in _LATE:
                found[name] = _unpacked(data[at : at + length], count, str(name).endswith("floats"))
            at += length
        batch = Batch(
            rows=_streams(found, ""), late=_streams(found, "late."),
            **{name: found.get(name, EMPTY) for name in _NUMBERS if name != "alive"},
        )  # fmt: skip
        batch.alive, batch.end = found.get("alive"), int(head["end"])
        if not only_late:
            batch.updates = [
                ValueUpdate(int(value), int(kind), str(name)) for value, kind, name in head["learned"]
            ]
            batch.steps = [StepMark(str(n), int(op), int(at), bool(b)) for n, op, at, b in head["steps"]]
            batch.captures = [json_codec.load(CaptureInfo, text) for text in head["captures"]]
        return batch

    def late(self) -> LateRows:
        """What later frames add to earlier ones."""
        return LateRows.of([self.batch(number, only_late=True) for number in range(len(self))])

    def tables(self) -> Tables:
        """The small tables, as they were when the last frame was written."""
        operators: dict[tuple[int, int], str] = {}
        flops: dict[tuple[Any, ...], int] = {}
        tables = Tables(
            flops=lambda info, form, _result, given, made: flops.get((info, form, given, made), -1),
            operator=lambda stack, info: operators.get((stack, info)),
        )
        for number, head in enumerate(self.heads()):
            if number in self.lost:
                self._fill(tables, head)
            _add(tables, head.get("news", {}), operators, flops)
            for name, value in (head.get("first") or {}).items():
                if name not in _FIRST or type(value) not in (int, bool):
                    raise Damage(f"a frame says {shown(value)} of {shown(name)}")
                setattr(tables, name, value)
            tables.info = json_codec.loads(head["info"])
        return tables

    def _fill(self, tables: Tables, head: dict[str, Any]) -> None:
        """Rows for what a lost frame added to the tables: later frames count on from there."""
        since = head.get("since")
        if not isinstance(since, dict):
            raise Damage("a frame before the last was altered")
        for name, unknown in _UNKNOWN.items():
            rows = getattr(tables, name)
            missing = since.get(name, 0) - len(rows)
            self._budget.take(f"{name} of lost frames", max(len(rows) + missing, 0) * 200)
            rows += [unknown] * missing


UNKNOWN_TENSOR: Final = TensorMeta((), None, "?", "cpu")
#: What stands for a row of a table that was lost.
_UNKNOWN: Final[dict[str, Any]] = {
    "operations": Operation("?", 0, False, False, False, False),
    "metas": UNKNOWN_TENSOR,
    "forms": Form(),
    "codes": CodeInfo("?", "?", 0),
    "places": SourcePosition(-1, 0, 0, 0, -1, -1),
    "modules": ModuleInfo("?", ("?",), "?", "?", -1, "", False, 0),
}

_FIRST: Final = (
    "one_tensor",
    "begin",
    "first_sequence",
    "aten_passage",
    "api_passage",
    "whole_ops",
    "fingerprint",
)


def first_of(tables: Tables) -> dict[str, Any]:
    """What does not change in a recording."""
    return {name: getattr(tables, name) for name in _FIRST}


def _add(tables: Tables, news: dict[str, list[Any]], operators: dict[tuple[int, int], str],
         flops: dict[tuple[Any, ...], int]) -> None:  # fmt: skip
    for name, flavour, *rest in news.get("operations", ()):
        tables.operations.append(Operation(str(name), int(flavour), *map(bool, rest)))
    tables.metas += (json_codec.load(TensorMeta, text) for text in news.get("metas", ()))
    tables.forms += (json_codec.load_form(text) for text in news.get("forms", ()))
    tables.places += (SourcePosition(*map(int, row)) for row in news.get("places", ()))
    tables.codes += (json_codec.load(CodeInfo, text) for text in news.get("codes", ()))
    tables.modules += (json_codec.load(ModuleInfo, text) for text in news.get("modules", ()))
    for file, mtime, size in news.get("files", ()):
        tables.files[str(file)] = FileInfo(int(mtime), int(size))
    for name, *names in news.get("schemas", ()):
        tables.schemas[str(name)] = tuple(map(str, names))
    tables.kernels += map(str, news.get("kernels", ()))
    for stack, info, symbol in news.get("operators", ()):
        operators[int(stack), int(info)] = str(symbol)
    for info, form, given, made, count in news.get("flops", ()):
        flops[int(info), int(form), tuple(given), tuple(made)] = int(count)


def _opened(path: Path) -> int:
    """A file to read from; a pipe would be waited for, so it is not opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Damage("it is not a regular file")
    return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))


def _padded(head: bytes) -> bytes:
    return head.ljust(_FRAME.size, b"\xff")  # a length that is cut short reads as a huge one


def _unpacked(data: bytes, count: int, floats: bool) -> Any:
    reader = zlib.decompressobj()
    try:
        octets = reader.decompress(data, count * 8 + 1)
    except zlib.error:
        raise Damage("a stream cannot be decompressed") from None
    if len(octets) != count * 8 or not reader.eof:
        raise Damage(f"a stream does not have the {count} numbers it should have")
    return np.frombuffer(octets, dtype=np.float64 if floats else np.int64)


def _streams(found: dict[str, Any], prefix: str) -> Streams:
    made = Streams()
    for name in _STREAMS:
        numbers: IntArray | None = found.get(prefix + name)
        if numbers is None:
            continue
        if name in ("floats", "counts"):
            numbers = numbers.reshape(-1, FLOATS if name == "floats" else COUNTS + LANES)
        setattr(made, name, numbers)
    return made
