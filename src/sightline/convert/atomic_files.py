"""Files that are there whole or not at all: written under another name, renamed when they are finished."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sightline.errors import CaptureError, UsageError


@contextlib.contextmanager
def whole_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to; the file takes its own name when the block ends well, and is gone when it does not.

    Something that is no regular file, a pipe or ``/dev/stdout``, is written to directly.
    """
    given = Path(path)
    if given.is_dir():
        raise UsageError(f"{given} is a folder: give the name of a file in it.")
    if given.exists() and not given.is_file():
        yield given
        return
    target = Path(os.path.realpath(given))  # through a link: the file it leads to is the one replaced
    part = target.with_name(f".{target.name[:80]}.{os.getpid()}.part")
    with told(given):
        part.unlink(missing_ok=True)  # of a process that had this number and was killed
        try:
            yield part
            os.replace(part, target)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to put files into: the one that is there, or a new one that takes its name at the end."""
    if path.is_dir():
        yield path
        return
    if path.exists():
        raise UsageError(f"{path} is a file: give the name of a folder.")
    part = path.with_name(f".{path.name[:80]}.{os.getpid()}.part")
    with told(path):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            os.replace(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


@contextlib.contextmanager
def whole_text(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """A text file that is there whole or not at all; a name that ends in ``.gz`` is compressed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_text(f"{folder}/a.txt") as file:
    ...         _ = file.write("x")
    ...     Path(folder, "a.txt").read_text(), len(os.listdir(folder))
    ('x', 1)
    """
    with whole_path(path) as part, open(part, "wb" if part.exists() else "xb") as raw:
        if Path(path).suffix.lower() == ".gz":
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed, _text(packed) as file:
                yield file
        else:
            with _text(raw) as file:
                yield file


def _text(raw: IO[bytes] | gzip.GzipFile) -> io.TextIOWrapper:
    # Lone surrogates, out of file names that are no UTF-8, have no bytes of their own.
    return io.TextIOWrapper(raw, "utf-8", errors="replace", newline="")


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """What the system says against writing a file, as one sentence."""
    try:
        yield
    except OSError as error:
        raise CaptureError(f"{path} cannot be written: {error.strerror or error}.") from error
