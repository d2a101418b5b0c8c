"""``t.source()``: the user's own files, with what ran on each line, loops and calls taken together.

Only functions that ran are shown. Under a line stand the ops that ran on it and the shapes they made, at
its right how often it ran and its *op time*: how long the ops took that ran while it did, those inside what
it calls included, and the Python between them not. What the backward pass did for a line has its own row,
marked ``⟵``, with its time, which is that of the line that called ``backward()``. With ``time="device"``
what devices spent on those ops stands beside what the host did. Where
statistics were taken, the range over all results follows their shapes: ``-> f32[2, 8]; -3.1 … 2.9``.
"""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from sightline.analysis.line_costs import LineRecord, Lines, LineTally, tally_lines
from sightline.analysis.select import Selection, nearest
from sightline.argument_checks import argument_text
from sightline.errors import NothingMatched, UsageError
from sightline.notation import short_path, time_text
from sightline.trace.data import PHASES, TraceData
from sightline.trace.source_lines import syntax_tree
from sightline.trace.user_frames import installed_file
from sightline.views.code import chosen_level
from sightline.views.outline import Line, Span, View, line, printable
from sightline.views.outline import width as text_width
from sightline.views.source_chain import PHASE_MARKS
from sightline.views.statistics_text import StatisticsIndex, ValueStatistics

if TYPE_CHECKING:
    from sightline.api import Trace

_CALLS: Final = 7  # columns for how often a line ran
_TIME: Final = 11  # columns for its time
_WIDTHS: Final = {"op time": _TIME, "host time": _TIME, "device time": 13}  # by what the time is called
_BOTH: Final = 64  # columns a view must have for two times
_MORE: Final = "#   "  # what a row begins with that goes on with the one before
_CONTEXT: Final = 4  # lines kept at both ends of a long stretch where nothing ran
_MOST_OPS, _MOST_SHAPES = 16, 12  # more of them on one line say nothing to a reader


def source(trace: Trace, *, file: str | None = None, ops: str | None = None, module: str | None = None,
           op: str | None = None, phase: str | None = None, depth: int | None = None, tail: int | None = None,
           width: int = 100, stats: bool | None = None) -> View:  # fmt: skip
    """The user's files, annotated line by line; see `Trace.source` for the options."""
    if type(width) is not int or width < 40:
        raise UsageError(f"width={argument_text(width)} must be a whole number from 40 up.")
    index = trace.index
    readings = StatisticsIndex(index.raw, stats)
    mask = Selection(module, op, phase, depth, tail).ops(index, chosen_level(index, ops))
    meant = _meant_files(index.raw, file)
    times = {"op time": index.raw.ops.duration}
    if index.device_durations is not None:
        times = {"host time": index.raw.ops.duration, "device time": index.device_durations}
    every = {
        title: tally_lines(index, mask, lambda path: path not in meant, time) for title, time in times.items()
    }
    elsewhere = _elsewhere(every, named=file is not None)

    def made(room: int) -> list[Line]:
        blocks: list[Line] = []
        titles = list(every) if min(room, width) >= _BOTH else list(every)[-1:]
        for path in every[titles[0]].files:
            records = {title: every[title].files[path] for title in titles}
            blocks += [*_file_lines(index.raw, path, records, readings, min(room, width)), Line()]
        blocks += elsewhere
        return blocks[:-1] if blocks and not blocks[-1].spans else blocks

    return View(tuple(made(width)), fit=made)


def _meant_files(data: TraceData, pattern: str | None) -> set[str]:
    """The files to show: the user's own, or those whose path matches or contains the pattern."""
    paths = {code.file for code in data.codes}
    if pattern is None:
        return {path for path in paths if not installed_file(path)}
    if not isinstance(pattern, str):
        raise UsageError(
            f"file={argument_text(pattern)} must be a string: a part of a path, or a glob over it."
        )
    meant = {
        path
        for path in paths
        if pattern in path or fnmatchcase(path, pattern) or fnmatchcase(short_path(path), pattern)
    }
    if not meant:
        names = nearest(pattern, sorted(short_path(path) for path in paths))
        raise NothingMatched(f"file={pattern!r} matches no source file of this trace{names}")
    return meant


def _elsewhere(every: Mapping[str, Lines], *, named: bool) -> list[Line]:
    lines = next(iter(every.values()))
    if not lines.elsewhere:
        return [] if lines.files else [line(("(no ops were recorded)", "dim"))]
    count = f"{lines.elsewhere} op{'s' if lines.elsewhere > 1 else ''}"
    where = "outside these files" if named else "under no line of your own files"
    times = [(title, time_text(each.elsewhere_time)) for title, each in every.items()]
    told = times[0][1] if len(times) == 1 else ", ".join(f"{title} {time}" for title, time in times)
    return [line((f"{count} ran {where}, {told}.", "dim"))]


