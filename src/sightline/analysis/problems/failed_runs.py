"""Runs that failed, and globs of the recording's options that matched nothing."""

from __future__ import annotations

from collections.abc import Iterator

from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.problem import FIRST, Finding, Severity, check
from sightline.analysis.unmatched_globs import unmatched


@check(
    "unmatched",
    Severity.WARNING,
    "What it asks for is not in this recording: correct the glob, and record again.",
)
def matched_nothing(context: ProblemContext) -> Iterator[Finding]:
    """A glob of ``Capture``, ``Stats`` or ``Check`` that matches no module, op or name of the run."""
    for each in unmatched(context.data):
        yield Finding(str(each))


@check(FIRST, Severity.ERROR, "The run ended here: nothing after it was looked at.")
def run_failed(context: ProblemContext) -> Iterator[Finding]:
    """The exception that left the block, with its note as far as it explains the cause."""
    info = context.data.info
    raised = info.get("exception")
    if not raised:
        return
    failure = info.get("failure")
    failure = failure if isinstance(failure, dict) else {}
    op, place, why = failure.get("op"), failure.get("place"), failure.get("why")
    op = op if type(op) is int and 0 <= op < len(context.data.ops) else -1
    why = [str(line) for line in why] if isinstance(why, list) else []
    frame = int(context.frames[op]) if op >= 0 else -1
    where = "" if op >= 0 and context.place(frame) else place if isinstance(place, str) else ""
    module = context.module(op) if op >= 0 else -1
    title = " ".join(str(raised).split())
    yield Finding(title, module, frame, op, place=where, detail="; ".join(why))
