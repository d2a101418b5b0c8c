"""`Strings`: texts by number, each kept once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sightline.trace.data import I32


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
