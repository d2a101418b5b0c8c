"""The checksum that C++ takes of captured tensors is zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.recording.native.engine import load
from tests.recording.engines import needs_native

pytestmark = needs_native

NOISE = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8).tobytes()


@given(st.integers(0, 300), st.integers(0, 1000))
def test_it_is_that_of_zlib(start: int, count: int) -> None:
    part = memoryview(NOISE)[start : start + count]
    assert load().crc32(part) == zlib.crc32(part)


@pytest.mark.parametrize("part", [NOISE, bytes(1 << 16), b"\xff" * 70_001, b""])
def test_long_ones(part: bytes) -> None:
    assert load().crc32(part) == zlib.crc32(part)


def test_what_has_no_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="a bytes-like object is required"):
        load().crc32(3)
