"""Audits ``t.step(3)``: the first screen of a step says what that step did, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from tests.truth.audit_call_order import check_calls
from tests.truth.audit_overview import OverviewAuditor
from tests.truth.findings import Auditor
from tests.truth.running import Run


def audit_one_step(run: Run) -> Auditor:
    """The false statements about the last step, and about the first."""
    auditor = Auditor("step=N")
    facts = run.program.facts
    if not facts.steps:
        return auditor
    for number in sorted({0, facts.steps - 1}):
        truth = run.truth.step(number, facts)
        skipped = (0,) if number in facts.skipped else ()
        names = facts.step_names[number : number + 1]
        one = replace(
            facts,
            steps=1,
            skipped=skipped,
            step_names=names,
            gradients=facts.gradients // facts.steps,
            contents=(facts.content(number),),
        )
        part = replace(
            run,
            program=replace(run.program, facts=one),
            truth=truth,
            trace=run.trace.step(number),
            losses=run.losses[facts.passes(number)],
            name=f"{run.name}, step {number}",
            number=number,
        )
        screen = OverviewAuditor(part, str(part.trace))
        screen.view = auditor.view
        screen.audit()
        auditor.findings += screen.findings
        auditor.statements += screen.statements
        check_calls(auditor, part)
    return auditor
