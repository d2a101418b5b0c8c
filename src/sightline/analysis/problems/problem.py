"""What a problem is, what a check is, and how repeats of one problem become one entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sightline.analysis.problems.context import ProblemContext


#: The kind that comes before all others: what ended the run.
FIRST: Final = "failure"


class Severity(IntEnum):
    """How bad it is: results are wrong, something does not take part, or time is lost."""

    NOTE = 1
    WARNING = 2
    ERROR = 3

    @property
    def word(self) -> str:
        return self.name.lower()


class Confidence(IntEnum):
    """How sure it is: there is one reading of what was seen, or another is possible, or it is a guess."""

    GUESS = 1
    LIKELY = 2
    CERTAIN = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that looks wrong in a run. Ids are None where there is no op, value or parameter to name."""

    kind: str  #: a slug: ``broadcast``
    severity: Severity
    title: str  #: one sentence with the shapes, ops and names
    why: str  #: one sentence on why it matters, and what to do
    module: str  #: ``layers.0 … layers.11``; the class of a root; empty outside every module
    modules: tuple[str, ...]  #: every module path concerned, in the order of the run
    place: str  #: ``net.py:9 in Net.forward``; empty where no source is known
    op: int | None = None
    value: int | None = None
    parameter: str | None = None
    count: int = 1  #: how often, at the same line in modules of the same class
    confidence: Confidence = Confidence.CERTAIN
    called: str = ""  #: the user's own line, where ``place`` is one of a library
    detail: str = ""  #: what more is known of it: the note of an exception


@dataclass(frozen=True, slots=True)
class Finding:
    """One occurrence of a problem, as a check reports it. -1 is "none", as in the columns."""

    title: str
    module: int = -1
    frame: int = -1
    op: int = -1
    value: int = -1
    parameter: str = ""
    place: str = ""  #: where no frame is known
    called: str = ""
    detail: str = ""
    confidence: Confidence | None = None  #: where it is not that of its check


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of problem: how it is found, how serious it is and why it matters."""

    kind: str
    severity: Severity
    why: str
    find: Callable[[ProblemContext], Iterator[Finding]]
    confidence: Confidence = Confidence.CERTAIN


Finder = Callable[["ProblemContext"], Iterator[Finding]]


def check(
    kind: str, severity: Severity, why: str, confidence: Confidence = Confidence.CERTAIN
) -> Callable[[Finder], Check]:
    """Make a `Check` of the function that finds the occurrences."""
    return lambda find: Check(kind, severity, why, find, confidence)


def merged(context: ProblemContext, found: Iterable[tuple[Check, Finding]]) -> list[Problem]:
    """One problem for all findings of a kind at one line in modules of one class; the most serious first."""
    groups: dict[tuple[str, ...], list[tuple[Check, Finding]]] = {}
    for each, finding in found:
        where = finding.place or context.place(finding.frame)
        key = (each.kind, where, context.module_type(finding.module))
        # Without a line there is nothing that says two findings are one.
        groups.setdefault(key if where else (*key, finding.title), []).append((each, finding))
    ordered = sorted(groups.values(), key=lambda group: _position(context, group))
    made = [_problem(context, group) for group in ordered]
    return sorted(made, key=lambda one: (one.kind != FIRST, -one.severity, -one.confidence))


def _position(context: ProblemContext, group: list[tuple[Check, Finding]]) -> int:
    """Where in the run it first showed; what has no op is told after what has."""
    return min((finding.op for _, finding in group if finding.op >= 0), default=len(context.data.ops))


def _problem(context: ProblemContext, group: list[tuple[Check, Finding]]) -> Problem:
    each, first = group[0]
    modules = tuple(dict.fromkeys(finding.module for _, finding in group if finding.module >= 0))
    labels = [context.module_label(module) for module in modules]
    return Problem(
        kind=each.kind, severity=each.severity, title=first.title, why=each.why,
        module=_label(labels), modules=tuple(context.data.modules[module].path for module in modules),
        place=first.place or context.place(first.frame), op=_known(first.op), value=_known(first.value),
        parameter=first.parameter or None, count=len(group),
        confidence=each.confidence if first.confidence is None else first.confidence,
        called=first.called or ("" if first.place else context.own_place(first.frame)), detail=first.detail,
    )  # fmt: skip


def _label(labels: list[str]) -> str:
    """Several modules by the first and the last of them.

    >>> _label(["layers.0", "layers.1", "layers.2"]), _label(["a", "b"])
    ('layers.0 … layers.2', 'a, b')
    """
    return f"{labels[0]} … {labels[-1]}" if len(labels) > 2 else ", ".join(labels)


def _known(id: int) -> int | None:
    return id if id >= 0 else None
