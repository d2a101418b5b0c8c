"""One shard of captured tensors on disk: a safetensors file that also says where each tensor belongs.

`ShardFile` writes one, `read_shard` reads and checks the header of one. A shard is written under a temporary
name with space reserved for the header at its start, so that tensors go straight to disk; the header is
written last, and then the file gets its name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from sightline.data.dtypes import STORED_SIZES, nbytes_of, stored_as
from sightline.data.trace_data import ROLES, Bytes, CaptureInfo
from sightline.store.damage import Damage, damage_reported, quoted, require_regular_file
from sightline.store.shards.direct_file import PAGE, DirectFile

VERSION: Final = "1"
SUFFIX: Final = ".safetensors"
UNFINISHED: Final = ".part"  #: the end of every temporary name
MAX_HEADER: Final = 100_000_000  #: the format's own limit

#: A function that returns the CRC-32 of bytes; `zlib.crc32`, or a faster one.
Checksum = Callable[[memoryview], int]

_HEAD: Final = f'{{"__metadata__":{{"sightline":"{VERSION}","captures":"['.encode()
_MIDDLE: Final = b']"}'
_TAIL: Final = b"}"
_HEADER_SIZE: Final = 8 + len(_HEAD) + len(_MIDDLE) + len(_TAIL)  #: of a header without tensors
_SUM: Final = b',\\"crc\\":%d}'  #: the checksum of a tensor, in the JSON inside JSON
_SUM_SIZE: Final = len(_SUM % 0xFFFFFFFF)
_FIELDS: Final = tuple(field.name for field in dataclasses.fields(CaptureInfo))


def shard_name(number: int) -> str:
    """The name of a shard: ``000007.safetensors``."""
    return f"{number:06d}{SUFFIX}"


def is_shard(name: str) -> bool:
    """Whether a file in the folder is a finished shard, by its name."""
    number = name.removesuffix(SUFFIX)
    return number != name and number.isascii() and number.isdecimal()


_quoted: Final = json.encoder.encode_basestring_ascii


@lru_cache(1024, typed=True)  # captures have most fields in common; True is not 1
def _inside_text(value: str | bool | tuple[int, ...]) -> str:
    """A value as JSON inside a JSON text."""
    return _quoted(json.dumps(value, separators=(",", ":")))[1:-1]


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor as the header of a shard will describe it."""

    key: str
    nbytes: int
    alignment: int  #: the offset of its bytes in the file must be a multiple of this
    entry: bytes  #: its entry in the header, up to the offsets
    capture: bytes  #: where it belongs, as JSON inside a JSON text

    @classmethod
    def of(cls, info: CaptureInfo, nbytes: int, order: int) -> TensorDescription:
        """The description of a capture; ``order`` is its number among the captures of all shards."""
        stored, shape = stored_as(info.dtype, info.shape, nbytes)
        entry = f'{_quoted(info.key)}:{{"dtype":"{stored}","shape":{list(shape)},"data_offsets":'
        values = [(name, getattr(info, name)) for name in _FIELDS]
        fields = [
            f'\\"{name}\\":{value if type(value) is int else _inside_text(value)}' for name, value in values
        ]
        capture = f'{{{",".join(fields)},\\"order\\":{order}}}'
        return cls(info.key, nbytes, STORED_SIZES[stored], entry.encode("ascii"), capture.encode("ascii"))

    @property
    def header_size(self) -> int:
        """Bytes it takes in the header at most; the offsets are not known yet."""
        return len(self.entry) + len(self.capture) + 48 + _SUM_SIZE


