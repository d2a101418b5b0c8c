"""Chunks of numbers come back bit for bit, and give nothing but what was expected of them."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from sightline.store.column_codec import BITS, DELTA, PLAIN, ROW, decode, encode
from sightline.store.damage import Damage

ARRAYS = st.sampled_from(["<i1", "<i4", "<i8", "<u8", "<f8"]).flatmap(
    lambda dtype: hn.arrays(dtype, st.integers(1, 200))
)


@given(ARRAYS, st.integers(0, 1 << 30))
def test_any_numbers(values: Any, first_row: int) -> None:
    found = decode(
        encode(values, first_row, "k"), len(values), values.dtype.str.replace("|", "<"), first_row, "k"
    )
    assert found.astype(values.dtype, copy=False).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "values",
    [
        np.full(100_000, -1, dtype=np.int32),
        np.arange(100_000, dtype=np.int32) - 1,
        np.where(np.arange(100_000) % 3, np.arange(100_000), -1).astype(np.int32),
        np.tile(np.random.default_rng(0).integers(0, 500, 1000), 100).astype(np.int32),
    ],
)
def test_what_repeats_or_counts_takes_no_room(values: Any) -> None:
    chunk = encode(values, 0, "k")
    assert len(chunk) < len(values) / 10
    np.testing.assert_array_equal(decode(chunk, len(values), "<i4", 0, "k"), values)


@pytest.mark.parametrize("extreme", [np.iinfo(np.int64).min, np.iinfo(np.int64).max])
def test_extremes_do_not_overflow(extreme: int) -> None:
    values = np.array([0, extreme, -1, 1, extreme, -extreme - 1], dtype=np.int64)
    np.testing.assert_array_equal(decode(encode(values, 7, "k"), 6, "<i8", 7, "k"), values)


def forged(way: int, width: int, payload: bytes, rows: int, *, deflate: bool = True) -> bytes:
    """A chunk with a true checksum, whatever is in it."""
    if deflate:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        payload = packer.compress(payload) + packer.flush()
    body = bytes((way, width)) + payload
    return struct.pack("<I", zlib.crc32(body, zlib.crc32(f"k/{rows}".encode()))) + body


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        (b"", "cut short"),
        (b"12345", "cut short"),
        (forged(PLAIN, 1, bytes(4), 5), "altered"),
        (forged(9, 1, bytes(4), 4), "unknown encoding"),
        (forged(PLAIN, 3, bytes(12), 4), "unknown encoding"),
        (forged(PLAIN, 0, b"", 4), "unknown encoding"),
        (forged(PLAIN, 1, bytes(3), 4), "4 rows"),
        (forged(PLAIN, 1, bytes(5), 4), "4 rows"),
        (forged(PLAIN, 1, bytes(100 << 20), 4), "4 rows"),  # a bomb: no more than five bytes are unpacked
        (forged(PLAIN, 1, b"\xff" * 9, 4, deflate=False), "decompress|4 rows"),
        (forged(PLAIN, 8, b"\xff" * 32, 4), "too large"),
        (forged(DELTA, 8, b"\xff" * 32, 4), "too large"),
        (forged(ROW, 8, b"\xf0" * 32, 4), "too large"),
        (forged(BITS, 1, bytes(4), 4), "encoding for other numbers"),
    ],
)
def test_chunks_that_lie_are_refused(chunk: bytes, why: str) -> None:
    with pytest.raises(Damage, match=why):
        decode(chunk, 4, "<i4", 0, "k")
