"""Audits the tables of a trace, what SQL says of them, and what the page carries."""

from __future__ import annotations

from typing import Any

from sightline.convert.query import Query
from sightline.page.payload import payload
from tests.page.packed import unpacked
from tests.truth.findings import Auditor
from tests.truth.running import Run


def audit_tables(run: Run) -> Auditor:
    """The false rows of ``t.module_calls``, ``t.modules`` and ``t.steps``."""
    auditor = Auditor("tables")
    t, truth, facts = run.trace, run.truth, run.program.facts
    t.validate()
    auditor.equal(len(t.module_calls), _module_calls(run), "number of module calls")
    for row, call in zip(t.module_calls, truth.calls, strict=False):
        name = f"call {row.id} of {row.module.label}"
        auditor.equal(row.module.type, call.type, "class", name)
        auditor.equal(row.index, call.index, "number of a call", name)
        auditor.equal(-1 if row.parent is None else row.parent.id, call.parent, "caller", name)
        auditor.equal(row.phase, call.phase, "phase", name)
        auditor.equal(row.raised, call.raised and call.phase == "forward", "raised", name)
        auditor.expect(row.module.label in truth.names(call), "name", name, truth.names(call))
        auditor.equal([_tensor(value) for value in row.inputs], call.inputs, "inputs", name)
        if not call.raised:
            auditor.equal([_tensor(value) for value in row.outputs], call.outputs, "outputs", name)
        if row.frame is not None and call.line and row.frame.file == truth.file:
            auditor.equal(row.frame.line, call.line, "line of a call", name)
    marks = {op.name for op in t.ops if "profiler" in op.name}
    auditor.equal(marks, set(), "ops that only torch's profiler reads")
    if not facts.step_names:
        auditor.equal(
            [step.name for step in t.steps], [f"step{at}" for at in range(facts.steps)], "names of steps"
        )
    if not facts.compiled and run.program.options.get("ops", "both") in ("aten", "both"):
        _check_op_lines(auditor, run)
    return auditor


def _module_calls(run: Run) -> int:
    """How many calls of modules a recording has: of compiled code only those from outside."""
    facts = run.program.facts
    if facts.compiled:
        outermost = sum(sum(facts.content(step).calls.values()) for step in range(facts.steps))
        return outermost * (1 + facts.parts)
    return len(run.truth.calls)


def _check_op_lines(auditor: Auditor, run: Run) -> None:
    """Dispatcher ops of the forward pass and of optimizers, by the innermost line of the program."""
    truth = run.truth
    lines: dict[tuple[str, int], int] = {}
    for op in run.trace.ops.where(level="aten"):
        if op.phase in ("forward", "optimizer") and op.name != "detach":
            chain = [frame for frame in (op.frame.chain if op.frame else []) if frame.file == truth.file]
            place = op.phase, chain[-1].line if chain else 0
            lines[place] = lines.get(place, 0) + 1
    for place in {*lines, *truth.op_lines}:
        if place[0] in ("forward", "optimizer") and truth.lines_known:
            stated, counted = lines.get(place, 0), truth.op_lines[place]
            auditor.equal(stated, counted, "ops of a line", f"line {place[1]}: {stated} ops in {place[0]}")


def _tensor(value: Any) -> str:
    names = {
        "float32": "f32",
        "float64": "f64",
        "bfloat16": "bf16",
        "int64": "i64",
        "bool": "b8",
        "float16": "f16",
    }
    return f"{names.get(value.dtype, value.dtype)}[{', '.join(map(str, value.shape))}]"


def audit_sql(run: Run) -> Auditor:
    """What queries answer."""
    auditor = Auditor("SQL")
    truth, facts = run.truth, run.program.facts
    level = {"aten": "aten"}.get(run.program.options.get("ops", "both"), "api")

    def one(query: str) -> Any:
        with Query(run.trace.index, query) as asked:
            return next(asked.rows)[0]

    auditor.equal(one("select count(*) from module_calls"), _module_calls(run), "module calls")
    modules = len({id(call.module) for call in truth.calls})
    called = len(facts.calls) * (1 + facts.parts) if facts.compiled else modules
    auditor.equal(one("select count(distinct module) from module_calls"), called, "modules that were called")
    auditor.equal(one("select count(*) from steps"), facts.steps, "steps")
    total = sum(each.numel() for each in truth.parameters().values())
    auditor.equal(_parameters(run), total, "parameters")
    if level == "api":
        auditor.equal(
            one(
                "select count(*) from ops where level = 'api' and name like '%backward' "
                "and name not like 'compiled %'"
            ),
            len(truth.backwards),
            "calls of backward",
        )
    return auditor


def _parameters(run: Run) -> int:
    return sum(
        {
            each.key: each.numel
            for module in run.trace.modules
            for each in module.parameters
            if not each.buffer
        }.values()
    )


def audit_page(run: Run) -> Auditor:
    """What the page carries."""
    auditor = Auditor("page")
    t, truth, facts = run.trace, run.truth, run.program.facts
    page = unpacked(payload(t.index))
    auditor.equal(page["run"]["ops"], len(t.ops), "ops")
    auditor.equal(page["run"]["values"], len(t.values), "values")
    auditor.equal(
        page["run"]["parameters"], sum(p.numel() for p in truth.parameters().values()), "parameters"
    )
    auditor.equal(len(page["timeline"]["steps"]), facts.steps, "steps of the timeline")
    auditor.equal(len(page["calls.module"]), _module_calls(run), "module calls")
    texts = page["strings"]
    for at, call in enumerate(truth.calls[: len(page["calls.module"])]):
        module = int(page["calls.module"][at])
        auditor.equal(texts[int(page["modules.type"][module])], call.type, "class of a call", f"call {at}")
    if facts.healthy and not facts.unused:
        bad = [
            each["title"] for each in page["problems"]["found"] if each["severity"] in ("error", "warning")
        ]
        auditor.equal(bad, [], "problems of a healthy program")
    return auditor
