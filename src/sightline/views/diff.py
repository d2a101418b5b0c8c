"""The verdict of a `Diff` on one screen: whether two runs part, where and why, and how the error grows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sightline.diff.module_errors import ModuleRow
from sightline.diff.places import Place
from sightline.diff.side import Side
from sightline.diff.values import State
from sightline.notation import dtype_name, number_text
from sightline.views.fitting import fitted
from sightline.views.outline import Block, Column, Line, Span, View, cut, cut_end, grid, line

if TYPE_CHECKING:
    from sightline.diff.divergence import Divergence
    from sightline.diffs import Diff
    from sightline.trace.data import TraceData

_MARGIN: Final = 11
_WIDTH: Final = 100
_GROWS: Final = 8  #: rows about how the error grows
_OTHERS: Final = 3  #: further divergences that are shown
_BARS: Final = "▁▂▃▄▅▆▇█"
_LEAST_EXPONENT: Final = -8.0  #: an error of this power of ten is the lowest bar

_VERDICTS: Final = {
    "same": ("the same, to the last bit", "title"),
    "close": ("equal up to rounding", "title"),
    "different": ("they part", "error"),
    "unknown": ("no values could be compared", "warn"),
}


def verdict_view(diff: Diff) -> View:
    """One screen about two runs."""

    def made(room: int) -> list[Block]:
        room = min(room, _WIDTH)
        return [*_head(diff, room), line(), *_answer(diff, room), *_growth(diff, room), *_facts(diff)]

    return View(tuple(fitted(made(_WIDTH), _WIDTH)), fit=made)


def error_text(error: float) -> str:
    """An error in two digits; a word where it is no number."""
    if math.isnan(error):
        return "?"
    return "sizes differ" if math.isinf(error) else f"{error:.1e}"


def bar(error: float) -> str:
    """An error as a sign, by its power of ten.

    >>> [bar(error) for error in (0.0, 1e-8, 1e-4, 1.0)]
    [' ', '▁', '▅', '█']
    """
    if not error > 0:
        return " "
    share = 1.0 if math.isinf(error) else (math.log10(error) - _LEAST_EXPONENT) / -_LEAST_EXPONENT
    return _BARS[max(0, min(len(_BARS) - 1, round(share * (len(_BARS) - 1))))]


def _head(diff: Diff, room: int) -> Iterator[Line]:
    for name, side in (("a", diff.comparison.a), ("b", diff.comparison.b)):
        data = side.data
        told = [", ".join(_dtypes(side)), ", ".join(sorted({meta.device for meta in data.metas}))]
        told.append(f"{int(side.compared.sum()):,} ops, {len(data.calls):,} module calls")
        title = cut(str(data.info.get("name") or ""), room // 2)
        yield _fact(name, (title, "title"), ("  " + " · ".join(part for part in told if part), "dim"))
    yield _fact("compared", (_compared(diff), "dim"))


def _dtypes(side: Side) -> list[str]:
    """The floating dtypes of a run, the most frequent first."""
    data: TraceData = side.data
    counts: dict[str, int] = {}
    for meta, count in zip(*_unique(data), strict=True):
        dtype = data.metas[meta].dtype
        if "float" in dtype:
            counts[dtype] = counts.get(dtype, 0) + count
    return [dtype_name(dtype) for dtype in sorted(counts, key=lambda each: -counts[each])][:3]


def _unique(data: TraceData) -> tuple[list[int], list[int]]:
    import numpy as np

    metas, counts = np.unique(data.values.meta, return_counts=True)
    return metas.tolist(), counts.tolist()


def _compared(diff: Diff) -> str:
    found = diff.comparison
    ops = [int(side.compared.sum()) for side in (found.a, found.b)]
    paired = sum(other >= 0 for other in found.alignment.ops_a)
    calls = int((found.alignment.calls.of_a >= 0).sum())
    by = " · by " + " and ".join(found.compared_by) if found.compared_by else ""
    return f"{paired:,} of {ops[0]:,} ops with {paired:,} of {ops[1]:,} · {calls:,} module calls{by}"


def _answer(diff: Diff, room: int) -> Iterator[Line]:
    text, style = _VERDICTS[diff.verdict]
    divergence = diff.divergence
    if divergence is None:
        worst = max((pair.verdict.error for pair in diff.pairs if pair.verdict.agrees), default=0.0)
        more = f"; the largest error is {error_text(worst)}" if diff.verdict == "close" and worst > 0 else ""
        yield _fact("verdict", (text + more, style))
        if diff.verdict == "unknown" and diff.parting is not None:
            yield _fact("ops part", (diff.parting.text, ""))
        return
    yield _fact("verdict", (f"{text}: ", style), (divergence.text, ""))
    yield line()
    yield from _sides(divergence, room)
    yield _fact("error", (_error_line(diff, divergence), ""))
    others = diff.divergences[1:]
    for at, other in enumerate(others[:_OTHERS]):
        yield _fact("" if at else "also", (other.text, "dim"))
    left = len(others) - _OTHERS + diff.comparison.more
    if left > 0:
        yield _fact("", (f"… and {left} more places that are no consequence of these", "dim"))


def _sides(divergence: Divergence, room: int) -> Iterator[Line]:
    for name, place in (("a", divergence.reason.a), ("b", divergence.reason.b)):
        if place is None:
            yield _fact(name, ("nothing", "dim"))
            continue
        where = cut_end(place.position or "(no source)", room // 2 - _MARGIN)
        yield _fact(name, (f"{where}  ", "dim"), (_module(place), "module"))
        if place.code:
            yield line(" " * _MARGIN, (cut(place.code, room - _MARGIN), "code"))


def _module(place: Place) -> str:
    return f"{place.module}  " if place.module else ""


def _error_line(diff: Diff, divergence: Divergence) -> str:
    a, b = diff.comparison.a, diff.comparison.b
    one, other = a.numbers(divergence.value_a), b.numbers(divergence.value_b)
    texts = [
        str(side.index.values[value]) for side, value in ((a, divergence.value_a), (b, divergence.value_b))
    ]
    shown = texts[0] if texts[0] == texts[1] else f"{texts[0]} | {texts[1]}"
    text = f"{error_text(divergence.verdict.error)} in {shown}"
    if one is not None and other is not None:
        text += (
            f": {number_text(one.min)} … {number_text(one.max)}, mean {number_text(one.mean)}"
            f" | {number_text(other.min)} … {number_text(other.max)}, mean {number_text(other.mean)}"
        )
    return text


def _growth(diff: Diff, room: int) -> Iterator[Block]:
    """The error of the modules that end after the divergence, some of them, evenly."""
    divergence = diff.divergence
    if divergence is None:
        return
    rows = growing(diff)
    if len(rows) < 2:
        return
    step = max(1, math.ceil(len(rows) / _GROWS))
    shown = rows[::step]
    if shown[-1] is not rows[-1]:
        shown.append(rows[-1])
    yield line()
    yield grid(
        (Column("the error from there on"), Column("error", right=True), Column("")),
        [(Span(cut_end(row.name, room - 24), "module"), error_text(row.error), (bar(row.error), "number"))
         for row in shown],
    )  # fmt: skip


def growing(diff: Diff) -> list[ModuleRow]:
    """The calls that end at or after the divergence, the outermost where they lie in each other."""
    divergence = diff.divergence
    found = diff.comparison
    maker = found.a.producer[divergence.value_a] if divergence is not None else -1
    ends = found.a.data.calls.end_op
    rows = [row for row in diff.modules if ends[row.call_a] > maker and row.state is not State.UNKNOWN]
    return [row for row in rows if row.state is State.DIFFERENT or row.error > 0]


def _facts(diff: Diff) -> Iterator[Block]:
    yield line()
    parameters = diff.parameters
    yield _fact("weights", (parameters.text, "" if parameters.same else "warn"))
    for pair in parameters.of("different")[:_OTHERS]:
        yield line(" " * _MARGIN, (f"{pair} differs by {error_text(pair.error)}", ""))
    for name in parameters.untied[:_OTHERS]:
        yield line(" " * _MARGIN, (f"{name}: tied on one side only", ""))
    for at, text in enumerate(diff.comparison.harmless):
        yield _fact("" if at else "besides", (text, "dim"))
    for at, text in enumerate(diff.notes):
        yield _fact("" if at else "note", (text, "warn"))


def _fact(title: str, *parts: tuple[str, str]) -> Line:
    return line((f"{title:<{_MARGIN}}", "dim"), *parts, hang=_MARGIN)
