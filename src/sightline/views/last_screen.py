"""The end of ``sightline run``: what failed or looks wrong, on one screen, and what to type next.

The most serious and most certain comes first. What does not fit is counted: ``show --view problems`` has it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sightline.analysis.problems import Confidence, Problem, Severity, find, looked_for, not_looked_at
from sightline.views.outline import Line, Span, View, cut, line, printable
from sightline.views.problems import SURE

if TYPE_CHECKING:
    from sightline.api import Trace

SCREEN: Final = 25  #: lines, with those that say where the recording is
_WIDTH: Final = 100
_MARGIN: Final = 9
_TITLE: Final = 3  #: lines of a title at most
_ADVICE: Final = 2
_STYLES: Final = {Severity.ERROR: "error", Severity.WARNING: "warn", Severity.NOTE: "number"}


def last_screen(trace: Trace, where: str, room: int = SCREEN) -> View:
    """What looks wrong in at most ``room`` lines; ``where`` is the recording as a command takes it."""
    found = find(trace.index)
    if not found:
        return View(tuple(_nothing(trace)))
    blocks: list[Line] = [_head(found)]
    left = room - 2
    shown = 0
    for each in found:
        lines = list(_block(each))
        rest = 1 if shown + 1 < len(found) else 0
        if len(lines) + rest > left:
            lines = lines[: _shortest(lines)]
        if len(lines) + rest > left:
            break
        blocks += lines
        left -= len(lines)
        shown += 1
    if shown < len(found):
        blocks.append(line((f"and {len(found) - shown} more: sightline show {where} --view problems", "dim")))
    blocks += _unseen(trace, left - 1) if left > 2 else ()
    return View(tuple(blocks))


def next_command(trace: Trace, where: str) -> str:
    """What to type next: the lineage of what is wrong, or the code around it, or all there is."""
    found = find(trace.index)
    if not found:
        return f"sightline show {where}"
    first = found[0]
    if first.kind == "failure":
        return f"sightline show {where} --tail 20"
    if first.kind == "non-finite":
        return f"sightline show {where} --view nonfinite"
    if first.value is not None:
        return f"sightline lineage {where} '${first.value}'"
    return f"sightline show {where} --view problems"


def _nothing(trace: Trace) -> Iterator[Line]:
    ops = f"{len(trace.ops):,} ops"
    yield line(("problems: ", "dim"), ("none", "title"), f" found in {ops}")
    yield from (line((text, "dim")) for text in _wrapped(f"looked for {looked_for()}", _WIDTH, "  "))
    yield from _unseen(trace, 6)


def _unseen(trace: Trace, room: int) -> list[Line]:
    """What could not be looked for, as far as there is room."""
    told = [text for each in not_looked_at(trace.index) for text in _wrapped(each, _WIDTH, "  ")]
    return [line((text, "dim"), hang=2) for text in told[: max(room, 0)]]


def _head(found: list[Problem]) -> Line:
    counts = [(each, sum(one.severity is each for one in found)) for each in sorted(Severity)[::-1]]
    told = ", ".join(f"{count} {each.word}{'s' * (count > 1)}" for each, count in counts if count)
    return line(("problems: ", "dim"), (told, "title"))


def _block(problem: Problem) -> Iterator[Line]:
    """A problem: what, where, what to do."""
    word = Span(f"{problem.severity.word:<{_MARGIN}}", _STYLES[problem.severity])
    kind = f" [{problem.kind}]"
    text = problem.title
    if problem.detail:
        text = f"{cut(text, 110)} — {problem.detail}"
    titles = _wrapped(text + kind, _WIDTH - _MARGIN)
    if len(titles) > _TITLE + bool(problem.detail):
        keep = _TITLE + bool(problem.detail)
        titles = [*titles[: keep - 1], cut(titles[keep - 1], _WIDTH - _MARGIN - len(kind) - 2) + "…" + kind]
    style = "warn" if problem.kind == "unmatched" else "title"  # a text of ours, which names an argument
    yield line(word, (titles[0], style))
    yield from (_below(Span(text, style)) for text in titles[1:])
    times = f" ×{problem.count:,}" if problem.count > 1 else ""
    module = f" ({problem.module})" if problem.module else ""
    called = f", called at {problem.called}" if problem.called else ""
    if problem.place or problem.called:
        where = f"at {problem.place}{module}{times}{called}"
        yield from (_below(Span(text, "op")) for text in _wrapped(where, _WIDTH - _MARGIN)[:2])
    sure = "" if problem.confidence is Confidence.CERTAIN else f"{SURE[problem.confidence]}: "
    for text in _wrapped(f"→ {sure}{problem.why}", _WIDTH - _MARGIN, "  ")[:_ADVICE]:
        yield _below(Span(text, "dim"))


def _shortest(lines: list[Line]) -> int:
    """How many lines of a problem are left without its advice."""
    return sum(not any(span.style == "dim" for span in one.spans) for one in lines)


def _below(*spans: Span) -> Line:
    return line(" " * _MARGIN, *spans)


def _wrapped(text: str, room: int, indent: str = "") -> list[str]:
    return textwrap.wrap(printable(text), room, subsequent_indent=indent, break_on_hyphens=False) or [""]
