"""Audits ``sl.diff`` of two runs of one program, which computes the same numbers each time."""

from __future__ import annotations

import re
from typing import Any

import sightline as sl
from tests.truth.findings import Auditor
from tests.truth.running import Run, recorded

_SIDE = re.compile(r"(?P<side>[ab])  .+ · (?P<ops>[\d,]+) ops, (?P<calls>[\d,]+) module calls?")


def audit_diff(run: Run) -> Auditor:
    """The false differences between the recording and another one of the same program."""
    auditor = Auditor("diff")
    options = {name: value for name, value in run.program.options.items() if name != "path"}
    if run.name or run.program.facts.parallel:  # threads take turns as they like
        return auditor
    again, _, _ = recorded(run.path, options)
    check_diff(auditor, run.trace, again)
    return auditor


def check_diff(auditor: Auditor, one: Any, other: Any) -> None:
    """Nothing that was compared differs, and the screen counts what there is."""
    diff = sl.diff(one, other)
    text = str(diff)
    measured = all(len(each.data.stats) for each in (one, other))
    auditor.expect(
        diff.verdict in (("same", "unknown") if measured else ("unknown",)), "verdict", text, "same"
    )
    auditor.equal(diff.divergence, None, "a divergence of equal runs", text)
    auditor.expect("they part" not in text, "where equal runs part", text, "they do not")
    sides = [match for match in map(_SIDE.fullmatch, text.splitlines()) if match is not None]
    auditor.equal([each["side"] for each in sides], ["a", "b"], "lines of the two sides", text)
    for match, trace in zip(sides, (one, other), strict=False):
        auditor.equal(int(match["calls"].replace(",", "")), len(trace.module_calls), "module calls", match[0])
