"""The source files a recording refers to, collected to be saved with it.

The user's own files, and those of other packages on the way to an op, are saved whole. Of the files of torch,
Python and sightline only the lines that ran are, with blank lines between: views hide them by default, and
otherwise show single lines. A loaded recording shows this text and reads no file of the machine it is on; see
`sightline.data.source_files`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple

from sightline.data.file_owners import installed_file, python_file, torch_file
from sightline.data.source_files import SourceFiles
from sightline.data.trace_data import TraceData
from sightline.store.bundle_schema import MAX_SOURCE, MAX_SOURCES

_MOST_LINES: Final = 20  #: lines of one expression


class SourceText(NamedTuple):
    """The text of a file as it is saved."""

    text: str
    whole: bool  #: False if only the lines that ran are in it


def collect_sources(data: TraceData) -> dict[str, SourceText]:
    """The text of every source file that frames refer to, as views show it."""
    source_lines = data.source_lines
    if source_lines.texts is not None:  # a loaded trace has the text that ran
        return {
            file: SourceText(text, file in source_lines.whole) for file, text in source_lines.texts.items()
        }
    ran = _lines_that_ran(data)
    texts: dict[str, SourceText] = {}
    room = MAX_SOURCES
    for file in sorted(ran, key=installed_file):  # the user's first
        lines = source_lines.lines(file)
        if not lines:
            continue
        size = sum(map(len, lines))
        whole = not _is_plumbing(file) and size <= min(MAX_SOURCE, room)
        if not whole:  # only the lines that ran, the others blank
            numbers = [number for number in ran[file] if 0 < number <= len(lines)]
            kept = ["\n"] * max(numbers, default=0)
            for number in numbers:
                kept[number - 1] = lines[number - 1]
            lines = kept
        text = "".join(lines)
        if len(text) <= min(MAX_SOURCE, room):
            room -= len(text)
            texts[file] = SourceText(text, whole)
    return {file: texts[file] for file in ran if file in texts}


def whole_source(file: str) -> str | None:
    """The text of a file that is saved whole; None for one that is not, or cannot be read."""
    if _is_plumbing(file):
        return None
    lines = SourceFiles().lines(file)
    size = sum(map(len, lines))
    return "".join(lines) if 0 < size <= MAX_SOURCE else None


def _lines_that_ran(data: TraceData) -> dict[str, set[int]]:
    """For every file, in the order of the codes, the lines that frames are on."""
    ran: dict[str, set[int]] = {code.file: set() for code in data.codes}
    code_spans: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    frames = data.frames
    positions = zip(frames.code.tolist(), frames.line.tolist(), frames.end_line.tolist(), strict=True)
    for code, line, end in positions:
        code_spans[code].add((line, end))
    for code, spans in code_spans.items():
        lines = ran[data.codes[code].file]
        for line, end in spans:
            lines.update(range(line, min(max(end, line), line + _MOST_LINES) + 1))
    return ran


def _is_plumbing(file: str) -> bool:
    return torch_file(file) or python_file(file)
