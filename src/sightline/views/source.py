"""``t.source()``: the user's own files, with the ops that ran on each line, loops and calls taken together.

Only functions that ran are shown. Below a line stand its ops and the shapes of their results, at its right
how often it ran and its *op time*: the time of the ops that ran on it or in functions it called, without the
Python between them. The backward ops of a line have their own row, marked ``⟵``, with their time, which
counts for the line that called ``backward()``. With ``time="device"`` the device time of the ops stands
beside the host time. Where statistics were taken, the range over all results follows their shapes:
``-> f32[2, 8]; -3.1 … 2.9``.
"""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from sightline.analysis.line_costs import LineRecord, Lines, LineTally, tally_lines
from sightline.analysis.select import Selection
from sightline.argument_checks import argument_text
from sightline.data.file_owners import installed_file
from sightline.data.index import Index
from sightline.data.not_recorded import other_threads
from sightline.data.source_files import syntax_tree
from sightline.data.trace_data import PHASES, TraceData
from sightline.errors import NothingMatched, UsageError
from sightline.hints import Hint
from sightline.notation import short_path, time_text
from sightline.patterns import did_you_mean
from sightline.views.code import chosen_level
from sightline.views.rendering import Line, Span, View, comment_lines, cut, cut_end, line
from sightline.views.rendering import width as text_width
from sightline.views.source_chain import PHASE_MARKS
from sightline.views.statistics_text import StatisticsIndex, ValueStatistics

_CALLS: Final = 7  # columns for how often a line ran
_TIME: Final = 11  # columns for its time
_WIDTHS: Final = {"op time": _TIME, "host time": _TIME, "device time": 13}  # by title
_MIN_WIDTH_FOR_BOTH: Final = 64  # of a view with host and device time
_CONTINUATION: Final = "#   "  # prefix of a row that continues the one before
_CONTEXT: Final = 4  # lines kept at both ends of a long part where nothing ran
_MAX_OPS, _MAX_SHAPES = 16, 12  # listed on one line


def source(index: Index, *, file: str | None = None, level: str | None = None, module: str | None = None,
           op: str | None = None, phase: str | None = None, depth: int | None = None, tail: int | None = None,
           width: int = 100, stats: bool | None = None) -> View:  # fmt: skip
    """The user's files, annotated line by line; see `Trace.source` for the options."""
    if type(width) is not int or width < 40:
        raise UsageError(f"width={argument_text(width)} must be a whole number from 40 up.")
    statistics_index = StatisticsIndex(index.raw, stats)
    mask = Selection(module, op, phase, depth, tail).ops(index, chosen_level(index, level))
    files = _selected_files(index.raw, file)
    times = {"op time": index.raw.ops.duration}
    if index.device_durations is not None:
        times = {"host time": index.raw.ops.duration, "device time": index.device_durations}
    by_title = {
        title: tally_lines(index, mask, lambda path: path not in files, time) for title, time in times.items()
    }
    elsewhere = [*_elsewhere(by_title, named=file is not None), *comment_lines([other_threads(index.raw)])]

    def fit(room: int) -> list[Line]:
        blocks: list[Line] = []
        titles = list(by_title) if min(room, width) >= _MIN_WIDTH_FOR_BOTH else list(by_title)[-1:]
        for path in by_title[titles[0]].files:
            records = {title: by_title[title].files[path] for title in titles}
            blocks += [*_file_lines(index.raw, path, records, statistics_index, min(room, width)), Line()]
        blocks += elsewhere
        return blocks[:-1] if blocks and not blocks[-1].spans else blocks

    return View(tuple(fit(width)), fit=fit)


def _selected_files(data: TraceData, pattern: str | None) -> set[str]:
    """The files to show: the user's own, or those whose path matches or contains the pattern."""
    paths = {code.file for code in data.codes}
    if pattern is None:
        return {path for path in paths if not installed_file(path)}
    if not isinstance(pattern, str):
        raise UsageError(
            f"{Hint.option('file', pattern)} must be a string: a part of a path, or a glob over it."
        )
    files = {
        path
        for path in paths
        if pattern in path or fnmatchcase(path, pattern) or fnmatchcase(short_path(path), pattern)
    }
    if not files:
        names = did_you_mean(pattern, sorted(short_path(path) for path in paths))
        raise NothingMatched(f"{Hint.option('file', pattern)} matches no source file of this trace{names}")
    return files


def _elsewhere(by_title: Mapping[str, Lines], *, named: bool) -> list[Line]:
    lines = next(iter(by_title.values()))
    if not lines.elsewhere:
        return [] if lines.files else [line(("(no ops were recorded)", "dim"))]
    count = f"{lines.elsewhere} op{'s' if lines.elsewhere > 1 else ''}"
    where = "outside these files" if named else "under no line of your own files"
    times = [(title, time_text(each.elsewhere_time)) for title, each in by_title.items()]
    text = times[0][1] if len(times) == 1 else ", ".join(f"{title} {time}" for title, time in times)
    return [line((f"{count} ran {where}, {text}.", "dim"))]


