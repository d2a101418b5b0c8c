"""The journal of a recording that is being written: one file, to which a frame is appended per batch.

``rank0.journal`` exists only while a recording runs, or after its process was killed. A frame is

    4 bytes "SGJB" · length of the rest · CRC-32 of the rest · length of its head · head · streams

The head is deflated JSON: the new rows of the small tables and the length of each stream; the streams are
deflated 64-bit numbers. A frame that is cut short at the end of the file was being written when its process
was killed; everything before it is valid. Reading needs no lock, no second file and no write access.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from sightline.assemble.batch import (
    Batch,
    LateRows,
    Operation,
    SourcePosition,
    StepMark,
    Streams,
    Tables,
    ValueUpdate,
)
from sightline.data.arrays import EMPTY, IntArray
from sightline.data.forms import Form
from sightline.data.trace_data import CaptureInfo, CodeInfo, FileInfo, ModuleInfo, TensorMeta
from sightline.schema.streams import COUNTS, FLOATS, LANES
from sightline.store import json_codec
from sightline.store.bundle_schema import REVISION
from sightline.store.damage import Damage, quoted, require_regular_file
from sightline.store.limits import Budget, inflate, json_cost

JOURNAL: Final = "rank0.journal"
#: Rows are read by position: each added field makes another format.
VERSION: Final = REVISION
_MAGIC: Final = b"SIGHTJNL"
HEAD: Final = _MAGIC + struct.pack("<I", VERSION)
_FRAME: Final = struct.Struct("<4sIII")
_MARK: Final = b"SGJB"
_WINDOW: Final = 1 << 20  #: bytes that are searched for the next frame at a time
_TRIES: Final = 1000  #: false marks before the search gives up
_STREAM_COST: Final = 32  #: bytes of memory per number of a stream, assembly included
_STREAMS: Final = ("ops", "calls", "values", "fresh", "floats", "counts")
_NUMBERS: Final = (
    "outputs", "absent", "nbytes", "late_nbytes", "memory", "device", "alive", "open_ops", "open_calls",
)  # fmt: skip
_LATE: Final = frozenset({*(f"late.{name}" for name in _STREAMS), "outputs", "absent", "late_nbytes"})
#: The new rows of each small table in one frame.
TableRows = dict[str, list[Any]]


def encode(batch: Batch, rows: TableRows, info: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
    """A frame; ``more`` has the parts that only some frames have: constant fields in the first, sources."""
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
    content = {
        "streams": lengths, "end": batch.end, "news": rows, "info": json_codec.dumps(info),
        "learned": batch.updates, "steps": batch.steps,
        "captures": [json_codec.dump(capture) for capture in batch.captures],
        **(more or {}),
    }  # fmt: skip
    head = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 1)
    rest = struct.pack("<I", len(head)) + head + b"".join(packed)
    return _FRAME.pack(_MARK, len(rest), zlib.crc32(rest), 0) + rest


def new_table_rows(tables: Tables, since: dict[str, int], operators: Iterable[tuple[int, int, str]],
            flops: Iterable[tuple[Any, ...]]) -> TableRows:  # fmt: skip
    """The rows after the first ``since`` of each table; ``since`` is brought up to date."""
    new: TableRows = {
        "operations": [list(one) for one in tables.operations[since.get("operations", 0) :]],
        "metas": [json_codec.dump(one) for one in tables.metas[since.get("metas", 0) :]],
        "forms": [json_codec.dump_form(one) for one in tables.forms[since.get("forms", 0) :]],
        "places": [list(one) for one in tables.places[since.get("places", 0) :]],
        "codes": [json_codec.dump(one) for one in tables.codes[since.get("codes", 0) :]],
        "modules": [json_codec.dump(one) for one in tables.modules[since.get("modules", 0) :]],
        "files": [
            [file, info.mtime_ns, info.size]
            for file, info in list(tables.files.items())[since.get("files", 0) :]
        ],
        "schemas": [
            [name, *names] for name, names in list(tables.schemas.items())[since.get("schemas", 0) :]
        ],
        "kernels": tables.kernels[since.get("kernels", 0) :],
        "operators": [list(one) for one in operators],
        "flops": [list(one) for one in flops],
    }
    for name in ("operations", "metas", "forms", "places", "codes", "modules", "files", "schemas", "kernels"):
        since[name] = since.get(name, 0) + len(new[name])
    return {name: rows for name, rows in new.items() if rows}


class Journal:
    """The frames of a journal, each read on use; nothing in them is trusted.

    ``file`` is the number of an open file, which can be read even after its name was removed.
    """

    def __init__(self, path: Path | None, pending: Iterable[bytes] = (), file: int = -1) -> None:
        self.path = path
        self.size = 0
        self._file = -1
        self._frames: list[tuple[int, int] | bytes] = []  # offset and length of each, or its bytes
        self.left_out = 0  #: how many of the last frames are not used
        self._heads: list[dict[str, Any]] = []
        self.lost: list[int] = []  #: frames before which a damaged one was left out
        if path is not None:
            if file >= 0:
                self._file = os.dup(file)
            else:
                require_regular_file(path)
                self._file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
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
        return len(self._frames) - self.left_out

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _scan(self) -> None:
        size = os.fstat(self._file).st_size
        head = os.pread(self._file, len(HEAD), 0)
        if len(head) < len(HEAD) or not head.startswith(_MAGIC):
            raise Damage("it is no journal of a recording, or was cut short")
        (version,) = struct.unpack_from("<I", head, len(_MAGIC))
        if version > VERSION:
            raise Damage(
                f"it is a journal of format {version}, and this sightline reads up to {VERSION}: "
                f"update sightline to open it"
            )
        if not version:
            raise Damage("its header was altered")
        if version < VERSION:
            raise Damage(
                f"it is a journal of format {version}, and this sightline reads {VERSION}: open it once with "
                f"the sightline that recorded it, which makes a bundle of it"
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
            if following is None:  # the last frame, or one that was being written
                break
            self.lost.append(len(self._frames))
            at = following
        self.size = size

    def _next_frame(self, begin: int, size: int) -> int | None:
        """The offset of the next valid frame after a damaged one."""
        tries = 0
        for at in range(begin, size, _WINDOW):
            window = os.pread(self._file, _WINDOW + len(_MARK) - 1, at)
            mark = window.find(_MARK)
            while mark >= 0 and tries < _TRIES:
                tries += 1
                header = _padded(os.pread(self._file, _FRAME.size, at + mark))
                _, length, checksum, _ = _FRAME.unpack(header)
                start = at + mark + _FRAME.size
                if start + length <= size and zlib.crc32(os.pread(self._file, length, start)) == checksum:
                    return at + mark
                mark = window.find(_MARK, mark + 1)
        return None

    def leave_out(self, begin: int) -> None:
        """Do not use the frames from ``begin`` on, which contradict those before."""
        self.left_out = len(self._frames) - begin

    def _data(self, number: int) -> bytes:
        frame = self._frames[number]
        return frame if isinstance(frame, bytes) else os.pread(self._file, frame[1], frame[0])

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
        head = json_codec.parse_json(text.decode())
        if not isinstance(head, dict):
            raise Damage("a frame has no head")
        return head, 4 + length

    def heads(self) -> list[dict[str, Any]]:
        """The heads of all frames."""
        return [self._head(number, self._data(number))[0] for number in range(len(self))]

    def batch(self, number: int, only_late: bool = False) -> Batch:
        """A batch; with ``only_late`` only the parts that belong to earlier batches."""
        data = self._data(number)
        head, at = self._head(number, data)
        streams: dict[str, Any] = {}
        for name, count, length in head["streams"]:
            if type(count) is not int or type(length) is not int or count < 0 or length < 0:
                raise Damage(f"a frame claims a stream of {quoted(count)} numbers")
            self._budget.take(f"{quoted(name)} of frame {number}", count * _STREAM_COST)
            if not only_late or name in _LATE:
                octets = inflate(data[at : at + length], count * 8)
                if octets is None:
                    raise Damage(f"a stream does not have the {count} numbers it should have")
                dtype: Any = np.float64 if str(name).endswith("floats") else np.int64
                streams[name] = np.frombuffer(octets, dtype=dtype)
            at += length
        batch = Batch(
            rows=_streams(streams, ""), late=_streams(streams, "late."),
            **{name: streams.get(name, EMPTY) for name in _NUMBERS if name != "alive"},
        )  # fmt: skip
        batch.alive, batch.end = streams.get("alive"), int(head["end"])
        if not only_late:
            batch.updates = [
                ValueUpdate(int(value), int(kind), str(name)) for value, kind, name in head["learned"]
            ]
            batch.steps = [StepMark(str(n), int(op), int(at), bool(b)) for n, op, at, b in head["steps"]]
            batch.captures = [json_codec.load(CaptureInfo, text) for text in head["captures"]]
        return batch

    def late(self) -> LateRows:
        """The rows of all frames that belong to earlier ones."""
        return LateRows.of([self.batch(number, only_late=True) for number in range(len(self))])

    def tables(self) -> Tables:
        """The small tables as of the last frame."""
        operators: dict[tuple[int, int], str] = {}
        flops: dict[tuple[Any, ...], int] = {}
        tables = Tables(
            flops=lambda info, form, _result, inputs, outputs: flops.get((info, form, inputs, outputs), -1),
            operator=lambda stack, info: operators.get((stack, info)),
        )
        for number, head in enumerate(self.heads()):
            if number in self.lost:  # stand-ins for the lost rows, so that the ids of later rows stay right
                since = head.get("since")
                if not isinstance(since, dict):
                    raise Damage("a frame before the last was altered")
                for name, unknown in UNKNOWN_ROWS.items():
                    rows = getattr(tables, name)
                    missing = since.get(name, 0) - len(rows)
                    self._budget.take(f"{name} of lost frames", max(len(rows) + missing, 0) * 200)
                    rows += [unknown] * missing
            _add_rows(tables, head.get("news", {}), operators, flops)
            for name, value in (head.get("first") or {}).items():
                if name not in _CONSTANT or type(value) not in (int, bool):
                    raise Damage(f"a frame has an invalid {quoted(name)}: {quoted(value)}")
                setattr(tables, name, value)
            tables.info = json_codec.loads(head["info"])
        return tables


UNKNOWN_TENSOR: Final = TensorMeta((), None, "?", "cpu")
#: The stand-in for a lost row of each table.
UNKNOWN_ROWS: Final[dict[str, Any]] = {
    "operations": Operation("?", 0, False, False, False, False),
    "metas": UNKNOWN_TENSOR,
    "forms": Form(),
    "codes": CodeInfo("?", "?", 0),
    "places": SourcePosition(-1, 0, 0, 0, -1, -1),
    "modules": ModuleInfo("?", ("?",), "?", "?", -1, "", False, 0),
}

_CONSTANT: Final = (
    "one_tensor", "begin", "first_sequence", "aten_passage", "api_passage", "whole_ops", "fingerprint",
)  # fmt: skip


def constant_fields(tables: Tables) -> dict[str, Any]:
    """The fields of the tables that do not change during a recording."""
    return {name: getattr(tables, name) for name in _CONSTANT}


def _add_rows(tables: Tables, new: TableRows, operators: dict[tuple[int, int], str],
         flops: dict[tuple[Any, ...], int]) -> None:  # fmt: skip
    for name, flavour, *rest in new.get("operations", ()):
        tables.operations.append(Operation(str(name), int(flavour), *map(bool, rest)))
    tables.metas += (json_codec.load(TensorMeta, text) for text in new.get("metas", ()))
    tables.forms += (json_codec.load_form(text) for text in new.get("forms", ()))
    tables.places += (SourcePosition(*map(int, row)) for row in new.get("places", ()))
    tables.codes += (json_codec.load(CodeInfo, text) for text in new.get("codes", ()))
    tables.modules += (json_codec.load(ModuleInfo, text) for text in new.get("modules", ()))
    for file, mtime, size in new.get("files", ()):
        tables.files[str(file)] = FileInfo(int(mtime), int(size))
    for name, *names in new.get("schemas", ()):
        tables.schemas[str(name)] = tuple(map(str, names))
    tables.kernels += map(str, new.get("kernels", ()))
    for stack, info, symbol in new.get("operators", ()):
        operators[int(stack), int(info)] = str(symbol)
    for info, form, inputs, outputs, count in new.get("flops", ()):
        flops[int(info), int(form), tuple(inputs), tuple(outputs)] = int(count)


def _padded(head: bytes) -> bytes:
    return head.ljust(_FRAME.size, b"\xff")  # a length that is cut short becomes a huge one


def _streams(arrays: dict[str, Any], prefix: str) -> Streams:
    streams = Streams()
    for name in _STREAMS:
        numbers: IntArray | None = arrays.get(prefix + name)
        if numbers is None:
            continue
        if name in ("floats", "counts"):
            numbers = numbers.reshape(-1, FLOATS if name == "floats" else COUNTS + LANES)
        setattr(streams, name, numbers)
    return streams
