"""The source of a recording for the page: its files, and per line what ran there, how often and how long."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sightline.analysis.line_costs import LineRecord, tally_lines
from sightline.analysis.select import Selection
from sightline.convert.context import TableContext
from sightline.data.file_owners import installed_file, torch_file
from sightline.data.source_files import SourceFiles
from sightline.data.trace_data import I32, PHASES, TraceData
from sightline.notation import short_path, times_text
from sightline.views.code import chosen_level
from sightline.views.source import shown_lines

_MOST_TEXT: Final = 1 << 20  #: characters of a file that is kept whole
_MOST_NAMES: Final = 12  #: ops and shapes of one line that are named


def file_rows(facts: TableContext) -> list[dict[str, Any]]:
    """The files that ran, without torch's own: those the user wrote first, then in the order they ran."""
    index = facts.index
    level = chosen_level(index, None)
    tallied = tally_lines(index, Selection().ops(index, level), torch_file)
    rows = [_file_row(facts, path, records) for path, records in tallied.files.items()]
    return sorted(rows, key=lambda row: bool(row["installed"]))


def _file_row(facts: TableContext, path: str, records: dict[int, LineRecord]) -> dict[str, Any]:
    ran = {number: record for number, record in sorted(records.items()) if number > 0}
    return {
        "path": path,
        "name": short_path(path),
        "installed": installed_file(path),
        "text": _stretches(facts.raw.source_lines, path, ran),
        "lines": [_line_row(number, record) for number, record in ran.items()],
    }


def _stretches(lines: SourceFiles, path: str, ran: dict[int, LineRecord]) -> list[tuple[int, list[str]]]:
    """The text of a file as stretches, each with the number of its first line; none without source.

    A file of the user's is whole. Of a library, and of what is very long, there are the functions that ran.
    """
    texts = [text.rstrip("\n") for text in lines.lines(path)]
    if not texts:
        return []
    if not installed_file(path) and sum(map(len, texts)) <= _MOST_TEXT:
        return [(1, texts)]
    found: list[tuple[int, list[str]]] = []
    for number in shown_lines(texts, ran):
        if not found or number != found[-1][0] + len(found[-1][1]):
            found.append((number, []))
        found[-1][1].append(lines.line(path, number).rstrip("\n"))
    return found


def _line_row(number: int, record: LineRecord) -> list[Any]:
    """Number, runs, ns, and per phase: its word, the ops, the shapes they made, ns, how many raised."""
    phases = [
        [phase, _names(record.phases[phase].ops), _listed(list(record.phases[phase].shapes)),
         record.phases[phase].time, record.phases[phase].raised]
        for phase in PHASES if phase in record.phases
    ]  # fmt: skip
    return [number, record.calls, record.time, phases]


def _names(ops: dict[str, int]) -> list[str]:
    return _listed([name if count == 1 else times_text(name, count) for name, count in ops.items()])


def _listed(items: list[str]) -> list[str]:
    return items if len(items) <= _MOST_NAMES else [*items[:_MOST_NAMES], f"+{len(items) - _MOST_NAMES} more"]


def character_columns(data: TraceData) -> tuple[list[int], list[int]]:
    """Where the expression of each frame begins and ends on its line, in UTF-16 units, as JavaScript counts.

    -1 where it is not known, or not shown; an expression over several lines ends with its first.
    """
    frames, codes = data.frames, data.codes
    begins, ends = [-1] * len(frames), [-1] * len(frames)
    for frame in np.flatnonzero(frames.column >= 0).tolist():
        file, line = codes[int(frames.code[frame])].file, int(frames.line[frame])
        text = "" if torch_file(file) else data.source_lines.line(file, line).rstrip("\n")
        if text:
            written = text.encode("utf-8", "replace")
            whole = int(frames.end_line[frame]) != line
            begins[frame] = _units(written[: int(frames.column[frame])])
            ends[frame] = _units(written if whole else written[: int(frames.end_column[frame])])
    return begins, ends


def _units(data: bytes) -> int:
    return len(data.decode("utf-8", "ignore").encode("utf-16-le")) // 2


def user_stack(facts: TableContext) -> I32:
    """For each frame the next one further out that is not torch's; -1 at the outermost."""
    return facts.index.user_frames[facts.raw.frames.parent]
