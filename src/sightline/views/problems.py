"""``t.problems()``: what looks wrong in a run, the most serious first, each with its line and module."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from sightline.analysis.problems import (
    KINDS,
    Confidence,
    Problem,
    Severity,
    find,
    gap_texts,
    kinds_text,
)
from sightline.analysis.select import matching_modules
from sightline.argument_checks import argument_text
from sightline.data.index import Index
from sightline.errors import UsageError
from sightline.hints import Hint
from sightline.patterns import did_you_mean
from sightline.views.rendering import WIDTH, Block, Line, Span, View, cut, line, printable

if TYPE_CHECKING:
    from sightline.api import Trace

_HANG: Final = 10  #: indentation of the lines a header is wrapped to
MARGIN: Final = 9  #: the longest severity, and two spaces
#: How sure a check is.
SURE: Final = {
    Confidence.CERTAIN: "",
    Confidence.LIKELY: "Likely a mistake. ",
    Confidence.GUESS: "Perhaps a mistake. ",
}
SEVERITY_STYLES: Final = {Severity.ERROR: "error", Severity.WARNING: "warn", Severity.NOTE: "number"}


def problems(trace: Trace, module: str | None = None, kind: str | None = None) -> View:
    """What looks wrong; ``module`` and ``kind`` select."""
    found = find(trace.index)
    if module is not None:
        paths = matching_paths(trace.index, module)
        found = [each for each in found if not paths.isdisjoint(each.modules)]
    scope = " of a recording that was not finished" if trace.data.info.get("unfinished") else ""
    return problem_list(trace, found, module, kind, (), f"{len(trace.ops):,} ops", scope)


def problem_list(
    trace: Trace, found: Sequence[Problem], module: str | None, kind: str | None, more_kinds: Sequence[str],
    where: str, scope: str = "",
) -> View:  # fmt: skip
    """Problems that were found in ``where``, those of a kind; ``trace`` says what could not be looked for."""
    kinds = (*KINDS, *more_kinds)
    if kind is not None and kind not in kinds:
        raise UsageError(
            f"{Hint.option('kind', kind)} is none of the {len(kinds)} kinds of problems"
            f"{did_you_mean(kind, kinds)}"
        )
    selected = [each for each in found if kind in (None, each.kind)]
    head = _head(selected, where, module, kind, scope)
    unchecked = [] if kind is not None else gap_texts(trace.index)

    def fit(room: int) -> list[Block]:
        room = min(room, WIDTH)
        blocks: list[Block] = [head]
        for each in selected:
            blocks += [line(), *problem_lines(each, room)]
        if not selected and kind is None and module is None and len(trace.ops):
            blocks += _dim_lines(
                f"looked for {kinds_text()}{', and what differs between ranks' * bool(more_kinds)}", room
            )
        gap = [line()] if selected and unchecked else []
        return [*blocks, *gap, *(each for text in unchecked for each in _dim_lines(text, room))]

    return View(tuple(fit(WIDTH)), fit=fit)


def matching_paths(index: Index, pattern: str) -> set[str]:
    """The paths of the modules that match a pattern."""
    if not isinstance(pattern, str):
        raise UsageError(f"module={argument_text(pattern)} must be a string.")
    matched = matching_modules(index, pattern)
    return {info.path for info, matches in zip(index.raw.modules, matched, strict=True) if matches}


def _head(selected: list[Problem], where: str, module: str | None, kind: str | None, scope: str) -> Line:
    filters = [
        f"{Hint.option(name, text)}"
        for name, text in (("module", module), ("kind", kind))
        if text is not None
    ]
    scope = (f" with {', '.join(filters)}" if filters else "") + scope
    if not selected:
        none = cut(f" found in {where}{scope}", WIDTH - 14)
        return line(("problems: ", "dim"), ("none", "title"), none, hang=_HANG)
    counts = ", ".join(text for _, text in severity_counts(selected))
    rest = cut(f" in {where}{scope}", WIDTH - 10 - len(counts))
    return line(("problems: ", "dim"), (counts, "title"), rest, hang=_HANG)


def severity_counts(selected: list[Problem]) -> list[tuple[Severity, str]]:
    """``2 errors``, ``1 warning``: how many problems of each severity there are, the worst first."""
    counts = [
        (severity, sum(each.severity is severity for each in selected)) for severity in sorted(Severity)[::-1]
    ]
    return [(each, f"{count} {each.word}{'s' * (count > 1)}") for each, count in counts if count]


def problem_lines(problem: Problem, room: int) -> Iterator[Line]:
    """A problem: what, where, why."""
    severity = severity_span(problem)
    title, *rest = _wrapped(problem.title, room)
    yield line(severity, (title, "title"))
    yield from (indented(Span(text, "title")) for text in rest)
    times = f"  {problem.times}" if problem.times else ""
    if problem.place or times:
        yield indented(Span(cut(problem.place, room - MARGIN - len(times)), "op"), Span(times, "number"))
    if problem.called:
        yield indented(Span(cut(f"called at {problem.called}", room - MARGIN), "op"))
    for row in problem.detail.splitlines():
        yield from (indented(Span(text)) for text in wrap_text(row, room - MARGIN, "  "))
    if problem.module:
        yield from (indented(Span(text, "module")) for text in _wrapped(f"in {problem.module}", room))
    for text in _wrapped(f"{SURE[problem.confidence]}{problem.why} [{problem.kind}]", room):
        yield indented(Span(text, "dim"))


def severity_span(problem: Problem) -> Span:
    """The severity of a problem, before its title."""
    return Span(f"{problem.severity.word:<{MARGIN}}", SEVERITY_STYLES[problem.severity])


def indented(*spans: Span) -> Line:
    """A line below the title of a problem."""
    return line(" " * MARGIN, *spans)


def wrap_text(text: str, room: int, indent: str = "") -> list[str]:
    """The lines of a text in ``room`` columns; ``indent`` begins all but the first."""
    return textwrap.wrap(printable(text), room, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _dim_lines(text: str, room: int) -> list[Line]:
    return [line((row, "dim")) for row in wrap_text(text, room, "  ")]


def _wrapped(text: str, room: int) -> list[str]:
    return wrap_text(text, room - MARGIN)
