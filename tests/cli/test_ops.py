"""``sightline ops``: a row for each op, as a table, JSON lines or CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import sightline as sl
from sightline.cli.ops import NAMES, op_rows
from sightline.cli.row_output import Column, Row, table
from sightline.convert.context import TableContext
from tests.cli.recorded import cli, misused, on_terminal, refused
from tests.store.bundles import on_a_device


def rows(*arguments: object) -> list[dict[str, object]]:
    return [json.loads(line) for line in cli("ops", *arguments, "--json").splitlines()]


def test_json_has_every_fact_of_every_op(run: Path) -> None:
    trace = sl.load(run)
    found = rows(run)
    assert [row["id"] for row in found] == list(range(len(trace.ops)))
    for row, op in zip(found, trace.ops, strict=True):
        assert tuple(row) == NAMES
        assert (row["name"], row["level"], row["phase"]) == (op.name, op.level, op.phase)
        assert row["parent"] == (op.parent.id if op.parent else None)
        assert row["forward"] == (op.forward.id if op.forward else None)
        assert row["module"] == (op.module.label if op.module else None)
        assert row["module_call"] == (op.call.index if op.call else None)
        assert row["inputs"] == [{"value": f"${v.id}", "tensor": str(v)} for v in op.inputs]
        assert row["outputs"] == [{"value": f"${v.id}", "tensor": str(v)} for v in op.outputs]
        if not op.name.startswith("[]"):  # a subscript is written as in the program
            assert f"{op.name}({row['arguments']})" in str(op)
        assert (row["start_ns"], row["duration_ns"]) == (op.start, op.duration)
        assert (row["flops"], row["raised"]) == (op.flops, op.raised)
        assert row["file"] is None or str(row["file"]).endswith(".py")


def test_csv_says_the_same(run: Path) -> None:
    found = list(csv.DictReader(cli("ops", run, "--csv").splitlines()))
    for row, wanted in zip(found, rows(run), strict=True):
        assert (row["id"], row["name"]) == (str(wanted["id"]), wanted["name"])
        assert row["module"] == (wanted["module"] or "")
        assert row["raised"] == "false"
        inputs = wanted["inputs"]
        assert isinstance(inputs, list)
        assert row["inputs"] == "; ".join(f"{each['value']} {each['tensor']}" for each in inputs)


def test_the_table_is_for_people(run: Path) -> None:
    lines = cli("ops", run, "--module", "blocks.0", "--phase", "forward", "--head", 5).splitlines()
    assert lines[0].split() == ["id", "time", "module", "line", "result", "op"]
    assert lines[2].split("  ")[1:] != []
    assert "F.linear(f32[2, 5, 8], f32[8, 8], f32[8])" in lines[2]
    assert "    view(f32[2, 5, 8], [10, 8])" in lines[3]
    assert "blocks.0.fc" in lines[3]
    assert "recorded.py:" in lines[3]
    assert "phase" in cli("ops", run, "--head", 500).splitlines()[0]


def test_a_terminal_gets_no_line_it_cannot_show(run: Path) -> None:
    shown, status = on_terminal("ops", run, "--color", "never", PAGER="cat")
    assert status == 0
    assert max(map(len, shown.splitlines())) == 100
    assert "…" in shown
    lines = [line for line in shown.splitlines() if "blocks" in line]
    assert all(re.search(r"^ *\d+  \w+ +[\d.]+ .?s  ", line) for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("options", [[], ["--sort", "flops"], ["--level", "api"]])
def test_a_table_has_the_width_of_the_terminal(run: Path, columns: int, options: list[str]) -> None:
    shown, status = on_terminal("ops", run, *options, "--color", "never", "--no-pager", COLUMNS=str(columns))
    assert status == 0
    assert max(map(len, shown.splitlines())) <= columns


def test_what_is_sorted_by_is_shown(run: Path) -> None:
    title, _, first, *_ = cli("ops", run, "--sort", "flops", "--head", 3).splitlines()
    assert title.split()[:4] == ["id", "time", "FLOPs", "module"]
    assert re.search(r"s +\d[\d.]*k? +", first)
    assert "FLOPs" not in cli("ops", run, "--sort", "time", "--head", 3)


def test_on_a_pipe_the_rows_are_measured(run: Path) -> None:
    title, _, *lines = cli("ops", run, "--head", 40).splitlines()
    assert len(lines) == 40
    column = title.index("op")
    assert all(line[column - 2 : column] == "  " and line[column:].strip() for line in lines)


def test_filters_choose_and_limits_cut(run: Path) -> None:
    everything = rows(run)
    aten = [row for row in everything if row["level"] == "aten"]
    assert rows(run, "--level", "aten") == aten
    assert rows(run, "--level", "aten", "--head", 3) == aten[:3]
    assert rows(run, "--level", "aten", "--tail", 3) == aten[-3:]
    backward = rows(run, "--phase", "backward", "--op", "mm", "--depth", 1)
    assert backward
    assert {(row["phase"], row["name"], row["module"]) for row in backward} == {("backward", "mm", "head")}
    slowest = rows(run, "--sort", "time", "--head", 4)
    assert [row["duration_ns"] for row in slowest] == sorted(
        (int(str(row["duration_ns"])) for row in everything), reverse=True
    )[:4]
    assert rows(run, "--sort", "flops", "--head", 1)[0]["flops"] == max(
        int(str(row["flops"] or 0)) for row in everything
    )


def test_wrong_calls_are_one_sentence(run: Path) -> None:
    assert misused("ops", run, "--head", 1, "--tail", 1) == (
        "--head and --tail do not go together; give one of them."
    )
    assert refused("ops", run, "--op", "reluu").startswith(
        "--op 'reluu' matches no op of this trace; did you mean 'relu'"
    )
    assert "'sideways' is not one of" in misused("ops", run, "--phase", "sideways")


def test_rows_are_made_as_they_are_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = sl.load(run)
    read: list[int] = []

    class Counted(TableContext):
        def form_text(self, form: int, metas: Sequence[int]) -> str:
            read.append(form)
            return super().form_text(form, metas)

    monkeypatch.setattr("sightline.cli.ops._CHUNK", 4)
    monkeypatch.setattr("sightline.convert.context.TableContext", Counted)
    rows = op_rows(trace.index, np.arange(len(trace.ops)), ("id", "arguments"))
    assert [next(rows)["id"] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(read) == 8


def test_a_table_begins_before_all_rows_are_there() -> None:
    def endless() -> Iterator[Row]:
        number = 0
        while True:
            yield {"number": number}
            number += 1

    lines = table(endless(), [Column("number", lambda row: str(row["number"]), right=True)])
    assert [next(lines).text for _ in range(4)] == ["number", "──────", "     0", "     1"]


def test_a_long_cell_is_cut_only_where_there_is_no_room() -> None:
    given = [{"path": "blocks.0.attention.query", "shape": "f32[2, 8]"}]
    columns = (
        Column("path", lambda row: row["path"], end=True),
        Column("shape", lambda row: row["shape"], right=True),
    )
    assert [line.text for line in table(given, columns)][2] == "blocks.0.attention.query  f32[2, 8]"
    assert [line.text for line in table(given, columns, 24)] == [
        "path               shape",
        "─" * 24,
        "…ention.query  f32[2, 8]",
    ]


def test_device_time_stands_beside_host_time(tmp_path: Path) -> None:
    on_a_device().save(tmp_path / "run.sight")
    trace = sl.load(tmp_path / "run.sight")
    assert [row["device_ns"] for row in rows(tmp_path / "run.sight")] == [
        op.device_duration for op in trace.ops
    ]
    listed = cli("ops", tmp_path / "run.sight", "--sort", "device", "--level", "aten")
    assert "host time  device time" in listed.splitlines()[0]
    spent = [row["device_ns"] for row in rows(tmp_path / "run.sight", "--sort", "device", "--level", "aten")]
    assert spent == sorted(spent, key=lambda time: -int(str(time)))


def test_device_time_that_was_not_recorded(run: Path) -> None:
    assert {row["device_ns"] for row in rows(run)} == {None}
    assert "device" not in cli("ops", run).splitlines()[0]
    assert "--sort device needs device time: record with `sightline run --time device`." in refused(
        "ops", run, "--sort", "device"
    )
