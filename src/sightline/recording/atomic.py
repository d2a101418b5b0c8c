"""Several steps as one, between which no interrupt can come.

Python checks for signals and asynchronous exceptions when one of its functions begins, after a call, and
when a loop jumps back. So one call of a function written in C runs as a whole, also if it calls a series of
functions that are written in C: nothing can be raised in between, and no other thread gets the GIL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from operator import call
from typing import Any, Final, TypeVar

Item = TypeVar("Item")

#: Consume an iterator, in C.
exhaust: Final[Callable[[Iterable[Any]], None]] = deque[Any](maxlen=0).extend


def run_atomically(*steps: Callable[[], object]) -> None:
    """Call functions written in C one after the other.

    >>> from functools import partial
    >>> items = [1, 2]
    >>> run_atomically(items.pop, partial(items.append, 3))
    >>> items
    [1, 3]
    """
    exhaust(map(call, steps))


def append_numbered(items: list[Item], item: Item) -> int:
    """Append an item to a list that only grows; its position, whatever other threads append meanwhile.

    >>> names = ["mm", "add"]
    >>> append_numbered(names, "relu")
    2
    """
    first = len(items)
    items.append(item)
    return next(at for at in count(first) if items[at] is item)


def store_atomically(store: Callable[[Any], object], make: Callable[[], object]) -> None:
    """Pass the result of ``make`` to ``store``, both written in C: no interrupt can lose it in between.

    >>> from functools import partial
    >>> files: list[str] = []
    >>> store_atomically(files.append, partial("{}.txt".format, "a"))
    >>> files
    ['a.txt']
    """
    exhaust(map(store, map(call, (make,))))
