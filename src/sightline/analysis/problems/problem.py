"""Problems, the checks that find them, and how repeats of one problem become one entry."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from sightline.data.training_steps import innermost_steps

if TYPE_CHECKING:
    from sightline.analysis.problems.context import ProblemContext


_NAMED: Final = 3  #: how many names a title lists
_LISTED: Final = 2  #: how many modules a problem lists
#: The kind that is listed before all others: the failure that ended the run.
FIRST: Final = "failure"
#: The kind of the warnings that Python has shown.
WARNINGS: Final = "python-warning"


class Severity(IntEnum):
    """How serious a problem is: time is lost, something does not take part, or results are wrong."""

    NOTE = 1
    WARNING = 2
    ERROR = 3

    @property
    def word(self) -> str:
        return self.name.lower()


class Confidence(IntEnum):
    """How sure a check is: a guess, the likely explanation, or the only possible one."""

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
    why: str  #: one sentence on why it matters, and how to repair it
    module: str  #: ``layers.0 … layers.11``; the class of a root; empty outside every module
    modules: tuple[str, ...]  #: every module path concerned, in the order of the run
    place: str  #: ``net.py:9 in Net.forward``; empty where no source is known
    op: int | None = None
    value: int | None = None
    parameter: str | None = None
    count: int = 1  #: how often, at the same line in modules of the same class
    steps: tuple[int, int] | None = None  #: in how many of how many training steps, where it has ops in them
    confidence: Confidence = Confidence.CERTAIN
    called: str = ""  #: the user's own line, where ``place`` is one of a library
    detail: str = ""  #: more about it: the note of an exception

    @property
    def times(self) -> str:
        """How often it occurs: ``in 2 of 3 steps``, ``×12``; empty for once, also in each of two modules."""
        if self.count == 1 or self.count == len(self.modules) == _LISTED:
            return ""
        if self.steps is not None and self.count == self.steps[0]:
            return f"in {self.steps[0]:,} of {self.steps[1]:,} steps"
        return f"×{self.count:,}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One occurrence of a problem, as a check reports it. -1 is "none", as in the columns."""

    title: str
    module: int = -1
    frame: int = -1
    op: int = -1
    value: int = -1
    parameter: str = ""
    place: str = ""  #: the source line, where there is no frame
    called: str = ""
    detail: str = ""
    why: str = ""  #: the repair in this case, where it is known better than the check knows it
    confidence: Confidence | None = None  #: where it differs from that of its check


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


def names_text(names: Sequence[str]) -> str:
    """The first few names, and how many more there are.

    >>> names_text(["a", "b"]), names_text(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def merge_findings(context: ProblemContext, findings: Iterable[tuple[Check, Finding]]) -> list[Problem]:
    """One problem for all findings of a kind at one line in modules of one class; the most serious first."""
    groups: dict[tuple[str, ...], list[tuple[Check, Finding]]] = {}
    for check, finding in findings:
        line = finding.place or context.place(finding.frame)
        key = (check.kind, line, context.module_type(finding.module))
        # Without a line, only findings with the same title are the same problem; and a line may hold several
        # calls that warn of different things.
        alike = line and check.kind != WARNINGS
        groups.setdefault(key if alike else (*key, finding.title), []).append((check, finding))
    problems: list[tuple[int, Problem]] = []  # with the first op; findings without an op come last
    for group in groups.values():
        check, first = group[0]
        named = context.module_names.text
        ops = [finding.op for _, finding in group if finding.op >= 0]
        modules = tuple(dict.fromkeys(finding.module for _, finding in group if finding.module >= 0))
        problem = Problem(
            kind=check.kind, severity=check.severity, title=named(first.title),
            why=named(first.why or check.why),
            module=_label([context.module_label(module) for module in modules]),
            modules=tuple(context.data.modules[module].path for module in modules),
            place=first.place or context.place(first.frame), op=_id_or_none(first.op),
            value=_id_or_none(first.value), parameter=first.parameter or None, count=len(group),
            steps=_steps(context, ops),
            confidence=check.confidence if first.confidence is None else first.confidence,
            called=first.called or ("" if first.place else context.own_place(first.frame)),
            detail=first.detail,
        )  # fmt: skip
        problems.append((min(ops, default=len(context.data.ops)), problem))
    problems.sort(key=lambda each: (each[1].kind != FIRST, -each[1].severity, -each[1].confidence, each[0]))
    return [problem for _, problem in problems]


def _steps(context: ProblemContext, ops: list[int]) -> tuple[int, int] | None:
    """The number of training steps that ops ran in, and of all; None with fewer than two ops or steps."""
    steps = innermost_steps(context.index.step_infos)
    if len(ops) < 2 or len(steps) < 2:
        return None
    starts = [step.first_op for step in steps]
    near = {(op, bisect_right(starts, op) - 1) for op in ops}
    hit = {at for op, at in near if at >= 0 and op < steps[at].end_op}
    return (len(hit), len(steps)) if hit else None


def _label(labels: list[str]) -> str:
    """Several modules by the first and the last of them.

    >>> _label(["layers.0", "layers.1", "layers.2"]), _label(["a", "b"])
    ('layers.0 … layers.2', 'a, b')
    """
    return f"{labels[0]} … {labels[-1]}" if len(labels) > _LISTED else ", ".join(labels)


def _id_or_none(id: int) -> int | None:
    return id if id >= 0 else None
