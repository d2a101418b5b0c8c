"""Columns of numbers as compressed chunks.

A chunk is four bytes of checksum, a byte that says how the numbers were prepared, a byte for their width, and
the numbers, byte planes apart, as a raw deflate stream. Preparing means: what is written is small or repeats.
Ids mostly differ little from the id before or from their own row, so of several ways the one is taken that
makes a sample smallest. What is read is bounded by what is expected, never by what the chunk claims.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.trace.bundle.schema import Damage

Array = NDArray[Any]
Unsigned = NDArray[np.uint64]

#: How numbers are prepared.
BITS: Final = 0  #: as they are, as bits
PLAIN: Final = 1  #: signed numbers, small ones first: 0, -1, 1, -2 … as 0, 1, 2, 3 …
DELTA: Final = 2  #: less the one before; -1 (nothing) is 0 and skipped
ROW: Final = 3  #: less the number of their row; -1 (nothing) is 0

_HEAD: Final = struct.Struct("<IBB")
_SAMPLE: Final = 8192
_LEVEL: Final = 4
_ONE: Final = np.uint64(1)


def encode(values: Array, first_row: int, label: str) -> bytes:
    """A chunk of a column; ``first_row`` is the row it begins at, ``label`` goes into the checksum.

    >>> chunk = encode(np.arange(1000, dtype=np.int32), 0, "ops/frame/0")
    >>> len(chunk) < 30, int(decode(chunk, 1000, "<i4", 0, "ops/frame/0")[-1])
    (True, 999)
    """
    ways = (BITS,) if values.dtype.kind in "uf" else (PLAIN, DELTA, ROW)
    if values.dtype.itemsize == 1:
        ways = (PLAIN,)
    if len(ways) > 1:
        sample = values[:_SAMPLE]
        sizes = {way: len(_packed(_prepared(sample, way, first_row))[1]) for way in ways}
        ways = (min(ways, key=sizes.__getitem__),)
        if ways[0] != PLAIN and not _is_small(values):
            ways = (PLAIN,)
    width, packed = _packed(_prepared(values, ways[0], first_row))
    body = bytes((ways[0], width)) + packed
    return struct.pack("<I", _checksum(body, len(values), label)) + body


def decode(chunk: bytes, rows: int, dtype: str, first_row: int, label: str) -> Array:
    """The numbers of a chunk; there must be exactly ``rows`` of them, and all must fit the dtype."""
    if len(chunk) < _HEAD.size:
        raise Damage(f"{label} is cut short")
    checksum, way, width = _HEAD.unpack_from(chunk)
    if checksum != _checksum(memoryview(chunk)[4:], rows, label):
        raise Damage(f"{label} was altered")
    if way > ROW or width not in (1, 2, 4, 8):
        raise Damage(f"{label} is written in an unknown way")
    reader = zlib.decompressobj(-15)
    try:
        planes = reader.decompress(memoryview(chunk)[_HEAD.size :], rows * width + 1)
    except zlib.error:
        raise Damage(f"{label} cannot be decompressed") from None
    if len(planes) != rows * width or not reader.eof or reader.unused_data:
        raise Damage(f"{label} does not have the {rows} rows it should have")
    planar = np.frombuffer(planes, dtype=np.uint8)
    if width > 1:
        planar = np.ascontiguousarray(planar.reshape(width, rows).T)
    prepared = planar.view(f"<u{width}").reshape(rows)
    if way == BITS:
        if dtype[1] not in "uf":
            raise Damage(f"{label} is written in a way that is not that of its numbers")
        return prepared.astype(np.uint64).view(dtype)
    return _fitting(_restored(prepared, way, first_row), dtype, label)


def _checksum(body: bytes | memoryview, rows: int, label: str) -> int:
    return zlib.crc32(body, zlib.crc32(f"{label}/{rows}".encode()))


def _prepared(values: Array, way: int, first_row: int) -> Unsigned:
    if way == BITS:
        return values.view(np.uint64)
    wide = values.astype(np.int64)
    if way == PLAIN:
        return _zigzag(wide)
    there = wide != -1
    held = wide[there]
    if way == DELTA:
        held = np.diff(held, prepend=np.int64(0))
    else:
        held = held - (first_row + np.flatnonzero(there))
    found = np.zeros(len(wide), dtype=np.uint64)
    found[there] = _zigzag(held) + _ONE
    return found


def _restored(prepared: Array, way: int, first_row: int) -> Array:
    """The numbers again; as narrow as they were written as long as that is enough."""
    if way == PLAIN:
        return _unzigzag(prepared)
    missing = prepared == 0
    held = _unzigzag(prepared - prepared.dtype.type(1))
    held[missing] = 0
    # Altered numbers may overflow: they wrap, and are then found to point nowhere.
    if way == DELTA:
        found = np.cumsum(held, dtype=np.int64)
    else:
        found = held + np.arange(first_row, first_row + len(held))
    found[missing] = -1
    return found


def _zigzag(values: NDArray[np.int64]) -> Unsigned:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def _unzigzag(values: Array) -> Array:
    one = values.dtype.type(1)
    signed = values.dtype.str.replace("u", "i")
    found: Array = (values >> one).view(signed) ^ -(values & one).view(signed)
    return found


def _is_small(values: Array) -> bool:
    """Whether differences cannot overflow."""
    return bool(values.min() > -(1 << 61) and values.max() < 1 << 61)


def _packed(prepared: Unsigned) -> tuple[int, bytes]:
    """The width that holds every number, and their byte planes, deflated."""
    most = int(prepared.max()) if len(prepared) else 0
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
    planes = prepared.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15, 9)
    return width, deflate.compress(np.ascontiguousarray(planes).data) + deflate.flush()


def _fitting(values: Array, dtype: str, label: str) -> Array:
    if dtype[1] != "i":
        raise Damage(f"{label} is written in a way that is not that of its numbers")
    limits = np.iinfo(dtype)
    wider = values.dtype.itemsize > limits.dtype.itemsize
    if wider and len(values) and (values.min() < limits.min or values.max() > limits.max):
        raise Damage(f"{label} has numbers that are too large")
    return values  # as wide as they are: the column they go into makes them its own
