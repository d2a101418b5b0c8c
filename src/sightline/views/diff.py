"""The views of a `Diff`: the verdict on one screen, pairs of module calls, both sources side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.compare.side import OpLabel
from sightline.compare.values import State
from sightline.hints import Hint
from sightline.notation import dtype_name, number_text
from sightline.views.rendering import (
    MARGIN,
    WIDTH,
    Block,
    Column,
    Line,
    Span,
    View,
    cut,
    cut_end,
    fact_line,
    grid,
    line,
    width,
)
from sightline.views.table_layout import fit_blocks

if TYPE_CHECKING:
    from sightline.compare.divergence import Divergence
    from sightline.diff_api import Diff


_GROWTH_ROWS: Final = 8  #: of the table of how the error grows
_MAX_OTHERS: Final = 3  #: how many further divergences are shown
_BARS: Final = "▁▂▃▄▅▆▇█"
_MIN_EXPONENT: Final = -8.0  #: an error of this power of ten is the lowest bar

_VERDICTS: Final = {
    "same": ("the same, to the last bit", "title"),
    "close": ("equal up to rounding", "title"),
    "different": ("they part", "error"),
    "unknown": ("unknown", "warn"),
}


def verdict_view(diff: Diff) -> View:
    """One screen about two runs."""

    def fit(room: int) -> list[Block]:
        room = min(room, WIDTH)
        return [*_head(diff, room), line(), *_answer(diff, room), *_growth(diff, room), *_facts(diff)]

    return View(tuple(fit_blocks(fit(WIDTH), WIDTH)), fit=fit)


def error_text(error: float) -> str:
    """An error in two digits, or a text where it is not a number."""
    if math.isnan(error):
        return "?"
    return "sizes differ" if math.isinf(error) else f"{error:.1e}"


def bar(error: float) -> str:
    """An error as a bar, by its power of ten.

    >>> [bar(error) for error in (0.0, 1e-8, 1e-4, 1.0)]
    [' ', '▁', '▅', '█']
    """
    if not error > 0:
        return " "
    share = 1.0 if math.isinf(error) else (math.log10(error) - _MIN_EXPONENT) / -_MIN_EXPONENT
    return _BARS[max(0, min(len(_BARS) - 1, round(share * (len(_BARS) - 1))))]


def _head(diff: Diff, room: int) -> Iterator[Line]:
    """A line about each run, and one about the comparison."""
    comparison, counts = diff.comparison, diff.comparison.op_counts
    for at, (name, side) in enumerate((("a", comparison.a), ("b", comparison.b))):
        data = side.data
        floating: dict[str, int] = {}
        for meta, count in zip(*np.unique(data.values.meta, return_counts=True), strict=True):
            dtype = data.metas[meta].dtype
            if "float" in dtype:
                floating[dtype] = floating.get(dtype, 0) + int(count)
        frequent = sorted(floating, key=lambda each: -floating[each])[:3]
        parts = [
            ", ".join(map(dtype_name, frequent)),
            ", ".join(sorted({meta.device for meta in data.metas})),
        ]
        calls = side.span.end_call - side.span.first_call
        ops = f"{_count(counts[at], 'op')}, " if counts else ""
        parts.append(f"{ops}{_count(calls, 'module call')}")
        title = cut(str(data.info.get("name") or ""), room // 2)
        yield fact_line(name, (title, "title"), ("  " + " · ".join(part for part in parts if part), "dim"))
    paired = sum(other >= 0 for other in comparison.alignment.ops_a)
    calls = int((comparison.alignment.calls.of_a >= 0).sum())
    by = " · by " + " and ".join(comparison.compared_by) if comparison.compared_by else ""
    pairs = f"{paired:,} of {_count(counts[0], 'op')} with {paired:,} of {counts[1]:,} · " if counts else ""
    yield fact_line("compared", (f"{pairs}{_count(calls, 'module call')}{by}", "dim"))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _answer(diff: Diff, room: int) -> Iterator[Line]:
    """The verdict, and both sides of the first divergence."""
    text, style = _VERDICTS[diff.verdict]
    divergence = diff.divergence
    if diff.comparison.different_models:
        yield fact_line("verdict", (diff.comparison.different_models, "warn"))
        return
    if divergence is None:
        worst = diff.comparison.largest_error
        more = f"; the largest error is {error_text(worst)}" if diff.verdict == "close" and worst > 0 else ""
        more = f": {diff.comparison.outcome_text}" if diff.comparison.outcome_text else more
        yield fact_line("verdict", (text + more, style))
        if diff.parting is not None and (diff.verdict == "unknown" or _are_ranks(diff)):
            yield fact_line("ops part", diff.parting.text)
        return
    yield fact_line("verdict", (f"{text}: ", style), divergence.text)
    yield line()
    yield from _sides(diff, divergence, room)
    if diff.parting is not None and _are_ranks(diff):
        yield fact_line("ops part", diff.parting.text)
    others = diff.divergences[1:]
    for at, other in enumerate(others[:_MAX_OTHERS]):
        yield fact_line("" if at else "also", (other.text, "dim"))
    left = len(others) - _MAX_OTHERS + diff.comparison.more
    if left > 0:
        yield fact_line("", (f"… and {left} more places that are no consequence of these", "dim"))


def _are_ranks(diff: Diff) -> bool:
    """Whether both recordings are of processes of one job, whose ops may part without a divergence."""
    return all("rank" in trace.info for trace in (diff.a, diff.b))


def _sides(diff: Diff, divergence: Divergence, room: int) -> Iterator[Line]:
    """The op of the divergence on each side with its source line, the error and the statistics of both."""
    for name, label in (("a", divergence.reason.a), ("b", divergence.reason.b)):
        if label is None:
            yield fact_line(name, ("nothing", "dim"))
            continue
        position = "" if label.op < 0 else label.position or "(no source)"
        position = f"{cut_end(position, room // 2 - MARGIN)}  " if position else ""
        yield fact_line(name, (position, "dim"), (f"{label.module}  " if label.module else "", "module"))
        if label.code:
            yield line(" " * MARGIN, (cut(label.code, room - MARGIN), "code"))
    values = (diff.comparison.a, divergence.value_a), (diff.comparison.b, divergence.value_b)
    texts = dict.fromkeys(str(side.index.values[value]) for side, value in values)
    text = f"{error_text(divergence.verdict.error)} in {' | '.join(texts)}"
    numbers = [each for each in (side.numbers(value) for side, value in values) if each is not None]
    ranges = [
        f"{number_text(each.min)} … {number_text(each.max)}, mean {number_text(each.mean)}"
        for each in numbers
    ]
    yield fact_line("error", f"{text}: {' | '.join(ranges)}" if len(ranges) == 2 else text)


def _growth(diff: Diff, room: int) -> Iterator[Block]:
    """The error of the modules that end after the divergence, evenly sampled."""
    divergence, side = diff.divergence, diff.comparison.a
    if divergence is None or diff.comparison.different_models:
        return
    producer, ends = side.producer[divergence.value_a], side.data.calls.end_op
    rows = [
        row
        for row in diff.modules
        if ends[row.call_a] > producer
        and (row.state is State.DIFFERENT or (row.state is not State.UNKNOWN and row.error > 0))
    ]
    if len(rows) < 2:
        return
    shown = rows[:: max(1, math.ceil(len(rows) / _GROWTH_ROWS))]
    if shown[-1] is not rows[-1]:
        shown.append(rows[-1])
    yield line()
    yield grid(
        (Column("the error from there on"), Column("error", right=True), Column("")),
        [(Span(cut_end(row.name, room - 24), "module"), error_text(row.error), (bar(row.error), "number"))
         for row in shown],
    )  # fmt: skip


def _facts(diff: Diff) -> Iterator[Block]:
    """The weights, differences without effect, and notes."""
    yield line()
    parameters = diff.parameters
    yield fact_line("weights", (parameters.text, "" if parameters.same else "warn"))
    for pair in parameters.of("different")[:_MAX_OTHERS]:
        yield line(" " * MARGIN, f"{pair} differs by {error_text(pair.error)}")
    for name in parameters.untied[:_MAX_OTHERS]:
        yield line(" " * MARGIN, f"{name}: tied on one side only")
    for at, text in enumerate(diff.comparison.harmless):
        yield fact_line("" if at else "besides", (text, "dim"))
    for at, text in enumerate(each for each in diff.notes if each != diff.comparison.different_models):
        yield fact_line("" if at else "note", (text, "warn"))


_STATES: Final = {
    State.UNKNOWN: ("not measured", "dim"),
    State.SAME: ("same", "dim"),
    State.CLOSE: ("close", ""),
    State.DIFFERENT: ("different", "error"),
}


def modules_view(diff: Diff) -> View:
    """The table of a comparison, a row for each pair of calls in the order they ended."""
    modules = diff.modules
    divergence = diff.divergence
    first = None if divergence is None or divergence.reason.a is None else divergence.reason.a.module

    def fit(room: int) -> list[Block]:
        if not modules:
            return [line("(no module calls to compare)")]
        rows: list[list[Span | str]] = []
        for each in modules:
            text, style = _STATES[each.state]
            kind = each.type_a if each.type_a == each.type_b else f"{each.type_a} | {each.type_b}"
            name = cut_end(each.name, min(room, WIDTH) * 45 // 100)
            error = error_text(each.error) if each.state is not State.UNKNOWN else ""
            mark = " ← first" if each.a == first and each.state is not State.SAME else ""
            rows.append([Span(name, "module"), Span(cut_end(kind, min(room, WIDTH) // 4), "dim"),
                         Span(text, style), error, Span(f"{bar(each.error)}{mark}", "number")])  # fmt: skip
        titles = (
            Column("module"), Column("class"), Column("result"), Column("error", right=True), Column(""),
        )  # fmt: skip
        plot = "".join(bar(each.error) for each in modules if each.state is not State.UNKNOWN)
        return [grid(titles, rows), line(), line(("along the depth  ", "dim"), (plot[: room - 17], "number"))]

    return View(tuple(fit(WIDTH)), fit=fit)


_AROUND: Final = 12  #: rows shown before and after the divergence
_SIGNS: Final = {State.UNKNOWN: " ", State.SAME: "=", State.CLOSE: "≈", State.DIFFERENT: "≠"}


@dataclass(frozen=True)
class _Row:
    """A source line of one or both sides, for all ops that ran on it."""

    a: OpLabel | None
    b: OpLabel | None
    state: State
    error: float
    first: bool = False


def source_view(diff: Diff, *, everything: bool = False) -> View:
    """The lines of both runs in order, with ``=``, ``≈`` or ``≠`` between them."""
    rows = _rows(diff)
    at = next((number for number, row in enumerate(rows) if row.first), 0)
    shown = rows if everything else rows[max(0, at - _AROUND) : at + _AROUND]

    def fit(room: int) -> list[Block]:
        room = min(room, WIDTH)
        if not shown:
            return [line("(no lines to compare)")]
        lines: list[Block] = []
        modules = ""
        for row in shown:
            labels = (label.module for label in (row.a, row.b) if label is not None)
            names = " | ".join(dict.fromkeys(labels))
            if names != modules:
                lines.append(line((cut(names or "(outside every module)", room), "module")))
                modules = names
            lines.append(_row_line(row, (room - 17) // 2))
        left = len(rows) - len(shown)
        hint = Hint("d.source(all=True)", "--view source --all")
        more = [line((f"{left} more lines: {hint}", "dim"))] if left else []
        return [*lines, *more]

    return View(tuple(fit(WIDTH)), fit=fit)


def _row_line(row: _Row, half: int) -> Line:
    """The source lines of both sides, each in ``half`` the columns, and between them how they compare."""
    left, right = (
        "" if label is None else f"{f'{label.line:>4} ' if label.line else ''}{label.code or label.name}"
        for label in (row.a, row.b)
    )
    left = cut(left, half)
    sign = _SIGNS[row.state] if row.a and row.b else "<" if row.a else ">"
    style = "error" if row.first or row.state is State.DIFFERENT else "dim"
    error = f" {error_text(row.error)}" if row.state is State.DIFFERENT else ""
    return line(
        "  ", (left + " " * (half - width(left)), "code"), (f" {sign} ", style),
        (cut(right, half), "code"), (f"{error}{' ←' if row.first else ''}", style),
    )  # fmt: skip


def _rows(diff: Diff) -> list[_Row]:
    """Pairs of ops and unpaired ops in the order of the run, those of one line in one row."""

    def key(row: _Row) -> tuple[object, ...]:
        return tuple((label.file, label.line, label.module) if label else None for label in (row.a, row.b))

    a, b = diff.comparison.a, diff.comparison.b
    rows: list[_Row] = []
    for x, y, verdict, first in diff.comparison.aligned_ops():
        state, error = (verdict.state, verdict.error) if verdict is not None else (State.UNKNOWN, 0.0)
        row = _Row(a.op_label(x) if x >= 0 else None, b.op_label(y) if y >= 0 else None, state, error, first)
        if rows and key(rows[-1]) == key(row):
            last = rows.pop()
            state = max(last.state, row.state)
            error = max(last.error, row.error) if state is State.DIFFERENT else row.error
            row = _Row(last.a, last.b, state, error, last.first or row.first)
        rows.append(row)
    return rows
