"""The end of ``sightline run``: what failed or looks wrong, on one screen, and what to type next.

The most serious and most certain problem comes first. Those that do not fit are counted: ``show --view
problems`` has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sightline.analysis.problems import FIRST, Problem, find, looked_for, not_looked_at
from sightline.views.problems import MARGIN, SURE, indented, severity_counts, severity_span, wrap_text
from sightline.views.rendering import WIDTH, Line, Span, View, cut, line

if TYPE_CHECKING:
    from sightline.api import Trace

SCREEN: Final = 25  #: lines, with those about the recording's file
_MAX_TITLE: Final = 3  #: lines of a title
_MAX_ADVICE: Final = 3  #: lines of advice
_SENTENCE: Final = re.compile(r"(?<=[.;]) ")


def last_screen(trace: Trace, where: str, room: int = SCREEN, *, noted: bool = False) -> View:
    """What looks wrong in at most ``room`` lines; ``where`` is the recording as a command takes it.

    ``noted`` says that the exception which ended the run was printed above, with its note.
    """
    problems = [_without_note(each) if noted else each for each in find(trace.index)]
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


def _without_note(problem: Problem) -> Problem:
    """A failure without what the note of the exception says."""
    if problem.kind != FIRST or not problem.detail:
        return problem
    return replace(problem, detail="", why="The note above says why. Nothing after it was looked at.")


def _no_problems(trace: Trace) -> Iterator[Line]:
    ops = f"{len(trace.ops):,} ops"
    yield line(("problems: ", "dim"), ("none", "title"), f" found in {ops}")
    yield from (line((text, "dim")) for text in wrap_text(f"looked for {looked_for()}", WIDTH, "  "))
    yield from _unchecked(trace, 6)


def _unchecked(trace: Trace, room: int) -> list[Line]:
    """What could not be checked, in at most ``room`` lines."""
    texts = [text for each in not_looked_at(trace.index) for text in wrap_text(each, WIDTH, "  ")]
    return [line((text, "dim"), hang=2) for text in texts[: max(room, 0)]]


def _block(problem: Problem) -> Iterator[Line]:
    """A problem: what, where, what to do."""
    kind = f" [{problem.kind}]"
    text = problem.title
    if problem.detail:
        text = f"{cut(text, 110)} — {problem.detail}"
    titles = wrap_text(text + kind, WIDTH - MARGIN)
    limit = _MAX_TITLE + bool(problem.detail)
    if len(titles) > limit:
        titles = [*titles[: limit - 1], cut(titles[limit - 1], WIDTH - MARGIN - len(kind) - 2) + "…" + kind]
    style = "warn" if problem.kind == "unmatched" else "title"
    yield line(severity_span(problem), (titles[0], style))
    yield from (indented(Span(text, style)) for text in titles[1:])
    times = problem.times and f"{' ' if problem.times.startswith('×') else ', '}{problem.times}"
    module = f" ({problem.module})" if problem.module else ""
    called = f", called at {problem.called}" if problem.called else ""
    if problem.place or problem.called:
        where = f"at {problem.place}{module}{times}{called}"
        yield from (indented(Span(text, "op")) for text in wrap_text(where, WIDTH - MARGIN)[:2])
    advice = f"→ {SURE[problem.confidence]}{problem.why}"
    yield from (indented(Span(text, "dim")) for text in _advice_lines(advice))


def _advice_lines(text: str) -> list[str]:
    """Advice in a few lines, of whole sentences."""
    lines = wrap_text(text, WIDTH - MARGIN, "  ")
    while len(lines) > _MAX_ADVICE and len(sentences := _SENTENCE.split(text)) > 1:
        text = " ".join(sentences[:-1]).rstrip(";")
        lines = wrap_text(text, WIDTH - MARGIN, "  ")
    return lines[:_MAX_ADVICE]


def _without_advice(lines: list[Line]) -> int:
    """How many lines a problem has without its advice."""
    return sum(not any(span.style == "dim" for span in one.spans) for one in lines)