class ShardFile:
    """A shard being written.

    All its tensors have the same alignment, because the format allows no gaps between them.

    >>> import tempfile
    >>> info = CaptureInfo("", "fc", "output", 0, 0, "output", "", -1, (2,), "float32")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shard = ShardFile(Path(folder) / shard_name(0), room=PAGE)
    ...     shard.add(TensorDescription.of(info, 8, order=0), np.zeros(8, dtype=np.uint8))
    ...     shard.finish()
    ...     [capture.key for capture in read_shard(shard.path).captures]
    ['fc/output/0/0']
    """

    def __init__(
        self, path: Path, room: int, *, direct: bool = False, checksum: Checksum = zlib.crc32
    ) -> None:
        """Open a file with at least ``room`` bytes for the tensors' entries in the header.

        With ``direct``, tensors are written past the page cache where the file system can do it.
        """
        self.path = path
        self.opened = time.monotonic()
        self.size = 0  #: bytes of complete tensors
        self.header_size = 0  #: bytes they take in the header
        # Whole pages, so that the arrays of a mapped file are aligned.
        self._start = -(-(_HEADER_SIZE + room) // PAGE) * PAGE
        self._room = self._start - _HEADER_SIZE
        self.keys: list[str] = []  #: of its tensors
        self._captures: list[bytes] = []
        self._entries: list[bytes] = []
        self._checksum = checksum
        self._direct: DirectFile | None = None
        self._temporary = path.with_name(f".{path.name}{UNFINISHED}")
        # Unbuffered: arrays are written without a copy, and a forked child has nothing to flush.
        self._file = open(  # noqa: SIM115  # closed by finish or discard
            self._temporary, "wb", 0, opener=lambda path, flags: os.open(path, flags, 0o600)
        )
        try:
            # Written, not skipped: a disk that fills up later still has space for the header.
            write_all(self._file, memoryview(bytes(self._start)))
            if direct:
                self._direct = DirectFile.open(self._temporary, self._start)
        except BaseException:
            self.discard()
            raise

    def room_for(self, tensor: TensorDescription) -> bool:
        """Whether the header has room for one more tensor."""
        return self.header_size + tensor.header_size <= self._room

    def add(self, tensor: TensorDescription, data: Bytes) -> None:
        """Write a tensor; on an error its bytes are removed again."""
        data = np.ascontiguousarray(data).reshape(-1)
        try:
            if self._direct is not None:
                try:
                    self._direct.append(data)
                except OSError:  # this shard goes on through the page cache
                    self._close_direct()
                    self._file.seek(self._start + self.size)
            if self._direct is None:
                write_all(self._file, data.data)
        except BaseException:
            self._file.seek(self._start + self.size)
            self._file.truncate()
            raise
        end = self.size + tensor.nbytes
        self._entries.append(tensor.entry + b"[%d,%d]}" % (self.size, end))
        self.keys.append(tensor.key)
        self._captures.append(tensor.capture[:-1] + _SUM % self._checksum(data.data))
        self.header_size += tensor.header_size
        self.size = end

    def _close_direct(self) -> None:
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    def finish(self) -> None:
        """Write the header and give the file its name; an empty shard is discarded."""
        if not self._entries:
            self.discard()
            return
        parts = (_HEAD, b",".join(self._captures), _MIDDLE, *(b"," + entry for entry in self._entries), _TAIL)
        header = b"".join(parts).ljust(self._start - 8)
        try:
            self._close_direct()
            self._file.truncate(self._start + self.size)  # the last page may have been filled up
            self._file.seek(0)
            write_all(self._file, memoryview(struct.pack("<Q", len(header)) + header))
            os.fsync(self._file.fileno())  # a named shard must be complete after a power cut too
            self._file.close()
            os.replace(self._temporary, self.path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close and remove the temporary file."""
        self._close_direct()
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_all(file: Any, view: memoryview) -> None:
    """Write every byte; a raw file may take fewer at a time."""
    while view.nbytes:
        view = view[file.write(view) :]


@dataclass(frozen=True, slots=True)
class Shard:
    """The checked header of a shard."""

    path: Path
    spans: dict[str, tuple[int, int]]  #: by key, where in the file its bytes begin and end
    captures: list[CaptureInfo]
    orders: list[int]  #: the number of each capture among all
    sums: dict[str, int]  #: checksums by key; older shards have none


def read_shard(path: Path) -> Shard:
    """Read and check the header of a shard; a damaged one raises one clear error."""
    with damage_reported(path):
        require_regular_file(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise Damage(f"it has {size} bytes, too few for a header")
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER:
                raise Damage(f"it claims a header of {length} bytes, more than the {MAX_HEADER} allowed")
            if length > size - 8:
                raise Damage(f"it claims a header of {length} bytes, but has only {size - 8}")
            header = _parse(file.read(length), "its header")
        if not isinstance(header, dict):
            raise Damage("its header is not a JSON object")
        spans = _spans(header, size - 8 - length)
        captures, orders, sums = _captures(header, spans)
    start = 8 + length
    absolute = {key: (start + begin, start + end) for key, (_, _, begin, end) in spans.items()}
    return Shard(path, absolute, captures, orders, sums)


Span = tuple[str, tuple[int, ...], int, int]  # dtype, shape, begin, end


def _parse(text: bytes | str, label: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, absurd numbers, absurd nesting
        raise Damage(f"{label} is not valid JSON ({type(error).__name__})") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise Damage(f"{quoted(twice)} appears twice")
    return items


def _spans(header: dict[str, Any], size: int) -> dict[str, Span]:
    """Every tensor of the header; they must fill the file, each with the bytes its shape needs."""
    spans: dict[str, Span] = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = (fields.get(name, "") for name in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets):
            raise Damage(f"{quoted(key)} is not described by a dtype, a shape and offsets")
        if dtype not in STORED_SIZES:
            raise Damage(f"{quoted(key)} has the unknown dtype {quoted(dtype)}")
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            raise Damage(f"{quoted(key)} has invalid offsets")
        spans[key] = (dtype, tuple(shape), offsets[0], offsets[1])
    reached = 0
    for key, (dtype, shape, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if end > size:
            raise Damage(f"{quoted(key)} ends at byte {end} of {size}: the file was cut short or altered")
        if begin != reached:
            fault = "overlaps another tensor" if begin < reached else "leaves a gap before it"
            raise Damage(f"{quoted(key)} {fault}")
        if math.prod(shape) * STORED_SIZES[dtype] != end - begin:
            raise Damage(f"{quoted(key)} has {end - begin} bytes, which do not make {dtype} of its shape")
        reached = end
    if reached != size:
        raise Damage(f"{size - reached} bytes belong to no tensor")
    return spans


def _captures(
    header: dict[str, Any], spans: dict[str, Span]
) -> tuple[list[CaptureInfo], list[int], dict[str, int]]:
    """The captures in the metadata, which must agree with the tensors of the file."""
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or "sightline" not in metadata:
        raise Damage("it was not written by sightline")
    if metadata["sightline"] != VERSION:
        raise Damage(
            f"it has version {quoted(metadata['sightline'])}, and this sightline reads version {VERSION}"
        )
    listed = metadata.get("captures")
    rows = _parse(listed, "its list of captures") if isinstance(listed, str) else None
    if not isinstance(rows, list):
        raise Damage("it has no list of captures")
    numbered = [_capture(row) for row in rows]
    captures = [info for info, _ in numbered]
    if len(captures) != len(spans) or {info.key for info in captures} != spans.keys():
        raise Damage("its tensors are not those of its list of captures")
    for info in captures:
        dtype, shape, begin, end = spans[info.key]
        known = nbytes_of(info.dtype, info.shape)
        if known not in (None, end - begin) or (dtype, shape) != stored_as(
            info.dtype, info.shape, end - begin
        ):
            raise Damage(f"{quoted(info.key)} is not stored as {quoted(info.dtype)} of its shape would be")
    sums = {
        info.key: row["crc"] for info, row in zip(captures, rows, strict=True) if type(row.get("crc")) is int
    }
    return captures, [order for _, order in numbered], sums


def _capture(row: Any) -> tuple[CaptureInfo, int]:
    """A capture and its number from JSON; fields that a later version added are ignored."""
    if not isinstance(row, dict) or not _is_size(row.get("order")):
        raise Damage("its list of captures has an invalid entry")
    values = {}
    for field in dataclasses.fields(CaptureInfo):
        if field.name not in row:
            if field.default is dataclasses.MISSING:
                raise Damage(f"a capture has no {field.name}")
            continue
        value = row[field.name]
        if field.name == "shape":
            fits, value = _is_sizes(value), tuple(value) if isinstance(value, list) else ()
        else:
            fits = type(value).__name__ == field.type
        if not fits:
            raise Damage(f"a capture has the {field.name} {quoted(value)}")
        values[field.name] = value
    info = CaptureInfo(**values)
    if info.role not in ROLES:
        raise Damage(f"a capture has the role {quoted(info.role)}")
    return info, row["order"]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # True is an int, but not a size


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and len(values) <= 64 and all(map(_is_size, values))
