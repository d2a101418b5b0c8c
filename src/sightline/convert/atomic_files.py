"""Files that appear complete or not at all: written under another name, renamed when they are finished."""

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
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to; it is renamed when the block succeeds, and deleted when it fails.

    Anything but a regular file, such as a pipe or ``/dev/stdout``, is written to directly.
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give the name of a file in it.")
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))  # a link stays a link: the file behind it is replaced
    part = target.with_name(f".{target.name[:80]}.{os.getpid()}.part")
    with _write_errors(path):
        part.unlink(missing_ok=True)  # left by a killed process of the same number
        try:
            yield part
            os.replace(part, target)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to write files to: the existing one, or a new one that is renamed when the block succeeds."""
    if path.is_dir():
        yield path
        return
    if path.exists():
        raise UsageError(f"{path} is a file: give the name of a folder.")
    part = path.with_name(f".{path.name[:80]}.{os.getpid()}.part")
    with _write_errors(path):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            os.replace(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


@contextlib.contextmanager
def atomic_text(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """A text file that appears complete or not at all; a name that ends in ``.gz`` is compressed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_text(f"{folder}/a.txt") as file:
    ...         _ = file.write("x")
    ...     Path(folder, "a.txt").read_text(), len(os.listdir(folder))
    ('x', 1)
    """
    with atomic_path(path) as part, open(part, "wb" if part.exists() else "xb") as raw:
        zipped = Path(path).suffix.lower() == ".gz"
        packed = gzip.GzipFile("", "wb", 6, raw, mtime=0) if zipped else contextlib.nullcontext(raw)
        # Lone surrogates, from file names that are not UTF-8, cannot be encoded.
        with packed as target, io.TextIOWrapper(target, "utf-8", errors="replace", newline="") as file:
            yield file


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn the system's error about writing a file into a `CaptureError`."""
    try:
        yield
    except OSError as error:
        raise CaptureError(f"{path} cannot be written: {error.strerror or error}.") from error
