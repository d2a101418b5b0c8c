"""Audits `t.call_order()`: each call in its place, under its name, with its number."""

from __future__ import annotations

import re

from tests.truth.findings import Auditor
from tests.truth.running import Run

_LINE = re.compile(
    r"(?P<indent> *)(?P<label>\S+)(?: \((?P<type>\w+)\))? #(?P<first>\d+)(?:…#(?P<last>\d+))?"
    r"(?: ×(?P<times>\d+))?"
    r"(?: without gradients)?"
    r"(?: (?P<phase>forward|backward|recompute|optimizer))?(?: (?P<ended>raised|unfinished))?"
)


def audit_call_order(run: Run) -> Auditor:
    """The false statements of the call order, folded and not."""
    auditor = Auditor("call order")
    check_calls(auditor, run)
    return auditor


def check_calls(auditor: Auditor, run: Run) -> None:
    """Compare each line with a call."""
    calls = run.truth.calls
    text = str(run.trace.call_order(fold=False))
    if not calls:
        auditor.equal(text, "This trace has no module calls.", "no calls")
        return
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    auditor.equal(len(lines), len(calls), "number of calls")
    depths: list[int] = []
    for line, call in zip(lines, calls, strict=False):
        match = _LINE.fullmatch(line)
        if match is None:
            auditor.unknown(line)
            continue
        depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
        auditor.equal(len(match["indent"]) // 2, depths[-1], "depth of a call", line)
        label, kind = match["label"], match["type"]
        names = run.truth.names(call)
        auditor.expect(label in names, "name of a call", line, names)
        auditor.equal(kind or label, call.type, "class of a call", line)
        auditor.equal(int(match["first"]), call.index, "number of a call", line)
        auditor.equal(match["phase"] or "forward", call.phase, "phase of a call", line)
        auditor.equal(
            match["ended"] == "raised", call.raised and call.phase == "forward", "whether a call raised", line
        )
    _check_folded(auditor, str(run.trace.call_order()), len(calls))


def _check_folded(auditor: Auditor, text: str, calls: int) -> None:
    """Unfolded in the mind, the folded lines are all calls."""
    total, factors = 0, [1]
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            if line == "# all calls are without gradients":
                continue
            if not re.fullmatch(r"# (compiled code ran as .+|.+ on (other threads|another thread) .+)", line):
                auditor.unknown(line)
            continue
        depth, times = len(match["indent"]) // 2, int(match["times"] or 1)
        if match["last"]:
            span = int(match["last"]) - int(match["first"]) + 1
            auditor.expect(span >= times, "numbers of folded calls", line, f"{span} calls")
        del factors[depth + 1 :]
        factors.append(factors[depth] * times)
        total += factors[-1]
    auditor.equal(total, calls, "calls of all folded lines")
