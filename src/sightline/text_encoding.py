"""Text for streams whose encoding lacks the signs that views are drawn with: readable substitutes."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: The ASCII substitute of each sign in the views.
_ASCII: Final = {
    "─": "-", "│": "|", "┊": ":", "┌": "+", "├": "+", "└": "+", "●": "*", "⋮": ":",
    "▁": "_", "▂": ".", "▃": "-", "▄": ":", "▅": "=", "▆": "+", "▇": "#", "█": "#",
    "░": ":", "▒": "+", "▓": "%", "·": ".", "…": "~", "×": "x", "±": "~", "µ": "u", "²": "2", "—": "-",
    "–": "-", "→": ">", "⟵": "<", "↺": "@", "↓": "v", "⬇": "v", "\ufe0f": "", "∞": "I", "═": "=",
    "‘": "'", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
_READABLE: Final = "sightline.readable"  #: the name of `_replaced` among Python's handlers of such errors


@lru_cache(maxsize=16)
def substitutes(encoding: str) -> dict[int, str]:
    """The substitutes of the signs that an encoding lacks, for `str.translate`.

    >>> "│ 0 … 1.42".translate(substitutes("ascii")), "12 µs ─".translate(substitutes("latin-1"))
    ('| 0 ~ 1.42', '12 µs -')
    """
    return {ord(sign): plain for sign, plain in _ASCII.items() if not _can_encode(encoding, sign)}


def encoding_of(stream: Any) -> str:
    """Python's name of a stream's encoding: UTF-8 where it has none, ASCII where it is unknown."""
    return _known(getattr(stream, "encoding", None) or "utf-8")


@lru_cache(maxsize=16)
def _known(encoding: Any) -> str:
    """Python's name of an encoding; ASCII for one that it does not know."""
    try:
        return codecs.lookup(encoding).name
    except (LookupError, TypeError):
        return "ascii"


def encodable(text: str, encoding: str) -> str:
    """The text in an encoding: better a ``?`` than no view.

    >>> encodable("é × 3", "ascii")
    '? x 3'
    """
    encoding = _known(encoding)
    signs = substitutes(encoding)
    if not signs or text.isascii():  # an encoding that has all signs has everything
        return text
    return text.translate(signs).encode(encoding, "replace").decode(encoding)


def for_output(text: str) -> str:
    """The text as ``print`` can write it to standard output."""
    return text if text.isascii() else encodable(text, encoding_of(sys.stdout))


def printable(kind: type[T]) -> type[T]:
    """Have the ``repr`` of a class, such as a dataclass makes it, be one that ``print`` can write."""
    plain = kind.__repr__

    @wraps(plain)
    def printed(self: Any) -> str:
        return for_output(plain(self))

    kind.__repr__ = printed  # type: ignore[method-assign]
    return kind


def for_errors(text: str) -> str:
    """The text as a traceback can show it on standard error."""
    return text if text.isascii() else encodable(text, encoding_of(sys.stderr))


def _can_encode(encoding: str, sign: str) -> bool:
    try:
        sign.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Signs as their substitutes, and all other characters as escapes, which lose nothing."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_ASCII.get(char, ascii(char)[1:-1]) for char in lost), error.end


@contextmanager
def readable_output() -> Iterator[None]:
    """Let standard output and standard error take every text; for a process of our own."""
    codecs.register_error(_READABLE, _replaced)
    with ExitStack() as restored:
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None and substitutes(encoding_of(stream)):
                restored.callback(reconfigure, errors=getattr(stream, "errors", "strict"))
                reconfigure(errors=_READABLE)
        yield
