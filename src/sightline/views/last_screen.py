"""The end of ``sightline run``: what failed or looks wrong, on one screen, and what to type next.

The most serious and most certain problem comes first. Those that do not fit are counted: ``show --view
problems`` has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sightline.analysis.problems import Confidence, Problem, find, looked_for, not_looked_at
from sightline.views.outline import Line, Span, View, cut, line
from sightline.views.problems import MARGIN, SURE, indented, severity_counts, severity_span, wrap_text

if TYPE_CHECKING:
    from sightline.api import Trace

SCREEN: Final = 25  #: lines, with those about the recording's file
_WIDTH: Final = 100
_MAX_TITLE: Final = 3  #: lines of a title
_MAX_ADVICE: Final = 2


def last_screen(trace: Trace, where: str, room: int = SCREEN) -> View:
    """What looks wrong in at most ``room`` lines; ``where`` is the recording as a command takes it."""
    problems = find(trace.index)
    if not problems:
        return View(tuple(_no_problems(trace)))
    counts = ", ".join(text for _, text in severity_counts(problems))
    blocks: list[Line] = [line(("problems: ", "dim"), (counts, "title"))]
    left = room - 2
    shown = 0
    for each in problems:
        lines = list(_block(each))
        rest = 1 if shown + 1 < len(problems) else 0
        if len(lines) + rest > left:
            lines = lines[: _without_advice(lines)]
        if len(lines) + rest > left:
            break
        blocks += lines
        left -= len(lines)
        shown += 1
    if shown < len(problems):
        blocks.append(
            line((f"and {len(problems) - shown} more: sightline show {where} --view problems", "dim"))
        )
    blocks += _unchecked(trace, left - 1) if left > 2 else ()
    return View(tuple(blocks))


def next_command(trace: Trace, where: str) -> str:
    """The command to type next: for the lineage of what is wrong, the code around it, or everything."""
    problems = find(trace.index)
    if not problems:
        return f"sightline show {where}"
    first = problems[0]
    if first.kind == "failure":
        return f"sightline show {where} --tail 20"
    if first.kind == "non-finite":
        return f"sightline show {where} --view nonfinite"
    if first.value is not None:
        return f"sightline lineage {where} '${first.value}'"
    return f"sightline show {where} --view problems"


def _no_problems(trace: Trace) -> Iterator[Line]:
    ops = f"{len(trace.ops):,} ops"
    yield line(("problems: ", "dim"), ("none", "title"), f" found in {ops}")
    yield from (line((text, "dim")) for text in wrap_text(f"looked for {looked_for()}", _WIDTH, "  "))
    yield from _unchecked(trace, 6)


def _unchecked(trace: Trace, room: int) -> list[Line]:
    """What could not be checked, in at most ``room`` lines."""
    texts = [text for each in not_looked_at(trace.index) for text in wrap_text(each, _WIDTH, "  ")]
    return [line((text, "dim"), hang=2) for text in texts[: max(room, 0)]]


def _block(problem: Problem) -> Iterator[Line]:
    """A problem: what, where, what to do."""
    kind = f" [{problem.kind}]"
    text = problem.title
    if problem.detail:
        text = f"{cut(text, 110)} — {problem.detail}"
    titles = wrap_text(text + kind, _WIDTH - MARGIN)
    limit = _MAX_TITLE + bool(problem.detail)
    if len(titles) > limit:
        titles = [*titles[: limit - 1], cut(titles[limit - 1], _WIDTH - MARGIN - len(kind) - 2) + "…" + kind]
    style = "warn" if problem.kind == "unmatched" else "title"
    yield line(severity_span(problem), (titles[0], style))
    yield from (indented(Span(text, style)) for text in titles[1:])
    times = f" ×{problem.count:,}" if problem.count > 1 else ""
    module = f" ({problem.module})" if problem.module else ""
    called = f", called at {problem.called}" if problem.called else ""
    if problem.place or problem.called:
        where = f"at {problem.place}{module}{times}{called}"
        yield from (indented(Span(text, "op")) for text in wrap_text(where, _WIDTH - MARGIN)[:2])
    sure = "" if problem.confidence is Confidence.CERTAIN else f"{SURE[problem.confidence]}: "
    for text in wrap_text(f"→ {sure}{problem.why}", _WIDTH - MARGIN, "  ")[:_MAX_ADVICE]:
        yield indented(Span(text, "dim"))


def _without_advice(lines: list[Line]) -> int:
    """How many lines a problem has without its advice."""
    return sum(not any(span.style == "dim" for span in one.spans) for one in lines)
