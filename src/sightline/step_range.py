"""Which training steps are meant, as they are written: ``3``, ``0:5``, ``10:``."""

from __future__ import annotations

import sys

from sightline.errors import UsageError


def step_range(text: str, what: str) -> range:
    """The steps a text means; ``what`` is how an error calls it.

    >>> step_range("3", "steps="), step_range("2:5", "steps=")
    (range(3, 4), range(2, 5))
    """
    first, colon, end = text.partition(":")
    try:
        start = int(first or 0)
        stop = (int(end) if end else sys.maxsize) if colon else start + 1
    except ValueError:
        raise UsageError(f"{what}{text!r} must be a step or a range of them: 3, 0:5, 10: or `:`.") from None
    if start < 0 or stop <= start:
        raise UsageError(f"{what}{text!r} means no step; count from 0, and end after the first: 0:5.")
    return range(start, stop)