def _file_lines(
    data: TraceData,
    path: str,
    every: Mapping[str, dict[int, LineRecord]],
    readings: StatisticsIndex,
    width: int,
) -> Iterator[Line]:
    """One file: its header, then the functions that ran; ``every`` has them by the time they tell."""
    records = next(iter(every.values()))
    yield _header(path, every, width)
    for text in textwrap.wrap(_state(data, path), width - 2):
        yield line((f"  {text}", "warn"))
    texts = [text.rstrip("\n") for text in data.source_lines.lines(path)]
    digits = max(4, len(str(max(records))))
    last = 0
    for number in _shown(texts, records):
        if number > last + 1 and texts:
            yield Line((Span(f"{'⋮':>{digits}}", "dim"),))
        last = number
        text = texts[number - 1] if 0 < number <= len(texts) else ""
        here = {title: each[number] for title, each in every.items()} if number in records else {}
        yield from _annotated(number, text, here, readings, digits, width)
    if last < len(texts):
        yield Line((Span(f"{'⋮':>{digits}}", "dim"),))


def _header(path: str, every: Mapping[str, dict[int, LineRecord]], width: int) -> Line:
    title, records = list(every.items())[-1]
    ran = sum(bool(record.phases) for record in records.values())
    totals = dict.fromkeys(PHASES, 0)
    for record in records.values():
        for phase, tally in record.phases.items():
            totals[phase] += tally.time
    times = [f"{phase} {time_text(time)}" for phase, time in totals.items() if time]
    about = f"{ran} line{'s' if ran != 1 else ''} with ops"
    about += f": {'device ' if title == 'device time' else ''}{', '.join(times)}" if times else ""
    name = _cut(printable(short_path(path))[::-1], width // 2)[::-1]  # the end of a path says more
    titles = f"{'runs':>{_CALLS}}" + _in_columns({title: title for title in every})
    room = width - text_width(name) - 2
    if "op time" not in every:  # by their titles times are told apart
        room -= len(titles) + 1
    about = _cut(about, room) if room > 0 else ""
    gap = width - text_width(name) - 2 - len(about) - len(titles)
    parts = [Span(name, "title"), Span("  "), Span(about, "dim")]
    if gap > 0:
        parts.append(Span(" " * gap + titles, "dim"))
    return Line(tuple(parts))


def _in_columns(texts: Mapping[str, str]) -> str:
    """Times, each in the column of its title."""
    return "".join(f"{text:>{_WIDTHS[title]}}" for title, text in texts.items())


def _state(data: TraceData, path: str) -> str:
    """A sentence where what is shown is not, or may not be, all of the file that ran; else nothing."""
    kept, seen = data.source_lines, data.files.get(path)
    if not kept.lines(path):
        return (
            "The source is not at hand: no such file, or its text was not saved. Only line numbers are shown."
        )
    if kept.texts is not None:  # what was saved is what ran, whatever is on this machine
        return "" if path in kept.whole else "Only the lines that ran were saved of this file."
    if seen is None:  # it is no file: a cell of a notebook
        return ""
    try:
        now = os.stat(path)
    except OSError:
        return "This file is missing now; what is shown is what Python still remembers of it."
    if (now.st_mtime_ns, now.st_size) != (seen.mtime_ns, seen.size):
        return "This file changed since the recording: its lines may not be the ones that ran."
    return ""


def _annotated(
    number: int,
    text: str,
    every: Mapping[str, LineRecord],
    readings: StatisticsIndex,
    digits: int,
    width: int,
) -> Iterator[Line]:
    """A source line, and below it what ran there."""
    gutter = Span(f"{number:>{digits}} │ ", "dim")
    if not every:
        yield Line((gutter, Span(_cut(printable(text), width - digits - 3 - _CALLS - _TIME), "code")))
        return
    record, totals = next(iter(every.values())), {title: each.time for title, each in every.items()}
    times = _in_columns({title: time_text(time) if time else "" for title, time in totals.items()})
    room = width - digits - 3 - _CALLS - len(times)
    shown = _cut(printable(text), room)
    calls = f"×{record.calls}" if record.calls else ""
    numbers = (Span(f"{calls:>{_CALLS}}", "number"), Span(times))
    pad = Span(" " * (room - text_width(shown)))
    yield Line((gutter, Span(shown, "mark" if record.phases else "code"), pad, *numbers))
    indent = len(text.expandtabs(4)) - len(text.expandtabs(4).lstrip()) + 2
    below = Span(" " * digits + " │ " + " " * min(indent, width // 8), "dim")
    for phase in PHASES:
        if phase in record.phases:
            tallies = {title: each.phases[phase] for title, each in every.items()}
            reading = readings.of_results(record.phases[phase].values)
            whole = all(not each.elsewhere and each.time == totals[title] for title, each in tallies.items())
            yield from _ops_lines(below, tallies, reading, phase, width, timed=not whole)


def _ops_lines(
    gutter: Span,
    every: Mapping[str, LineTally],
    reading: ValueStatistics | None,
    phase: str,
    width: int,
    *,
    timed: bool,
) -> Iterator[Line]:
    """``# t ×2, mm ×2 -> f32[4, 12], f32[8, 12]``, with its time where it is a part of the line's."""
    head = f"# {PHASE_MARKS.get(phase, '')}"
    tally = next(iter(every.values()))
    times = _in_columns({title: time_text(each.time) for title, each in every.items()})
    room = width - text_width(gutter.text) - len(_MORE) - len(times)
    names = [name if count == 1 else f"{name} ×{count}" for name, count in tally.ops.items()]
    words = [Span(word, "op") for word in _listed(names, _MOST_OPS, room)]
    if tally.shapes:
        shapes = _listed([*tally.shapes], _MOST_SHAPES, room - len("-> "))
        words += [Span("-> " + shapes[0], "shape"), *(Span(word, "shape") for word in shapes[1:])]
    if reading is not None:
        words = _with_numbers(words, reading)
    if tally.raised:
        words.append(Span(f"!! raised{f' ×{tally.raised}' if tally.raised > 1 else ''}", "error"))
    for number, row in enumerate(_rows(words, room)):
        parts = [gutter, Span(_MORE if number else head, "dim"), *row]
        if timed and number == 0:
            used = sum(text_width(span.text) for span in parts)
            parts.append(Span(f"{times:>{width - used}}", "dim"))
        yield Line(tuple(parts))


def _with_numbers(words: list[Span], reading: ValueStatistics) -> list[Span]:
    """The words of a row, and after a semicolon the range of the results and what of them is not finite."""
    wrong = [span for span in reading.wrong if span.style]
    told = [*([Span(reading.range)] if reading.range else []), *wrong]
    if not told:
        return words
    last = words[-1]
    told = [Span(word.text + ",", word.style) for word in told[:-1]] + told[-1:]
    return [*words[:-1], Span(last.text + ";", last.style), *told]


def _listed(items: Sequence[str], most: int, room: int) -> list[str]:
    """The items as words of a list, each with its comma, no more than ``most`` of them."""
    shown = [_cut(printable(item), room - 1) for item in items[:most]]
    if len(items) > most:
        shown.append(f"+{len(items) - most} more")
    return [word + "," for word in shown[:-1]] + shown[-1:]


def _rows(words: Sequence[Span], room: int) -> Iterator[list[Span]]:
    """Words set in rows that are at most ``room`` wide, with a space between."""
    row: list[Span] = []
    used = 0
    for word in words:
        size = text_width(word.text)
        if row and used + 1 + size > room:
            yield row
            row, used = [], 0
        if row:
            row.append(Span(" "))
            used += 1
        row.append(word)
        used += size
    if row:
        yield row


def _cut(text: str, room: int) -> str:
    if text_width(text) <= room:
        return text
    kept = text[: room - 1]
    while text_width(kept) > room - 1:
        kept = kept[:-1]
    return kept + "…"


def _shown(texts: Sequence[str], ran: Iterable[int]) -> list[int]:
    """The numbers of the lines to show: every function that ran, and the classes around them."""
    ran = set(ran)
    if not texts:
        return sorted(ran)
    tree = syntax_tree("\n".join(texts))
    if tree is None:
        return sorted({near for at in ran for near in (at - 1, at, at + 1) if 0 < near <= len(texts)} | ran)
    shown = set(ran)
    _show_inside(tree, ran, shown)
    return _without_gaps(sorted(at for at in shown if at > 0), ran)


def _without_gaps(numbers: Sequence[int], ran: set[int]) -> list[int]:
    """The lines less the middle of long stretches where nothing ran."""
    kept: list[int] = []
    quiet: list[int] = []
    for number in [*numbers, -1]:
        if number > 0 and number not in ran:
            quiet.append(number)
            continue
        kept += quiet if len(quiet) <= 4 * _CONTEXT else quiet[:_CONTEXT] + quiet[-_CONTEXT:]
        quiet = []
        if number > 0:
            kept.append(number)
    return kept


def _show_inside(node: ast.AST, ran: set[int], shown: set[int]) -> bool:
    """Add the lines of the functions below a node that ran; True if any did."""
    found = False
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found |= _show_inside(child, ran, shown)
            continue
        body = range(child.lineno, (child.end_lineno or child.lineno) + 1)
        if not ran.intersection(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                shown.difference_update(body)
            continue
        found = True
        if isinstance(child, ast.ClassDef):
            shown.add(child.lineno)
        else:
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            shown.update(range(first, body.stop))
            shown.difference_update(_docstring(child))
        _show_inside(child, ran, shown)
    return found


def _docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    """The lines of a docstring but its first."""
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return range(first.lineno + 1, (first.end_lineno or first.lineno) + 1)
    return range(0)
