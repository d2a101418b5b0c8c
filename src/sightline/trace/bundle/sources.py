"""The source files a recording refers to: kept with it, and shown where the files are not.

The user's own files, and those of other packages that are on the way to an op, are kept whole. Of torch's,
Python's and sightline's own only the lines that ran are, with blank lines between: views hide them unless
they are asked for, and then show single lines. Views read through `linecache`; `install_sources` puts there
what this machine does not have, or has in another version.
"""

from __future__ import annotations

import linecache
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from sightline.trace.bundle.schema import MAX_SOURCE, MAX_SOURCES
from sightline.trace.data import FileInfo, TraceData

_PACKAGE: Final = re.compile(r"/(site|dist)-packages/")
_PLUMBING: Final = re.compile(r"/(site|dist)-packages/(torch|torchgen|functorch)/|^<frozen ")
_PYTHON: Final = re.compile(r"/lib/python3\.\d+/(?!(site|dist)-packages/)")
_OWN: Final = str(Path(__file__).resolve().parents[2]).replace("\\", "/") + "/"
_LARGEST: Final = 8 << 20  #: bytes of a file of this machine that is read for a bundle
_MOST_LINES: Final = 20  #: of one expression


class SourceText(NamedTuple):
    """The text of a file as it is kept."""

    text: str
    whole: bool  #: False if only the lines that ran are there


def gather(data: TraceData) -> dict[str, SourceText]:
    """The text of every source file that frames refer to, as views show it now."""
    kept = getattr(data, "sources", None)
    if kept is not None and len(kept):  # of a loaded trace: what ran, whatever is on this machine
        whole = getattr(kept, "whole", frozenset(kept))
        return {file: SourceText(kept[file], file in whole) for file in kept}
    ran = _lines_that_ran(data)
    found: dict[str, SourceText] = {}
    room = MAX_SOURCES
    for file in sorted(ran, key=lambda file: bool(_PACKAGE.search(_slashed(file)))):  # the user's first
        lines = _read(file)
        if not lines:
            continue
        size = sum(map(len, lines))
        whole = not _is_plumbing(file) and size <= min(MAX_SOURCE, room)
        text = "".join(lines) if whole else _only(lines, ran[file])
        if len(text) <= min(MAX_SOURCE, room):
            room -= len(text)
            found[file] = SourceText(text, whole)
    return {file: found[file] for file in ran if file in found}


def whole_source(file: str) -> str | None:
    """The text of a file that is kept whole; None of one that is not, or cannot be read."""
    if _is_plumbing(file):
        return None
    lines = _read(file)
    size = sum(map(len, lines))
    return "".join(lines) if 0 < size <= MAX_SOURCE else None


def install_sources(data: TraceData) -> None:
    """Have `linecache` know the source of a loaded trace, where this machine has none or another.

    A file that is here and reads the same stays what it is. Names out of a bundle are not trusted: only a
    regular Python file of this machine is ever opened for one. Who loads two recordings of two versions of
    one file sees the lines of the last.
    """
    sources: Mapping[str, str] = getattr(data, "sources", None) or {}
    whole = getattr(sources, "whole", frozenset(sources))
    for file in dict.fromkeys(code.file for code in data.codes):
        if file in linecache.cache or _may_be_opened(file):
            if file not in sources or _unchanged(file, data.files.get(file)):
                continue
            here = linecache.getlines(file)
            lines = lines_of(sources[file])
            if here and (here == lines if file in whole else _agree(here, lines)):
                continue
        elif file not in sources and not _could_be_opened(file):
            continue
        # No time of change: the entry stands for itself, and is not thrown away when the disk is looked at.
        text = sources.get(file, "")
        linecache.cache[file] = (len(text), None, lines_of(text), file)


def _read(file: str) -> list[str]:
    try:
        return linecache.getlines(file)
    except (OSError, ValueError):  # a name that cannot be one of a file
        return []


def lines_of(text: str) -> list[str]:
    """The lines of a text as a file would give them.

    >>> lines_of("a = 1\\n\\x0cb = 2")
    ['a = 1\\n', '\\x0cb = 2\\n']
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line + "\n" for line in lines]


def _lines_that_ran(data: TraceData) -> dict[str, set[int]]:
    """Of every file, in the order of the codes, the lines that frames are on."""
    ran: dict[str, set[int]] = {code.file: set() for code in data.codes}
    of_code: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    frames = data.frames
    places = zip(frames.code.tolist(), frames.line.tolist(), frames.end_line.tolist(), strict=True)
    for code, line, end in places:
        of_code[code].add((line, end))
    for code, spans in of_code.items():
        lines = ran[data.codes[code].file]
        for line, end in spans:
            lines.update(range(line, min(max(end, line), line + _MOST_LINES) + 1))
    return ran


def _only(lines: list[str], wanted: Iterable[int]) -> str:
    """A text with nothing but certain lines, each where it was."""
    there = sorted(number for number in wanted if 0 < number <= len(lines))
    found = ["\n"] * (there[-1] if there else 0)
    for number in there:
        found[number - 1] = lines[number - 1]
    return "".join(found)


def _agree(here: list[str], lines: list[str]) -> bool:
    """Whether the lines that are not blank are those of the file that is here."""
    return all(line == "\n" or (at < len(here) and here[at] == line) for at, line in enumerate(lines))


def _may_be_opened(file: str) -> bool:
    """Whether a name is that of a Python file, and not of a device, a pipe or somebody's keys."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return False
    return (
        os.path.isabs(file)
        and file.endswith(".py")
        and stat.S_ISREG(found.st_mode)
        and found.st_size <= _LARGEST
    )


def _could_be_opened(file: str) -> bool:
    """Whether `linecache` would open something for a name, or stumble over it."""
    try:
        return os.path.lexists(file) or not os.path.isabs(file)
    except ValueError:
        return True


def _unchanged(file: str, seen: FileInfo | None) -> bool:
    """Whether the file of this machine is the one that ran, as far as its time and its size say so."""
    try:
        now = os.stat(file)
    except (OSError, ValueError):
        return False
    cached = linecache.cache.get(file)
    fresh = cached is None or (len(cached) > 1 and cached[1] == now.st_mtime)
    return seen is not None and fresh and (now.st_mtime_ns, now.st_size) == (seen.mtime_ns, seen.size)


def _is_plumbing(file: str) -> bool:
    path = _slashed(file)
    standard = path.startswith(_slashed(os.path.dirname(os.__file__)) + "/") and not _PACKAGE.search(path)
    return bool(_PLUMBING.search(path) or _PYTHON.search(path)) or standard or path.startswith(_OWN)


def _slashed(path: str) -> str:
    return path.replace("\\", "/") if sys.platform == "win32" else path
