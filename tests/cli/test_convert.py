"""``sightline convert``: the format that was meant, nothing lost, nothing half-written, no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

import sightline as sl
from sightline.convert.tables import TABLES
from tests.cli.recorded import WITHOUT_TORCH, invoke, misused, on_terminal, process, refused
from tests.convert.trace_events import read, slices


def made(*arguments: object) -> str:
    """The line a conversion ends with."""
    result = invoke("convert", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    "name", ["run.perfetto.json", "run.trace.json", "run.perfetto.json.gz", "RUN.PERFETTO.JSON"]
)
def test_a_timeline_by_its_name(run: Path, tmp_path: Path, name: str) -> None:
    trace = sl.load(run)
    line = made(run, "-o", tmp_path / name)
    assert line.startswith(f"Wrote {tmp_path / name}: {len(trace.ops):,} ops, ")
    events = read(tmp_path / name)
    assert len(slices(events, "api")) + len(slices(events, "aten")) == len(trace.ops)
    trace.to_perfetto().save(tmp_path / "other.json")
    assert read(tmp_path / "other.json") == events


def test_one_table_by_its_name_or_by_the_option(run: Path, tmp_path: Path) -> None:
    made(run, "-o", tmp_path / "ops.csv")
    made(run, "-o", tmp_path / "x.csv", "--table", "ops")
    made(run, "-o", tmp_path / "calls.parquet")
    assert (tmp_path / "ops.csv").read_text("utf-8") == (tmp_path / "x.csv").read_text("utf-8")
    assert parquet.read_table(tmp_path / "calls.parquet").num_rows == len(sl.load(run).module_calls)


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_all_tables_in_a_folder(run: Path, tmp_path: Path, format: str) -> None:
    line = made(run, "-o", tmp_path / "tables", "--to", format)
    assert f"tables: {len(TABLES)} files, " in line
    assert sorted(os.listdir(tmp_path / "tables")) == sorted(f"{name}.{format}" for name in TABLES)


def test_some_tables_in_a_folder_or_a_document(run: Path, tmp_path: Path) -> None:
    made(run, "-o", tmp_path / "some", "--to", "csv", "--table", "ops", "--table", "vals", "--table", "ops")
    assert sorted(os.listdir(tmp_path / "some")) == ["ops.csv", "values.csv"]
    made(run, "-o", tmp_path / "some.json", "--to", "json", "--table", "steps")
    document = json.loads((tmp_path / "some.json").read_text("utf-8"))
    assert [step["name"] for step in document["tables"]["steps"]] == ["step0", "step1"]
    assert list(document["tables"]) == ["steps"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "run.json"], "run.json can be a timeline or plain tables: add --to perfetto or --to json."),
        (["-o", "run"], "The format of run is unknown: add --to perfetto, csv, json or parquet."),
        (["-o", "run.csv"],
         "run.csv holds one table: choose it with --table, or give a folder for all of them."),
        (["-o", "x.csv", "--table", "ops", "--table", "info"],
         "x.csv holds one table, not 2: give a folder instead."),
        (["-o", "x.csv", "--table", "op"], f"There is no table 'op'; there are {', '.join(TABLES)}."),
        (["-o", "x.trace.json", "--table", "ops"],
         "A timeline has no tables: --table goes with csv, json and parquet."),
        (["-o", "\x1b[31m"], "The format of \\x1b[31m is unknown: add --to perfetto, csv, json or parquet."),
        ([], "Missing option '-o' / '--output'."),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_said(run: Path, arguments: list[str], sentence: str) -> None:
    assert misused("convert", run, *arguments) == sentence


def test_nothing_is_overwritten_without_being_told_to(run: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "ops.csv", tmp_path / "tables"
    file.write_text("mine")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert refused("convert", run, "-o", file) == f"{file} is there already: --force replaces it."
    assert refused("convert", run, "-o", folder, "--to", "csv") == (
        f"{folder} is there and not empty: --force replaces its files of the same names."
    )
    assert file.read_text() == "mine"
    assert os.listdir(folder) == ["notes.txt"]
    made(run, "-o", file, "--force")
    made(run, "-o", folder, "--to", "csv", "--force")
    assert file.read_text("utf-8") == (folder / "ops.csv").read_text("utf-8")
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_empty_folder_is_filled(run: Path, tmp_path: Path) -> None:
    made(run, "-o", tmp_path, "--to", "csv", "--table", "steps")
    assert os.listdir(tmp_path) == ["steps.csv"]


def test_the_recording_itself_is_never_written_to(run: Path) -> None:
    before = sorted(os.listdir(run))
    for target in (run, run / "rank0.db", run / "tables", run / ".." / run.name / "x.csv"):
        sentence = refused("convert", run, "-o", target, "--to", "csv", "--table", "ops", "--force")
        assert sentence == f"{target} is in the recording itself: write it somewhere else."
    assert sorted(os.listdir(run)) == before


def test_what_cannot_be_written_is_said(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "gone" / "ops.csv"
    assert refused("convert", run, "-o", target) == f"{target} cannot be written: No such file or directory."
    assert refused("convert", run, "-o", tmp_path, "--to", "perfetto") == (
        f"{tmp_path} is a folder: give the name of a file in it."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_recording_leaves_no_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.sight").mkdir()
    whole = (run / "rank0.db").read_bytes()
    (tmp_path / "run.sight" / "rank0.db").write_bytes(whole[: len(whole) // 2])
    refused("convert", tmp_path / "run.sight", "-o", tmp_path / "ops.csv")
    assert sorted(os.listdir(tmp_path)) == ["run.sight"]


def test_nothing_hostile_gets_through(hostile: list[Path], tmp_path: Path) -> None:
    for number, path in enumerate(hostile):
        made(path, "-o", tmp_path / f"{number}.perfetto.json")
        read(tmp_path / f"{number}.perfetto.json")
        made(path, "-o", tmp_path / f"{number}.json", "--to", "json")
        assert "\x1b" not in (tmp_path / f"{number}.json").read_text("utf-8")
        made(path, "-o", tmp_path / f"{number}", "--to", "csv")
        made(path, "-o", tmp_path / f"{number}p", "--to", "parquet")
        names = sorted(f"{name}.csv" for name in TABLES)
        assert sorted(os.listdir(tmp_path / f"{number}")) == names


def test_it_needs_no_torch(run: Path, tmp_path: Path) -> None:
    for format in ("perfetto", "csv", "json", "parquet"):
        done = process("convert", run, "-o", tmp_path / f"to_{format}", "--to", format, command=WITHOUT_TORCH)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"to_{format}").exists()


def test_it_can_be_written_to_a_pipe(run: Path) -> None:
    done = process("convert", run, "-o", "/dev/stdout", "--to", "perfetto")
    assert len(json.loads(done.stdout)["traceEvents"]) > len(sl.load(run).ops)


def test_no_bar_is_shown_for_what_is_quick(run: Path, tmp_path: Path) -> None:
    shown, status = on_terminal("convert", run, "-o", tmp_path / "ops.csv")
    assert status == 0
    assert shown.startswith("Wrote ")
    assert "%" not in shown


def test_tables_have_rows(run: Path, tmp_path: Path) -> None:
    trace = sl.load(run)
    line = made(run, "-o", tmp_path / "calls.csv")
    assert line.startswith(f"Wrote {tmp_path / 'calls.csv'}: {len(trace.module_calls):,} rows, ")
