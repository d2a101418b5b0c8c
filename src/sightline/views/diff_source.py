"""``d.source()``: both sources side by side, line by line as they ran, each with its ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.diff.places import Place
from sightline.diff.side import Side
from sightline.diff.values import State
from sightline.views.diff import error_text
from sightline.views.outline import Block, Line, Span, View, cut, line, width

if TYPE_CHECKING:
    from sightline.diffs import Diff

_WIDTH: Final = 100
_AROUND: Final = 12  #: rows shown before and after the divergence
_SIGNS: Final = {State.UNKNOWN: " ", State.SAME: "=", State.CLOSE: "≈", State.DIFFERENT: "≠"}


@dataclass(frozen=True)
class _Row:
    """A line of one side, of the other, or of both; the ops that ran on it together."""

    a: Place | None
    b: Place | None
    state: State
    error: float
    first: bool = False


def source_view(diff: Diff, *, everything: bool = False) -> View:
    """The lines of both runs in order, with ``=``, ``≈`` or ``≠`` between them."""
    rows = _rows(diff)
    at = next((place for place, row in enumerate(rows) if row.first), 0)
    shown = rows if everything else rows[max(0, at - _AROUND) : at + _AROUND]

    def made(room: int) -> list[Block]:
        room = min(room, _WIDTH)
        if not shown:
            return [line("(no lines to compare)")]
        half = (room - 17) // 2
        lines: list[Block] = []
        modules = ""
        for row in shown:
            module = _modules(row)
            if module != modules:
                lines.append(line((cut(module or "(outside every module)", room), "module")))
                modules = module
            lines += _lines(row, half)
        left = len(rows) - len(shown)
        more = [line((f"{left} more lines: d.source(everything=True)", "dim"))] if left else []
        return [*lines, *more]

    return View(tuple(made(_WIDTH)), fit=made)


def _modules(row: _Row) -> str:
    names = list(dict.fromkeys(place.module for place in (row.a, row.b) if place is not None))
    return " | ".join(names)


def _lines(row: _Row, half: int) -> list[Line]:
    texts = [_text(place) for place in (row.a, row.b)]
    sign = _SIGNS[row.state] if row.a and row.b else "<" if row.a else ">"
    style = "error" if row.first or row.state is State.DIFFERENT else "dim"
    left = cut(texts[0], half)
    error = f" {error_text(row.error)}" if row.state is State.DIFFERENT else ""
    mark = " ←" if row.first else ""
    return [
        line(
            Span("  "), Span(left + " " * (half - width(left)), "code"), Span(f" {sign} ", style),
            Span(cut(texts[1], half), "code"), Span(f"{error}{mark}", style),
        )
    ]  # fmt: skip


def _text(place: Place | None) -> str:
    if place is None:
        return ""
    number = f"{place.line:>4} " if place.line else ""
    return f"{number}{place.code or place.name}"


def _rows(diff: Diff) -> list[_Row]:
    """Pairs and lone ops in the order of the run, those of one line taken together."""
    found = diff.comparison
    made = found.alignment
    reasons = found._looking.reasons.places
    divergence = diff.divergence
    marked = {place.op for place in (divergence.reason.a,) if place} if divergence else set()
    marked_b = {place.op for place in (divergence.reason.b,) if place} if divergence else set()
    verdicts = {pair.a: pair.verdict for pair in found.pairs}
    rows: list[_Row] = []
    theirs = _computing(found.b)
    at = 0
    for x in _computing(found.a):
        y = made.ops_a[x]
        while y >= 0 and at < len(theirs) and theirs[at] <= y:
            if made.ops_b[theirs[at]] < 0:
                _add(rows, _Row(None, reasons[1].of(theirs[at]), State.UNKNOWN, 0.0, theirs[at] in marked_b))
            at += 1
        verdict = verdicts.get(x)
        first = x in marked or y in marked_b
        state, error = (verdict.state, verdict.error) if verdict is not None else (State.UNKNOWN, 0.0)
        _add(rows, _Row(reasons[0].of(x), reasons[1].of(y) if y >= 0 else None, state, error, first))
    for op in theirs[at:]:
        if made.ops_b[op] < 0:
            _add(rows, _Row(None, reasons[1].of(op), State.UNKNOWN, 0.0, op in marked_b))
    return rows


def _add(rows: list[_Row], row: _Row) -> None:
    """Add a row, or let it join the one before where both are the same lines."""
    if rows and _key(rows[-1]) == _key(row):
        last = rows[-1]
        worse = max(last.state, row.state)
        error = max(last.error, row.error) if worse is State.DIFFERENT else row.error
        rows[-1] = _Row(last.a, last.b, worse, error, last.first or row.first)
    else:
        rows.append(row)


def _key(row: _Row) -> tuple[object, ...]:
    return tuple((place.file, place.line, place.module) if place else None for place in (row.a, row.b))


def _computing(side: Side) -> list[int]:
    chosen: list[int] = np.flatnonzero(side.compared & ~side.layout).tolist()
    return chosen
