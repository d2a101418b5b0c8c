"""Audits ``last=`` where it drops the beginning of a run: the steps that are left are still the run's own."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from sightline.analysis.step_summaries import step_numbers
from sightline.data.optimizer_steps import optimizer_steps
from tests.truth.audit_diff import check_diff
from tests.truth.audit_overview import OverviewAuditor
from tests.truth.audit_steps import StepTruth
from tests.truth.findings import Auditor
from tests.truth.running import Run, recorded
from tests.truth.screens import Table, screen

_STEPS = re.compile(
    r"(?P<kept>[\d,]+)(?:, after (?P<before>[\d,]+) that w(?:as|ere) not kept|(?P<unknown> that were kept))?"
    r"(?:, with [\d,]+ optimizer steps)?, .+; step=(?P<last>\d+) shows one"
)
_MORE = re.compile(r"… ([\d,]+) more")
_INCOMPLETE = "its first ops may not have been kept"
#: Ops before and after a step, as a log line, that may belong to it or not.
_AT_ENDS = 4
_HEAD = re.compile(r"last=(?P<kept>\d+), after (?P<before>[\d,]+) more")


def audit_last_ops(run: Run) -> Auditor:
    """The false statements about steps in a recording of the last part of the same program."""
    auditor = Auditor("last=")
    facts, ops = run.program.facts, len(run.trace.ops)
    if "last" not in run.program.options or facts.steps < 2 or facts.raises or run.name:
        return auditor
    # A third of the run, and exactly its last step with all that comes after it.
    first_of_last = run.trace.index.step_infos[-1].first_op
    traces = {}
    for count in {ops // 3, ops - first_of_last, ops * 5 // 6}:
        traces[count], _, _ = recorded(run.path, run.program.options | {"last": count})
        audit_steps(auditor, replace(run, trace=traces[count]), whole=run)
    if not facts.parallel:
        again, _, _ = recorded(run.path, run.program.options | {"last": ops // 3})
        check_diff(auditor, traces[ops // 3], again)
    return auditor


def audit_steps(auditor: Auditor, run: Run, whole: Run) -> None:
    """What the first screen says of the steps, against those of the ``whole`` recording."""
    facts, text = run.program.facts, str(run.trace)
    parts = screen(text)
    said = dict(parts.facts)
    head = _HEAD.search(text)
    assert head is not None
    ops = [int(head[name].replace(",", "")) for name in ("kept", "before")]
    auditor.equal(sum(ops), len(whole.trace.ops), "number of ops", head[0])
    if "steps" not in said:
        return
    match = _STEPS.fullmatch(said["steps"])
    if match is None:
        auditor.unknown(said["steps"])
        return
    kept = int(match["kept"].replace(",", ""))
    before = facts.steps - kept
    stepping = Counter(each.optimizer for each in run.truth.steps[-len(optimizer_steps(run.trace.data)) :])
    if len(stepping) > 1 and min(stepping.values()) == 1:
        return  # whether the optimizers take turns cannot be seen
    if match["unknown"]:
        reasons = len(run.truth.optimizers) > 1, facts.step_names, "GradScaler" in run.program.source
        auditor.expect(any(reasons), "steps that were dropped", said["steps"], before)
    else:
        stated = int((match["before"] or "0").replace(",", ""))
        auditor.equal(stated, before, "steps that were dropped", said["steps"])
    sizes, now = ([step.ops for step in step_numbers(each.trace.index)] for each in (whole, run))
    for size, truth in zip(now[1:], sizes[before + 1 :], strict=True):
        auditor.expect(abs(size - truth) <= _AT_ENDS, "ops of the steps that are left", now, sizes[before:])
    is_incomplete = now[0] < sizes[before] - _AT_ENDS
    stated = _INCOMPLETE in text
    auditor.expect(stated or not is_incomplete, "an incomplete step", text, sizes[before])
    surely_whole = kept > 2 and now[0] == sizes[before] == max(now)  # and as large as any
    auditor.expect(not (stated and surely_whole), "an incomplete step", text, sizes[before])
    first = 0 if match["unknown"] else before
    name = facts.step_names[-1] if facts.step_names else ""
    offered = int(name.removeprefix("step")) if name.removeprefix("step").isdigit() else first + kept - 1
    auditor.equal(int(match["last"]), offered, "step= that is offered", said["steps"])
    steps = StepTruth(run)
    for table in parts.tables:
        if table.titles[0] == "step":
            _audit_table(auditor, steps, table, first, before)
    if "one step" in said:
        left = range(before + stated, facts.steps)
        content = OverviewAuditor(_steps_of(run, left, first + stated), text)
        content.view = auditor.view
        content._one_step(said["one step"])
        auditor.findings += content.findings
        auditor.statements += content.statements


def _audit_table(auditor: Auditor, truth: StepTruth, table: Table, first: int, before: int) -> None:
    """The numbers and the losses of the steps; the first row is the step after ``before`` others."""
    at, names = before, truth.facts.step_names
    for row in table.rows:
        if more := _MORE.fullmatch(row[0].strip()):
            at += int(more[1].replace(",", ""))
            continue
        cells = dict(zip(table.titles, row, strict=True))
        name = names[at] if names else str(first + at - before)
        auditor.equal(cells["step"].strip(), name, "number of a step", row)
        if loss := cells.get("loss", ""):
            auditor.expect(truth.is_loss(at, loss), "loss of a step", row, truth.loss_text(at))
        at += 1
    auditor.equal(at, truth.facts.steps, "steps in the table")


def _steps_of(run: Run, left: range, number: int) -> Run:
    """A run whose program makes only the steps that are ``left``, the first of them with a ``number``."""
    facts = run.program.facts
    fewer = replace(
        facts,
        steps=len(left),
        contents=tuple(facts.content(step) for step in left),
        skipped=tuple(step - left.start for step in facts.skipped if step in left),
        step_names=facts.step_names[left.start :],
    )
    return replace(run, program=replace(run.program, facts=fewer), number=number)
