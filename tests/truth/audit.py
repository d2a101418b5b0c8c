"""Every audit of a run: each view is drawn, read, and compared with the truth."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import sightline as sl
from tests.truth.audit_call_order import audit_call_order
from tests.truth.audit_diff import audit_diff
from tests.truth.audit_last_ops import audit_last_ops
from tests.truth.audit_memory import audit_memory
from tests.truth.audit_one_step import audit_one_step
from tests.truth.audit_overview import audit_overview
from tests.truth.audit_summary import audit_summary
from tests.truth.audit_tables import audit_page, audit_sql, audit_tables
from tests.truth.findings import Auditor, Finding
from tests.truth.program import Program
from tests.truth.running import Run, run


def audit_saved(run: Run) -> Auditor:
    """The false statements of the same recording after it was saved and opened again."""
    auditor = Auditor("saved")
    with tempfile.TemporaryDirectory() as folder:
        run.trace.save(f"{folder}/run.sight")
        loaded = sl.load(f"{folder}/run.sight")
        for view in ("summary", "call_order", "memory", "problems", "_overview"):
            texts = [str(getattr(each, view)()) for each in (loaded, run.trace)]
            auditor.equal(texts[0], texts[1], view.strip("_"))
    return auditor


AUDITS = {
    "overview": audit_overview,
    "step=N": audit_one_step,
    "summary": audit_summary,
    "call order": audit_call_order,
    "memory": audit_memory,
    "tables": audit_tables,
    "SQL": audit_sql,
    "page": audit_page,
    "last=": audit_last_ops,
    "diff": audit_diff,
    "saved": audit_saved,
}

#: Views that say more about the calls of modules than is known of those inside compiled code.
_OF_CALLS = ("step=N", "summary", "call order")


@dataclass(frozen=True)
class Result:
    """The false statements about a run, and how many statements were read."""

    findings: list[Finding]
    statements: int


def audit(run: Run) -> Result:
    """Audit every view of a run."""
    findings, statements = [], 0
    exam = Auditor("run")
    exam.expect(
        run.same, "bits", "the recorded run", "ended with other weights than the one that nothing recorded"
    )
    left_out = _OF_CALLS if run.program.facts.compiled else ()
    audits = {view: read for view, read in AUDITS.items() if view not in left_out}
    if run.program.facts.distributed:  # it is saved as one of the job's
        del audits["saved"]
    for view, read in [("run", lambda _: exam), *audits.items()]:
        try:
            result = read(run)
        except Exception as error:  # noqa: BLE001 — whatever a view raises is a fault of it
            findings.append(raised(view, error))
            continue
        findings += result.findings
        statements += result.statements
    return Result(findings, statements)


def examine(program: Program, folder: Path) -> Result:
    """Run a program and audit every view of it."""
    try:
        one = run(program, folder)
    except Exception as error:  # noqa: BLE001 — the program, or recording it
        return Result([raised("program", error)], 0)
    return audit(one)


def raised(view: str, error: Exception) -> Finding:
    """The finding about a view that cannot be drawn, or not be read."""
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}")
        at = at.tb_next
    return Finding(f"{view}: raised", f"{type(error).__name__}: {error}", " ← ".join(frames[::-1][:6]))
