"""``sightline sql``: answers as tables, JSON and CSV; limits that hold; no torch."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

import sightline as sl
from sightline.convert.tables import TABLES
from sightline.notation import time_text
from tests.cli.recorded import (
    COMMAND,
    WITHOUT_TORCH,
    cli,
    environment,
    invoke,
    misused,
    on_terminal,
    process,
    refused,
)

#: One call of one function, for hours: the needle is in the hay but for its last letter, everywhere.
BUSY = "select instr({0}1900000{1}, {0}900000{1} || 'b')".format("replace(hex(zeroblob(", ")), '00', 'aa')")


def test_an_answer_is_a_table(run: Path) -> None:
    query = "select module, type, number as n from calls where depth = 1 order by id limit 2"
    assert cli("sql", run, query) == (
        "module    type   n\n"
        "──────────────────\n"
        "blocks.0  Block  0\n"
        "blocks.1  Block  0\n"
    )  # fmt: skip


def test_numbers_stand_to_the_right_and_null_is_said(run: Path) -> None:
    assert cli("sql", run, "select 5 as five, 'x' as letter, 1.0 / 3 as third, null as none") == (
        "five  letter     third  none\n"
        "────────────────────────────\n"
        "   5  x       0.333333  null\n"
    )  # fmt: skip


def test_json_and_csv(run: Path) -> None:
    query = "select id, name, flops, 0.1 as tenth, x'00ff' as bytes from ops order by id limit 3"
    ops = sl.load(run).ops[:3]
    lines = cli("sql", run, query, "--json").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": op.id, "name": op.name, "flops": op.flops, "tenth": 0.1, "bytes": "x'00ff'"} for op in ops
    ]
    header, *rows = csv.reader(io.StringIO(cli("sql", run, query, "--csv")))
    assert header == ["id", "name", "flops", "tenth", "bytes"]
    assert [row[1] for row in rows] == [op.name for op in ops]


def test_the_tables_are_listed_with_their_columns(run: Path) -> None:
    short = cli("sql", run)
    for name, table in TABLES.items():
        assert f"\n{name}  " in f"\n{short}"
        assert all(column.name in short for column in table.columns)
    assert max(map(len, short.splitlines())) <= 100
    long = cli("sql", run, "--tables")
    assert re.search(
        r"\n  duration_ns +integer  host time with the ops in it, the recorder's own left out\n", long
    )
    assert max(map(len, long.splitlines())) <= 100


def test_a_sum_of_times_counts_nothing_twice(run: Path) -> None:
    trace = sl.load(run)
    (row,) = json.loads(f"[{cli('sql', run, 'select sum(exclusive_ns) n from ops', '--json')}]")
    innermost = [op for op in trace.ops if not len(trace.index.children(op.id))]
    assert row["n"] == sum(op.duration for op in innermost if op.name != "Tensor.backward")
    assert f", {time_text(row['n'])} in ops (" in str(trace)
    calls = json.loads(cli("sql", run, "select sum(exclusive_ns) n from module_calls", "--json"))
    shown = re.search(r"in ops \(modules ([^·]*) · other ([^·]*) ·", str(trace))
    outside = sum(op.duration for op in trace.ops.where(level="aten", phase="forward") if op.call is None)
    assert shown is not None
    assert (time_text(calls["n"]), time_text(outside)) == shown.groups()


@pytest.mark.parametrize(
    ("query", "noted"),
    [
        ("select sum(duration_ns) from ops", True),
        ("select module, sum(o.duration_ns) from ops o group by 1", True),
        ("select sum(duration_ns) from module_calls", True),
        ("select sum(duration_ns) from ops where level = 'aten'", False),
        ("select sum(exclusive_ns), max(duration_ns) from ops", False),
        ("select sum(duration_ns) from steps", False),
    ],
)
def test_a_sum_of_rows_in_each_other_is_noted(run: Path, query: str, noted: bool) -> None:
    result = invoke("sql", run, query)
    assert result.exit_code == 0
    assert ("sum exclusive_ns" in result.stderr) is noted


def test_a_table_is_cut_at_a_thousand_rows_and_says_so(run: Path) -> None:
    many = "with recursive c(x) as (select 1 union all select x + 1 from c where x < 1500) select x from c"
    result = invoke("sql", run, many)
    assert result.exit_code == 0
    assert result.stderr == "These are the first 1,000 rows; --limit 0 shows all.\n"
    assert len(result.stdout.splitlines()) == 1002
    assert len(cli("sql", run, many, "--limit", 0).splitlines()) == 1502
    assert len(cli("sql", run, many, "--json").splitlines()) == 1500
    few = invoke("sql", run, many, "--csv", "--limit", 2)
    assert few.stdout == "x\n1\n2\n"
    assert few.stderr == "These are the first 2 rows; --limit 0 shows all.\n"


def test_no_rows_are_said(run: Path) -> None:
    result = invoke("sql", run, "select id from ops where name = 'nothing'")
    assert (result.exit_code, result.stderr) == (0, "No rows.\n")
    assert cli("sql", run, "select id from ops where name = 'nothing'", "--csv") == "id\n"


def test_a_query_can_come_from_standard_input(run: Path) -> None:
    done = subprocess.run([*COMMAND, "sql", str(run), "-", "--csv"], input="select count(*) n\nfrom steps",
                          env=environment(), capture_output=True, text=True, check=False)  # fmt: skip
    assert done.stdout == "n\n2\n"


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        (
            "drop table ops",
            "DROP is not allowed here: a recording is read, with one SELECT, and never changed.",
        ),
        ("select durtion_ns from ops", "There is no column 'durtion_ns'; the nearest is duration_ns."),
        ("select 1; select 2", "Ask one query at a time: there is more after the first one."),
        ("select '\x1b[31m' from", "The query ends too early."),
        ("select \x1b[31m from ops", 'SQLite does not take this query: unrecognized token: "\\x1b".'),
    ],
)
def test_what_is_wrong_is_one_sentence(run: Path, query: str, sentence: str) -> None:
    assert refused("sql", run, query) == sentence


def test_a_query_without_end_is_stopped(run: Path) -> None:
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"
    sentence = refused("sql", run, endless, "--timeout", 0.2)
    assert sentence == "The query took longer than 0.2 s and was stopped; --timeout gives it more."


def test_a_function_that_does_not_come_back_ends_the_process(run: Path) -> None:
    done = process("sql", run, BUSY, "--timeout", 0.2)
    assert done.returncode == 1
    assert done.stderr == "Error: The query took longer than 0.2 s and was stopped.\n"


def test_options_that_cannot_be_meant(run: Path) -> None:
    assert "is not in the range" in misused("sql", run, "select 1", "--timeout", 0)
    assert refused("sql", run.parent / "gone.sight", "select 1").startswith("There is no recording")


def test_nothing_of_a_recording_reaches_the_terminal_raw(hostile: list[Path]) -> None:
    for path in hostile:
        for name in TABLES:
            for form in ([], ["--json"], ["--csv"], ["--color", "always"]):
                result = invoke("sql", path, f'select * from "{name}" limit 99', *form)
                assert result.exit_code == 0
                shown = result.stdout
                assert "\x1b[31mred" not in shown
                assert "\u202e" not in shown
    titled = invoke("sql", hostile[0], 'select 1 as "\x1b[31m"', "--csv").stdout
    assert titled == "\\x1b[31m\n1\n"


def test_it_needs_no_torch(run: Path) -> None:
    done = process("sql", run, "select count(*) n from ops", "--json", command=WITHOUT_TORCH)
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"n": len(sl.load(run).ops)}


def test_on_a_terminal_it_fits(run: Path) -> None:
    shown, status = on_terminal("sql", run, "select * from ops limit 5", "--no-pager", NO_COLOR="1")
    assert status == 0
    assert shown.splitlines()[:3] == ["── row 1 " + "─" * 20, f"{'id':<19}  0", f"{'name':<19}  F.linear"]
    narrow, _ = on_terminal(
        "sql", run, "select id, text, module from ops limit 5", "--no-pager", NO_COLOR="1"
    )
    assert max(map(len, narrow.splitlines())) <= 100
    assert narrow.startswith("id  text")
