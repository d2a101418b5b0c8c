"""The tables agree with the rows of a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sightline.api import Trace
from sightline.convert.context import TableContext
from sightline.convert.encoding import json_text
from sightline.convert.tables import ALIASES, TABLES
from sightline.data.trace_data import StepInfo
from tests.builders import make_trace
from tests.store.bundles import ZOO, measured

DOCUMENT = Path(__file__).parents[2] / "docs" / "convert.md"


def rows(trace: Trace, name: str) -> list[dict[str, Any]]:
    table, facts = TABLES[name], TableContext(trace.index)
    names = [column.name for column in table.columns]
    found = [
        dict(zip(names, row, strict=True))
        for batch in table.batches(facts)
        for row in zip(*batch, strict=True)
    ]
    assert len(found) == table.count(facts)
    return found


@pytest.mark.parametrize("name", ZOO)
def test_every_table_of_every_trace_has_values_of_its_types(name: str) -> None:
    kinds = {"integer": int, "real": float, "text": str, "boolean": bool}
    for table in TABLES.values():
        for row in rows(ZOO[name](), table.name):
            for column in table.columns:
                assert row[column.name] is None or type(row[column.name]) is kinds[column.type], column


def test_ops_are_the_ops_of_the_trace() -> None:
    trace = make_trace()
    for row, op in zip(rows(trace, "ops"), trace.ops, strict=True):
        assert (row["id"], row["name"], row["level"], row["phase"]) == (op.id, op.name, op.level, op.phase)
        assert row["text"] == str(op)
        assert row["inputs"] == ", ".join(map(str, op.inputs))
        assert row["module"] == (op.module.label if op.module else None)
        assert row["parent"] == (op.parent.id if op.parent else None)
        assert row["forward"] == (op.forward.id if op.forward else None)
        assert (row["start_ns"], row["duration_ns"], row["flops"]) == (op.start, op.duration, op.flops)
        assert "/torch/" not in (row["file"] or "")


def test_an_op_is_placed_on_the_line_outside_torch_and_a_backward_op_on_that_of_its_forward() -> None:
    found = rows(make_trace(), "ops")
    linear = next(row for row in found if row["name"] == "F.linear")
    assert (linear["file"], linear["line"], linear["code"]) == (
        "net.py",
        9,
        "q, k, v = self.attn.qkv(h).chunk(3, dim=-1)",
    )
    assert linear["function"] == "Block.forward"
    gelu = next(row for row in found if row["name"] == "gelu_backward")
    assert (gelu["line"], gelu["code"]) == (12, "return x + F.gelu(self.fc(h))")


def test_calls_modules_and_parameters() -> None:
    trace = make_trace()
    for row, call in zip(rows(trace, "module_calls"), trace.module_calls, strict=True):
        assert (row["module"], row["type"], row["number"]) == (
            call.module.label,
            call.module.type,
            call.index,
        )
        assert (row["parent"], row["depth"]) == (call.parent.id if call.parent else None, call.depth)
        assert row["outputs"] == ", ".join(map(str, call.outputs))
    for row, module in zip(rows(trace, "modules"), trace.modules, strict=True):
        assert (row["path"], row["module"], row["calls"]) == (module.path, module.label, len(module.calls))
        assert row["parameters"] == sum(info.numel for info in module.parameters)
    assert [row["path"] for row in rows(trace, "parameters")][:2] == ["embed.weight", "blocks.0.norm.weight"]


def test_values_links_and_edges() -> None:
    trace = make_trace()
    for row, value in zip(rows(trace, "values"), trace.values, strict=True):
        assert (row["tensor"], row["kind"], row["bytes"]) == (str(value), value.kind, value.meta.nbytes)
        assert json.loads(row["shape"]) == list(value.shape)
        assert row["producer"] == (value.producer.id if value.producer else None)
        assert row["module"] == (value.module.label if value.module else None)
        assert row["name"] == (value.name or None)
    inputs = [(op.id, at, value.id) for op in trace.ops for at, value in enumerate(op.inputs)]
    assert [tuple(row.values()) for row in rows(trace, "inputs")] == inputs
    returned = [
        (call.id, at, value.id) for call in trace.module_calls for at, value in enumerate(call.outputs)
    ]
    assert [tuple(row.values()) for row in rows(trace, "call_outputs")] == returned
    made = [value.producer.id if value.producer else None for op in trace.ops for value in op.inputs]
    assert [row["source"] for row in rows(trace, "edges")] == made
    assert [row["target"] for row in rows(trace, "edges")] == [op for op, _, _ in inputs]


def test_statistics_have_no_nan_and_fingerprints_are_text() -> None:
    found = rows(measured(), "stats")
    assert [row["value"] for row in found] == [0, 2, 3, 7, 9]
    assert found[0]["min"] is None
    assert found[1]["min"] == float("inf")
    assert [row["fingerprint"] for row in found][:3] == [None, "0000000000000001", "f" * 16]


def test_an_op_is_in_its_innermost_step() -> None:
    steps = [StepInfo("outer", 0, 6, 0, 0, 0, 9), StepInfo("inner", 2, 4, 0, 0, 0, 5)]
    found = rows(Trace(replace(make_trace().data, steps=steps)), "ops")
    assert [row["step"] for row in found][:7] == ["outer", "outer", "inner", "inner", "outer", "outer", None]


def test_the_document_lists_every_table_and_column() -> None:
    listed: dict[str, list[str]] = {}
    for line in DOCUMENT.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            listed[cells[0].split("`")[1]] = cells[2].replace("`", "").split(", ")
    assert listed == {name: [column.name for column in table.columns] for name, table in TABLES.items()}


def test_other_names_are_of_tables_there_are() -> None:
    assert set(ALIASES.values()) <= set(TABLES)
    assert not set(ALIASES) & set(TABLES)


def test_json_takes_values_that_json_does_not_have() -> None:
    assert json_text([float("inf"), float("nan"), 1.5]) == "[null,null,1.5]"
    assert json.loads(json_text("é\ud83d\ude00\udc00\0")) == "é😀\ufffd\0"
    assert json_text({"text": "\\ud"}) == '{"text":"\\\\ud"}'
