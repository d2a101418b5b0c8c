"""`Budget`: the memory that reading one file may take, for everything in it together.

Each limit by itself says little: a hundred tables that are each just small enough fill a machine. So whatever
is made of a file is taken from one budget first, which grows with the size of the file; what an honest
recording takes is a small part of it. Used by the readers of databases and of journals.
"""

from __future__ import annotations

from typing import Final

from sightline.trace.bundle.schema import FREE_BYTES, GROWTH, Damage

FREE: Final = 4 * FREE_BYTES  #: bytes that the smallest file may take
_NODE: Final = 64  #: bytes of Python objects that a comma or a bracket of JSON stands for


class Budget:
    """Bytes that may still be taken for a file of some size.

    >>> budget = Budget(1000)
    >>> budget.take("its names", 5000)
    >>> budget.take("its ops", 1 << 40)
    Traceback (most recent call last):
    sightline.trace.bundle.schema.Damage: its ops would take more memory than a file of 1000 bytes may
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: dict[str, int] = {}
        self.left = FREE + GROWTH * size

    def take(self, what: str, count: int) -> None:
        """Take bytes for something; what is read again costs nothing more."""
        more = count - self._taken.get(what, 0)
        if more > self.left:
            raise Damage(f"{what} would take more memory than a file of {self._size} bytes may")
        if more > 0:
            self._taken[what] = count
            self.left -= more


def json_cost(text: str | bytes) -> int:
    """About how many bytes a JSON text takes once it is parsed.

    >>> json_cost('[[], [1, 2]]') > 12
    True
    """
    if isinstance(text, str):
        nodes = text.count(",") + text.count("[") + text.count("{")
    else:
        nodes = text.count(b",") + text.count(b"[") + text.count(b"{")
    return 2 * len(text) + _NODE * nodes