def _file_lines(
    data: TraceData,
    path: str,
    by_title: Mapping[str, dict[int, LineRecord]],
    statistics_index: StatisticsIndex,
    width: int,
) -> Iterator[Line]:
    """One file: its header, then the functions that ran; ``by_title`` has its lines by title of time."""
    records = next(iter(by_title.values()))
    yield _header(path, by_title, width)
    for text in textwrap.wrap(_source_warning(data, path), width - 2):
        yield line((f"  {text}", "warn"))
    texts = [text.rstrip("\n") for text in data.source_lines.lines(path)]
    digits = max(4, len(str(max(records))))
    last = 0
    for number in shown_lines(texts, records):
        if number > last + 1 and texts:
            yield Line((Span(f"{'⋮':>{digits}}", "dim"),))
        last = number
        text = texts[number - 1] if 0 < number <= len(texts) else ""
        line_records = {title: each[number] for title, each in by_title.items()} if number in records else {}
        yield from _annotate(number, text, line_records, statistics_index, digits, width)
    if last < len(texts):
        yield Line((Span(f"{'⋮':>{digits}}", "dim"),))


def _header(path: str, by_title: Mapping[str, dict[int, LineRecord]], width: int) -> Line:
    title, records = list(by_title.items())[-1]
    with_ops = sum(bool(record.phases) for record in records.values())
    totals = dict.fromkeys(PHASES, 0)
    for record in records.values():
        for phase, tally in record.phases.items():
            totals[phase] += tally.time
    times = [f"{phase} {time_text(time)}" for phase, time in totals.items() if time]
    about = f"{with_ops} line{'s' if with_ops != 1 else ''} with ops"
    about += f": {'device ' if title == 'device time' else ''}{', '.join(times)}" if times else ""
    name = cut_end(short_path(path), width // 2)
    titles = f"{'runs':>{_CALLS}}" + _in_columns({title: title for title in by_title})
    room = width - text_width(name) - 2
    if "op time" not in by_title:  # two times need their titles
        room -= len(titles) + 1
    about = cut(about, room) if room > 0 else ""
    gap = width - text_width(name) - 2 - len(about) - len(titles)
    parts = [Span(name, "title"), Span("  "), Span(about, "dim")]
    if gap > 0:
        parts.append(Span(" " * gap + titles, "dim"))
    return Line(tuple(parts))


def _in_columns(texts: Mapping[str, str]) -> str:
    """Times, each in the column of its title."""
    return "".join(f"{text:>{_WIDTHS[title]}}" for title, text in texts.items())


def _source_warning(data: TraceData, path: str) -> str:
    """A sentence if the text shown may differ from the file that ran; else empty."""
    sources, recorded = data.source_lines, data.files.get(path)
    if not sources.lines(path):
        return (
            "The source is not at hand: no such file, or its text was not saved. Only line numbers are shown."
        )
    if sources.texts is not None:  # saved with the recording: the text that ran
        return "" if path in sources.whole else "Only the lines that ran were saved of this file."
    if recorded is None:  # no file: a cell of a notebook
        return ""
    try:
        now = os.stat(path)
    except OSError:
        return "This file is missing now; the text shown is the one that Python still has in memory."
    if (now.st_mtime_ns, now.st_size) != (recorded.mtime_ns, recorded.size):
        return "This file changed since the recording: its lines may not be the ones that ran."
    return ""


def _annotate(
    number: int,
    text: str,
    by_title: Mapping[str, LineRecord],
    statistics_index: StatisticsIndex,
    digits: int,
    width: int,
) -> Iterator[Line]:
    """A source line, and below it the ops that ran there."""
    gutter = Span(f"{number:>{digits}} │ ", "dim")
    if not by_title:
        yield Line((gutter, Span(cut(text, width - digits - 3 - _CALLS - _TIME), "code")))
        return
    record, totals = next(iter(by_title.values())), {title: each.time for title, each in by_title.items()}
    times = _in_columns({title: time_text(time) if time else "" for title, time in totals.items()})
    room = width - digits - 3 - _CALLS - len(times)
    shown = cut(text, room)
    calls = f"×{record.calls}" if record.calls else ""
    numbers = (Span(f"{calls:>{_CALLS}}", "number"), Span(times))
    pad = Span(" " * (room - text_width(shown)))
    yield Line((gutter, Span(shown, "mark" if record.phases else "code"), pad, *numbers))
    indent = len(text.expandtabs(4)) - len(text.expandtabs(4).lstrip()) + 2
    below = Span(" " * digits + " │ " + " " * min(indent, width // 8), "dim")
    for phase in PHASES:
        if phase in record.phases:
            tallies = {title: each.phases[phase] for title, each in by_title.items()}
            statistics = statistics_index.of_results(record.phases[phase].values)
            whole = all(not each.elsewhere and each.time == totals[title] for title, each in tallies.items())
            yield from _ops_lines(below, tallies, statistics, phase, width, timed=not whole)


def _ops_lines(
    gutter: Span,
    by_title: Mapping[str, LineTally],
    statistics: ValueStatistics | None,
    phase: str,
    width: int,
    *,
    timed: bool,
) -> Iterator[Line]:
    """``# t ×2, mm ×2 -> f32[4, 12], f32[8, 12]``, with its time where that is only a part of the line's."""
    head = f"# {PHASE_MARKS.get(phase, '')}"
    tally = next(iter(by_title.values()))
    times = _in_columns({title: time_text(each.time) for title, each in by_title.items()})
    room = width - text_width(gutter.text) - len(_CONTINUATION) - len(times)
    names = [name if count == 1 else f"{name} ×{count}" for name, count in tally.ops.items()]
    words = [Span(word, "op") for word in _list_words(names, _MAX_OPS, room)]
    if tally.shapes:
        shapes = _list_words([*tally.shapes], _MAX_SHAPES, room - len("-> "))
        words += [Span("-> " + shapes[0], "shape"), *(Span(word, "shape") for word in shapes[1:])]
    if statistics is not None:  # after a semicolon the range of the results, and the non-finite elements
        facts = [Span(statistics.range)] if statistics.range else []
        facts += [span for span in statistics.wrong if span.style]
        if facts:
            words[-1] = Span(words[-1].text + ";", words[-1].style)
            words += [*(Span(fact.text + ",", fact.style) for fact in facts[:-1]), facts[-1]]
    if tally.raised:
        words.append(Span(f"!! raised{f' ×{tally.raised}' if tally.raised > 1 else ''}", "error"))
    for number, row in enumerate(_rows(words, room)):
        parts = [gutter, Span(_CONTINUATION if number else head, "dim"), *row]
        if timed and number == 0:
            used = sum(text_width(span.text) for span in parts)
            parts.append(Span(f"{times:>{width - used}}", "dim"))
        yield Line(tuple(parts))


def _list_words(items: Sequence[str], most: int, room: int) -> list[str]:
    """At most ``most`` items as words of a list, each with its comma."""
    shown = [cut(item, room - 1) for item in items[:most]]
    if len(items) > most:
        shown.append(f"+{len(items) - most} more")
    return [word + "," for word in shown[:-1]] + shown[-1:]


def _rows(words: Sequence[Span], room: int) -> Iterator[list[Span]]:
    """Words in rows of at most ``room`` columns, with a space in between."""
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


def shown_lines(texts: Sequence[str], ran: Iterable[int]) -> list[int]:
    """The numbers of the lines to show: every function that ran, and the headers of their classes."""
    ran = set(ran)
    if not texts:
        return sorted(ran)
    tree = syntax_tree("\n".join(texts))
    if tree is None:
        return sorted({near for at in ran for near in (at - 1, at, at + 1) if 0 < near <= len(texts)} | ran)
    shown = set(ran)
    _add_functions(tree, ran, shown)
    kept: list[int] = []  # without the middle of long parts where nothing ran
    quiet: list[int] = []
    for number in [*sorted(at for at in shown if at > 0), -1]:
        if number > 0 and number not in ran:
            quiet.append(number)
            continue
        kept += quiet if len(quiet) <= 4 * _CONTEXT else quiet[:_CONTEXT] + quiet[-_CONTEXT:]
        quiet = []
        if number > 0:
            kept.append(number)
    return kept


def _add_functions(node: ast.AST, ran: set[int], shown: set[int]) -> bool:
    """Add the lines of the functions below a node that ran; True if any did."""
    any_ran = False
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            any_ran |= _add_functions(child, ran, shown)
            continue
        body = range(child.lineno, (child.end_lineno or child.lineno) + 1)
        if not ran.intersection(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                shown.difference_update(body)
            continue
        any_ran = True
        if isinstance(child, ast.ClassDef):
            shown.add(child.lineno)
        else:
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            shown.update(range(first, body.stop))
            head = child.body[0]
            if (
                isinstance(head, ast.Expr)
                and isinstance(head.value, ast.Constant)
                and isinstance(head.value.value, str)
            ):
                shown.difference_update(range(head.lineno + 1, (head.end_lineno or head.lineno) + 1))
        _add_functions(child, ran, shown)
    return any_ran
