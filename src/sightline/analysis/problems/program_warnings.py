"""Warnings that torch, Python or a package has shown, where no other problem at their line explains them.

A recording's file may be damaged or hostile: entries of the wrong form are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.problem import WARNINGS, Finding, Problem, Severity, check
from sightline.analysis.problems.training_loop import scheduler_out_of_order
from sightline.analysis.problems.training_loop_events import LoopRecord, source_lines
from sightline.data.trace_data import FROM_CPP, FROM_TORCH
from sightline.data.training_steps import scaler_updates

#: Categories about versions of packages, not about the results of the run.
_DEPRECATIONS: Final = frozenset({"DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"})
#: torch's warning about a scheduler, also for one whose optimizer is wrapped; the scheduler check is exact.
_ORDER: Final = "Detected call of `lr_scheduler.step()` before"
_MAX_TEXT: Final = 240
_NEARBY: Final = 4  #: ops before and after a warning that may have caused it


@check(
    WARNINGS,
    Severity.WARNING,
    "It was shown while the line ran, and the program went on. Its text says what to do.",
)
def warned(context: ProblemContext) -> Iterator[Finding]:
    """A warning about the run itself, with the op during which it was shown."""
    yield from _findings(context, deprecations=False)


@check(
    WARNINGS,
    Severity.NOTE,
    "It is about versions of packages, not about this run.",
)
def deprecated(context: ProblemContext) -> Iterator[Finding]:
    """A warning that something will change or be removed."""
    yield from _findings(context, deprecations=True)


def _findings(context: ProblemContext, deprecations: bool) -> Iterator[Finding]:
    """The warnings that are deprecations, or those that are not, except those that a check explains."""
    rows = context.data.info.get("warnings")
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, list) or len(row) != 6 or type(row[3]) is not int:
            continue
        if (row[0] in _DEPRECATIONS) is not deprecations:
            continue
        if str(row[1]).startswith(_ORDER) and _is_order_known(context, row[3]):
            continue
        place, called = source_lines(row[2])
        op = _op_at(context, row[3], row[4], place)
        during = f" during {context.written(op)}" if op >= 0 else ""
        times = f" (×{row[5]:,})" if type(row[5]) is int and row[5] > 1 else ""
        text = str(row[1])
        text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT].rpartition(' ')[0]} …"
        title = f"{row[0]}{during}{times}: {text}"
        module = context.module(op) if op >= 0 else -1
        yield Finding(title, module, op=op, place=place, called=called)


def _is_order_known(context: ProblemContext, time: int) -> bool:
    """Whether the check for schedulers decides about torch's warning, which was shown at this time.

    Torch warns too where a gradient scaler has skipped the first steps, or an optimizer is wrapped.
    """
    loop = context.derived(LoopRecord)
    if not loop.steps or not loop.schedulers:
        return False
    updates = scaler_updates(context.data)
    skipped = bool(updates) and int(context.data.ops.start[updates[0]]) < time
    early = any(scheduler.early for scheduler in loop.schedulers)
    return skipped or not early or any(scheduler_out_of_order.find(context))


def _op_at(context: ProblemContext, time: int, origin: object, place: str) -> int:
    """The op during which a warning was shown: the innermost open one, else the next or last of its line.

    A function of torch may warn before its first op; warnings of an op in C++ are shown when it is over.
    """
    ops = context.data.ops
    following = int(np.searchsorted(ops.start, time, side="right"))
    nearby = range(max(following - _NEARBY, 0), min(following + _NEARBY, len(ops)))
    running = [op for op in nearby if ops.start[op] <= time < ops.start[op] + ops.duration[op]]
    if running or origin not in (FROM_TORCH, FROM_CPP):
        return running[-1] if running else -1
    same = [op for op in nearby if place in (context.line(op), context.own_place(int(context.frames[op])))]
    before, after = [op for op in same if op < following], [op for op in same if op >= following]
    return next(iter(after if origin == FROM_TORCH else before[::-1]), -1)


def unexplained(context: ProblemContext, problems: Sequence[Problem]) -> list[Problem]:
    """Problems without the warnings whose cause is among them: one of the same call at the same line."""
    causes = [each for each in problems if each.kind != WARNINGS]
    return [
        each
        for each in problems
        if each.kind != WARNINGS or not any(_explains(context, cause, each) for cause in causes)
    ]


def _explains(context: ProblemContext, cause: Problem, warning: Problem) -> bool:
    """Whether a problem is about the call that warned; a line may hold several."""
    if not {cause.place, cause.called} & {warning.place, warning.called} - {""}:
        return False
    if cause.op is None or warning.op is None:
        return cause.op is warning.op
    called = context.data.info.get("ops") != "aten"  # else a call is several ops, and nothing says which
    return not called or _outermost(context, cause.op) == _outermost(context, warning.op)


def _outermost(context: ProblemContext, op: int) -> str:
    """The name of the outermost call around an op."""
    ops = context.data.ops
    while ops.parent[op] >= 0:
        op = int(ops.parent[op])
    return context.data.names[int(ops.name[op])]
