"""Columns of numbers as compressed chunks.

A chunk is four bytes of checksum, a byte for the encoding, a byte for the width of the numbers, and the
numbers, split into byte planes, as a raw deflate stream. The encoding makes numbers small or repetitive: ids
mostly differ little from the id before or from their own row, so the encoding that makes a sample smallest is
taken. Decoding is bounded by the expected number of rows, never by a claim of the chunk.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.store.damage import Damage

Array = NDArray[Any]
Unsigned = NDArray[np.uint64]

#: The encodings.
BITS: Final = 0  #: the bits, unchanged
PLAIN: Final = 1  #: zigzag: 0, -1, 1, -2 … as 0, 1, 2, 3 …
DELTA: Final = 2  #: the difference to the number before; -1 (nothing) is 0 and skipped
ROW: Final = 3  #: the difference to the row; -1 (nothing) is 0

_HEAD: Final = struct.Struct("<IBB")
_SAMPLE: Final = 8192
_LEVEL: Final = 4
_ONE: Final = np.uint64(1)


def encode(values: Array, first_row: int, label: str) -> bytes:
    """A chunk of a column; ``first_row`` is its first row, ``label`` is part of the checksum.

    >>> chunk = encode(np.arange(1000, dtype=np.int32), 0, "ops/frame/0")
    >>> len(chunk) < 30, int(decode(chunk, 1000, "<i4", 0, "ops/frame/0")[-1])
    (True, 999)
    """
    if values.dtype.kind in "uf":
        encoding = BITS
    elif values.dtype.itemsize == 1:
        encoding = PLAIN
    else:
        sample = values[:_SAMPLE]
        sizes = {way: len(_compress(_transform(sample, way, first_row))[1]) for way in (PLAIN, DELTA, ROW)}
        encoding = min(sizes, key=sizes.__getitem__)
        if encoding != PLAIN and (values.min() <= -(1 << 61) or values.max() >= 1 << 61):
            encoding = PLAIN  # the difference of two such numbers may overflow
    width, packed = _compress(_transform(values, encoding, first_row))
    body = bytes((encoding, width)) + packed
    return struct.pack("<I", _checksum(body, len(values), label)) + body


def decode(chunk: bytes, rows: int, dtype: str, first_row: int, label: str) -> Array:
    """The numbers of a chunk; there must be exactly ``rows`` of them, and all must fit the dtype."""
    if len(chunk) < _HEAD.size:
        raise Damage(f"{label} is cut short")
    checksum, encoding, width = _HEAD.unpack_from(chunk)
    if checksum != _checksum(memoryview(chunk)[4:], rows, label):
        raise Damage(f"{label} was altered")
    if encoding > ROW or width not in (1, 2, 4, 8):
        raise Damage(f"{label} has an unknown encoding")
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
    encoded = planar.view(f"<u{width}").reshape(rows)
    if (encoding == BITS) != (dtype[1] in "uf"):
        raise Damage(f"{label} has an encoding for other numbers")
    if encoding == BITS:
        return encoded.astype(np.uint64).view(dtype)
    values = _restore(encoded, encoding, first_row)
    limits = np.iinfo(dtype)
    wider = values.dtype.itemsize > limits.dtype.itemsize
    if wider and len(values) and (values.min() < limits.min or values.max() > limits.max):
        raise Damage(f"{label} has numbers that are too large")
    return values  # not cast: assigning them to their column does that


def _checksum(body: bytes | memoryview, rows: int, label: str) -> int:
    return zlib.crc32(body, zlib.crc32(f"{label}/{rows}".encode()))


def _transform(values: Array, encoding: int, first_row: int) -> Unsigned:
    if encoding == BITS:
        return values.view(np.uint64)
    wide = values.astype(np.int64)
    if encoding == PLAIN:
        return _zigzag(wide)
    present = wide != -1
    ids = wide[present]
    if encoding == DELTA:
        ids = np.diff(ids, prepend=np.int64(0))
    else:
        ids = ids - (first_row + np.flatnonzero(present))
    encoded = np.zeros(len(wide), dtype=np.uint64)
    encoded[present] = _zigzag(ids) + _ONE
    return encoded


def _restore(encoded: Array, encoding: int, first_row: int) -> Array:
    """The numbers again; PLAIN ones as narrow as they were written."""
    if encoding == PLAIN:
        return _unzigzag(encoded)
    missing = encoded == 0
    differences = _unzigzag(encoded - encoded.dtype.type(1))
    differences[missing] = 0
    # Altered numbers may overflow: they wrap, and the checks then find that they point nowhere.
    if encoding == DELTA:
        values = np.cumsum(differences, dtype=np.int64)
    else:
        values = differences + np.arange(first_row, first_row + len(differences))
    values[missing] = -1
    return values


def _zigzag(values: NDArray[np.int64]) -> Unsigned:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def _unzigzag(values: Array) -> Array:
    one = values.dtype.type(1)
    signed = values.dtype.str.replace("u", "i")
    decoded: Array = (values >> one).view(signed) ^ -(values & one).view(signed)
    return decoded


def _compress(encoded: Unsigned) -> tuple[int, bytes]:
    """The width that holds every number, and their byte planes, deflated."""
    most = int(encoded.max()) if len(encoded) else 0
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
    planes = encoded.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15, 9)
    return width, deflate.compress(np.ascontiguousarray(planes).data) + deflate.flush()
