"""Where the bytes of captured tensors are: in memory, or in files that are read when asked for."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Store(Protocol):
    """The bytes of captured tensors by key."""

    def read(self, key: str) -> Bytes:
        """The elements of a tensor in row-major order, as one flat run of bytes; not to be written to."""
        ...


class MemoryStore:
    """Tensors kept in memory.

    >>> store = MemoryStore({"fc/output/0/0": np.zeros(8, dtype=np.uint8)})
    >>> store.read("fc/output/0/0").nbytes
    8
    """

    def __init__(self, held: dict[str, Bytes]) -> None:
        self._held = held

    def read(self, key: str) -> Bytes:
        """The bytes of a tensor."""
        return self._held[key]
