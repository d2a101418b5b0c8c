"""What views draw with, where a stream cannot hold it: ``|``, ``-`` and ``#`` for ``│``, ``─`` and ``▇``.

Each sign becomes one character, so that columns stay columns. Signs that an encoding does hold are left
alone; what comes from the recording and has no counterpart becomes ``?``.
"""

from __future__ import annotations

import codecs
from functools import lru_cache
from typing import Final

#: Each sign of the views, and what stands in for it.
_PLAIN: Final = {
    "─": "-", "│": "|", "┊": ":", "┌": "+", "├": "+", "└": "+", "●": "*", "⋮": ":",
    "▁": "_", "▂": ".", "▃": "-", "▄": ":", "▅": "=", "▆": "+", "▇": "#", "█": "#",
    "░": ":", "▒": "+", "▓": "%", "·": ".", "…": "~", "×": "x", "±": "~", "µ": "u", "²": "2", "—": "-",
    "→": ">", "⟵": "<", "↺": "@", "↓": "v", "⬇": "v", "\ufe0f": "", "∞": "I",
}  # fmt: skip


@lru_cache(maxsize=16)
def substitutes(encoding: str) -> dict[int, str]:
    """What to put for the signs that an encoding cannot hold, for `str.translate`.

    >>> "│ 0 … 1.42".translate(substitutes("ascii")), "12 µs ─".translate(substitutes("latin-1"))
    ('| 0 ~ 1.42', '12 µs -')
    """
    return {ord(sign): plain for sign, plain in _PLAIN.items() if not _holds(encoding, sign)}


def known_encoding(encoding: str) -> str:
    """An encoding as Python calls it; ASCII for one it does not know."""
    try:
        return codecs.lookup(encoding).name
    except LookupError:
        return "ascii"


def _holds(encoding: str, sign: str) -> bool:
    try:
        sign.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
