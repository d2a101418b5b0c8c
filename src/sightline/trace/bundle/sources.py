"""The source files a recording refers to, gathered to be saved with it.

The user's own files, and those of other packages that are on the way to an op, are kept whole. Of torch's,
Python's and sightline's own only the lines that ran are, with blank lines between: views hide them unless
they are asked for, and then show single lines. Whoever loads the recording reads this text and no file of
their own machine: `sightline.trace.source_lines`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from sightline.trace.bundle.schema import MAX_SOURCE, MAX_SOURCES
from sightline.trace.data import TraceData
from sightline.trace.source_files import installed_file, python_file, torch_file
from sightline.trace.source_lines import SourceLines

_MOST_LINES: Final = 20  #: of one expression


class SourceText(NamedTuple):
    """The text of a file as it is kept."""

    text: str
    whole: bool  #: False if only the lines that ran are there


def gather(data: TraceData) -> dict[str, SourceText]:
    """The text of every source file that frames refer to, as views show it now."""
    kept = data.source_lines
    if kept.texts is not None:  # of a loaded trace: what ran, whatever is on this machine
        return {file: SourceText(text, file in kept.whole) for file, text in kept.texts.items()}
    ran = _lines_that_ran(data)
    found: dict[str, SourceText] = {}
    room = MAX_SOURCES
    for file in sorted(ran, key=installed_file):  # the user's first
        lines = kept.lines(file)
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
    lines = SourceLines().lines(file)
    size = sum(map(len, lines))
    return "".join(lines) if 0 < size <= MAX_SOURCE else None


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


def _is_plumbing(file: str) -> bool:
    return torch_file(file) or python_file(file)
