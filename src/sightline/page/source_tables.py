"""The source of a recording for the page: its files, and the ops, runs and time of each line."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sightline.analysis.line_costs import LineRecord, tally_lines
from sightline.analysis.select import Selection
from sightline.convert.context import TableContext
from sightline.data.file_owners import installed_file, torch_file
from sightline.data.source_files import SourceFiles
from sightline.data.trace_data import PHASES, TraceData
from sightline.notation import short_path, times_text
from sightline.views.code import chosen_level
from sightline.views.source import shown_lines

_MOST_TEXT: Final = 1 << 20  #: characters of a file that is kept whole
_MOST_NAMES: Final = 12  #: ops and shapes of one line that are named


def file_rows(context: TableContext) -> list[dict[str, Any]]:
    """The files that ran, without torch's own: those the user wrote first, then in the order they ran."""
    index = context.index
    level = chosen_level(index, None)
    tallied = tally_lines(index, Selection().ops(index, level), torch_file)
    rows = []
    for path, records in tallied.files.items():
        ran = {number: record for number, record in sorted(records.items()) if number > 0}
        rows.append({
            "path": path,
            "name": short_path(path),
            "installed": installed_file(path),
            "text": _stretches(context.raw.source_lines, path, ran),
            "lines": [_line_row(number, record) for number, record in ran.items()],
        })  # fmt: skip
    return sorted(rows, key=lambda row: bool(row["installed"]))


def _stretches(source: SourceFiles, path: str, ran: dict[int, LineRecord]) -> list[tuple[int, list[str]]]:
    """The text of a file as stretches, each with the number of its first line; empty without source.

    A file of the user's is whole. Of a library, and of a very long file, only functions that ran are kept.
    """
    lines = [text.rstrip("\n") for text in source.lines(path)]
    if not lines:
        return []
    if not installed_file(path) and sum(map(len, lines)) <= _MOST_TEXT:
        return [(1, lines)]
    stretches: list[tuple[int, list[str]]] = []
    for number in shown_lines(lines, ran):
        if not stretches or number != stretches[-1][0] + len(stretches[-1][1]):
            stretches.append((number, []))
        stretches[-1][1].append(source.line(path, number).rstrip("\n"))
    return stretches


def _line_row(number: int, record: LineRecord) -> list[Any]:
    """Number, runs, ns, and per phase: its name, the ops, their shapes, ns, how many raised."""
    phases = []
    for phase in PHASES:
        if phase in record.phases:
            part = record.phases[phase]
            ops = [name if count == 1 else times_text(name, count) for name, count in part.ops.items()]
            phases.append([phase, _listed(ops), _listed(list(part.shapes)), part.time, part.raised])
    return [number, record.calls, record.time, phases]


def _listed(items: list[str]) -> list[str]:
    return items if len(items) <= _MOST_NAMES else [*items[:_MOST_NAMES], f"+{len(items) - _MOST_NAMES} more"]


def character_columns(data: TraceData) -> tuple[list[int], list[int]]:
    """The columns where the expression of each frame begins and ends, in UTF-16 units, as JavaScript counts.

    -1 where they are unknown, or not shown. An expression over several lines ends with its first.
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
    if data.isascii():
        return len(data)
    return len(data.decode("utf-8", "ignore").encode("utf-16-le")) // 2
