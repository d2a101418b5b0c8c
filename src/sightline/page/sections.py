"""`Sections`: named columns and plain tables, packed into one block of bytes that a browser reads.

    4 bytes      length of the header, little-endian
    header       JSON: the sections in order, each with its name, type, length and packed size
    sections     each compressed by itself (raw deflate, as ``DecompressionStream("deflate-raw")`` reads it)

A column of integers is kept in the narrowest type that holds it. Its bytes stand in planes, all lowest bytes
first, because similar neighbours compress better. A column that only grows is kept as its differences. Texts
are kept once each and referred to by number (`Strings`). ``viewer/src/data/sections.ts`` reads it all.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.trace_data import I32

FORMAT: Final = 1  #: the viewer refuses another one
_INTEGERS: Final = ((np.int8, "i1"), (np.int16, "i2"), (np.int32, "i4"))
_EXACT: Final = 2**53  #: JavaScript has no exact integers beyond it


@dataclass
class Sections:
    """The data of a page, section by section.

    >>> sections = Sections()
    >>> sections.column("start", np.array([5, 7, 1000]), grows=True)
    >>> sections.table("names", ["relu", "mm"])
    >>> [(each["name"], each["type"], each["length"]) for each in sections.header]
    [('start', 'i2', 3), ('names', 'json', 1)]
    """

    header: list[dict[str, Any]] = field(default_factory=list)
    _packed: list[bytes] = field(default_factory=list)

    def column(self, name: str, numbers: NDArray[Any], *, grows: bool = False) -> None:
        """Add a column of integers; ``grows`` keeps differences, for one that is nearly sorted."""
        whole = np.clip(np.asarray(numbers, dtype=np.int64), -_EXACT, _EXACT)
        if grows:
            whole = np.diff(whole, prepend=0)
        low, high = (int(whole.min()), int(whole.max())) if len(whole) else (0, 0)
        for dtype, type in _INTEGERS:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                self._add(name, type, len(whole), _planes(whole.astype(dtype)), grows=grows)
                return
        self._add(name, "f8", len(whole), _planes(whole.astype(np.float64)), grows=grows)

    def floats(self, name: str, numbers: NDArray[Any]) -> None:
        """Add a column of floats with seven digits, which are enough to look at."""
        with np.errstate(over="ignore"):
            single = np.asarray(numbers).astype(np.float32)
        self._add(name, "f4", len(single), _planes(single))

    def table(self, name: str, rows: Any) -> None:
        """Add plain data: strings, small tables, settings."""
        text = json.dumps(rows, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # UTF-8 cannot encode a lone surrogate, which a file name may hold.
        self._add(name, "json", 1, text.encode("utf-8", "replace"))

    def _add(self, name: str, type: str, length: int, data: bytes, *, grows: bool = False) -> None:
        packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = packer.compress(data) + packer.flush()
        entry = {"name": name, "type": type, "length": length, "size": len(packed)}
        self.header.append(entry | {"grows": True} if grows else entry)
        self._packed.append(packed)

    def bytes(self) -> bytes:
        """All of it as one block."""
        header = json.dumps({"format": FORMAT, "sections": self.header}, separators=(",", ":")).encode()
        return b"".join([len(header).to_bytes(4, "little"), header, *self._packed])


def _planes(numbers: NDArray[Any]) -> bytes:
    """The bytes of a column, all first bytes before all second ones."""
    little = np.ascontiguousarray(numbers).astype(numbers.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8).reshape(len(little), little.itemsize).T.tobytes()


class Strings:
    """Texts that columns refer to by number; 0 is the empty text.

    >>> strings = Strings()
    >>> strings.add("relu"), strings.add("mm"), strings.add("relu"), strings.add("")
    (1, 2, 1, 0)
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all_of(self, texts: Iterable[str]) -> I32:
        """The number of each text."""
        return np.array([self.add(text) for text in texts], dtype=np.int32)

    def texts(self) -> list[str]:
        return list(self._numbers)
