"""``t.problems()``: what looks wrong in a run, the most serious first, each with its line and module."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from sightline.analysis.problems import (
    KINDS,
    Confidence,
    Problem,
    Severity,
    find,
    looked_for,
    not_looked_at,
)
from sightline.argument_checks import argument_text
from sightline.errors import UsageError
from sightline.patterns import choices_text, module_matches, no_module_matched
from sightline.trace.data import ModuleInfo
from sightline.views.outline import Block, Line, Span, View, cut, line, printable

if TYPE_CHECKING:
    from sightline.api import Trace

_WIDTH: Final = 100
_HANG: Final = 10  #: what goes on stands below what is found
_MARGIN: Final = 9  #: the longest word for a severity, and two spaces
#: What is said of a problem that may be none.
SURE: Final = {Confidence.LIKELY: "likely", Confidence.GUESS: "a guess"}
_STYLES: Final = {Severity.ERROR: "error", Severity.WARNING: "warn", Severity.NOTE: "number"}


def problems(trace: Trace, module: str | None = None, kind: str | None = None) -> View:
    """What looks wrong; ``module`` and ``kind`` choose some of it."""
    found = [each for each in find(trace.index) if kind in (None, each.kind)]
    if kind is not None and kind not in KINDS:
        near = get_close_matches(kind, KINDS, 5, 0.0)
        raise UsageError(
            f"kind={kind!r} is no kind of problem; of the {len(KINDS)} there are these are nearest: "
            f"{choices_text(near)}."
        )
    if module is not None:
        meant = _meant(trace.data.modules, module)
        found = [each for each in found if not meant.isdisjoint(each.modules)]
    head = _head(found, len(trace.ops), module, kind, unfinished=bool(trace.data.info.get("unfinished")))
    unseen = [] if kind is not None else not_looked_at(trace.index)

    def made(room: int) -> list[Block]:
        room = min(room, _WIDTH)
        blocks: list[Block] = [head]
        for each in found:
            blocks += [line(), *_block(each, room)]
        if not found and kind is None and module is None and len(trace.ops):
            blocks += (line((text, "dim")) for text in _lines(f"looked for {looked_for()}", room))
        apart = [line()] if found and unseen else []
        return [*blocks, *apart, *(line((text, "dim")) for told in unseen for text in _lines(told, room))]

    return View(tuple(made(_WIDTH)), fit=made)


def _meant(modules: list[ModuleInfo], pattern: str) -> set[str]:
    """The paths of the modules that a pattern means."""
    if not isinstance(pattern, str):
        raise UsageError(f"module={argument_text(pattern)} must be a string.")
    found = {info.path for info in modules if module_matches(pattern, info)}
    if not found:
        raise no_module_matched(pattern, modules)
    return found


def _head(found: list[Problem], ops: int, module: str | None, kind: str | None, *, unfinished: bool) -> Line:
    asked = [f"{name}={text!r}" for name, text in (("module", module), ("kind", kind)) if text is not None]
    scope = f" with {', '.join(asked)}" if asked else ""
    scope += " of a recording that was not finished" if unfinished else ""
    if not found:
        none = cut(f" found in {ops:,} ops{scope}", _WIDTH - 14)
        return line(("problems: ", "dim"), ("none", "title"), none, hang=_HANG)
    counts = [
        (severity, sum(each.severity is severity for each in found)) for severity in sorted(Severity)[::-1]
    ]
    told = ", ".join(f"{count} {each.word}{'s' * (count > 1)}" for each, count in counts if count)
    where = cut(f" in {ops:,} ops{scope}", _WIDTH - 10 - len(told))
    return line(("problems: ", "dim"), (told, "title"), where, hang=_HANG)


def _block(problem: Problem, room: int) -> Iterator[Line]:
    """A problem: what, where, why."""
    word = Span(f"{problem.severity.word:<{_MARGIN}}", _STYLES[problem.severity])
    title, *rest = _wrapped(problem.title, room)
    yield line(word, (title, "title"))
    yield from (_below(Span(text, "title")) for text in rest)
    times = f"  ×{problem.count:,}" if problem.count > 1 else ""
    if problem.place or times:
        yield _below(Span(cut(problem.place, room - _MARGIN - len(times)), "op"), Span(times, "number"))
    if problem.called:
        yield _below(Span(cut(f"called at {problem.called}", room - _MARGIN), "op"))
    yield from (_below(Span(text)) for text in (_wrapped(problem.detail, room) if problem.detail else ()))
    if problem.module:
        yield from (_below(Span(text, "module")) for text in _wrapped(f"in {problem.module}", room))
    sure = "" if problem.confidence is Confidence.CERTAIN else f"({SURE[problem.confidence]}) "
    for text in _wrapped(f"{sure}{problem.why} [{problem.kind}]", room):
        yield _below(Span(text, "dim"))


def _below(*spans: Span) -> Line:
    return line(" " * _MARGIN, *spans)


def _lines(text: str, room: int) -> list[str]:
    return textwrap.wrap(printable(text), room, subsequent_indent="  ", break_on_hyphens=False)


def _wrapped(text: str, room: int) -> list[str]:
    return textwrap.wrap(printable(text), room - _MARGIN, break_on_hyphens=False) or [""]
