"""Several steps as one, between which no interrupt can come.

Python looks for signals and asynchronous exceptions when one of its functions begins, after a call, and when
a loop jumps back. So what one call of a function written in C does is done as a whole, and that may be a row
of calls, as long as each is of a function written in C: nothing can be raised in between, and no thread that
waits for the GIL gets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import call
from typing import Any, Final

#: Run through an iterator, in C.
exhaust: Final[Callable[[Iterable[Any]], None]] = deque[Any](maxlen=0).extend


def at_once(*steps: Callable[[], object]) -> None:
    """Call functions written in C one after the other.

    >>> from functools import partial
    >>> found = [1, 2]
    >>> at_once(found.pop, partial(found.append, 3))
    >>> found
    [1, 3]
    """
    exhaust(map(call, steps))


def stored(keep: Callable[[Any], object], make: Callable[[], object]) -> None:
    """Give what one function written in C returns to another: it cannot get lost on the way.

    >>> from functools import partial
    >>> files: list[str] = []
    >>> stored(files.append, partial("{}.txt".format, "a"))
    >>> files
    ['a.txt']
    """
    exhaust(map(keep, map(call, (make,))))
