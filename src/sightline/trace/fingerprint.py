"""The last step of a tensor's fingerprint, which needs no torch: mixing in its dtype and shape."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]


def fingerprints_of(lanes: NDArray[np.int64], dtypes: Iterable[tuple[str, tuple[int, ...]]]) -> U64:
    """Fingerprints from the lanes of tensors, a row each, and their dtypes and shapes; never zero.

    >>> a, b = fingerprints_of(np.zeros((2, 4), dtype=np.int64), [("float32", (2,)), ("float32", (1, 2))])
    >>> bool(a != b)
    True
    """
    mixed = np.array([_meta_bits(dtype, shape) for dtype, shape in dtypes], dtype=np.uint64)
    for lane in lanes.view(np.uint64).T:
        mixed = scramble(mixed ^ lane)
    mixed[mixed == 0] = 1
    return mixed


@lru_cache(maxsize=65536)
def _meta_bits(dtype: str, shape: tuple[int, ...]) -> int:
    text = f"{dtype}{list(shape)}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def scramble(numbers: U64) -> U64:
    """splitmix64, which turns consecutive numbers into random-looking ones."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
