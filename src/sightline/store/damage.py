"""Damaged or foreign files of a recording: the fault of one, and the one sentence that reports it."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sightline.errors import DamagedFile

#: Errors while reading that mean the file is damaged.
READ_ERRORS: Final = (sqlite3.Error, sqlite3.Warning, ValueError, TypeError, KeyError, IndexError,
                      OverflowError, RecursionError, AttributeError, MemoryError)  # fmt: skip


class Damage(Exception):
    """The fault of a file or a recording: half a sentence, which follows the file's name."""


class TooLarge(Damage):
    """A file expands to more than a file of its size may."""


@contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Turn every error while a file is read into `DamagedFile` with one sentence.

    >>> with damage_reported(Path("run.db")):
    ...     raise Damage("its names are not all texts")
    Traceback (most recent call last):
    sightline.errors.DamagedFile: run.db is damaged: its names are not all texts.
    """
    try:
        yield
    except Damage as why:
        raise DamagedFile(f"{path} is damaged: {why}.") from None
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror or error}.") from error
    except READ_ERRORS as error:
        text = escaped(str(error).rstrip(".") or type(error).__name__)
        raise DamagedFile(f"{path} is damaged: {text}.") from error


def require_regular_file(path: Path) -> None:
    """Refuse a pipe or a device before it is opened: opening a pipe would block."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Damage("it is not a regular file")


def quoted(value: object) -> str:
    """A value from a file, for a message: quoted, escaped and cut to a short length.

    >>> print(quoted("\\x1b[31m" + "x" * 100)[:15])
    '\\x1b[31mxxxxxx
    """
    text = ascii(value[:60] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def escaped(value: object) -> str:
    """A text for the middle of a message: escaped and cut, without quotes."""
    return quoted(str(value))[1:-1]
