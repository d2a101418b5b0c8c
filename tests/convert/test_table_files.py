"""CSV, JSON and Parquet hold the same rows, whole or not at all."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from sightline.api import Trace
from sightline.convert.context import TableContext
from sightline.convert.encoding import plain_cell
from sightline.convert.table_files import (
    NO_PYARROW,
    check_format,
    to_csv,
    to_folder,
    to_json,
    to_parquet,
)
from sightline.convert.tables import TABLES
from sightline.data.index import Index
from sightline.data.trace_data import TensorMeta
from sightline.errors import CaptureError, UsageError
from tests.builders import make_trace
from tests.store.bundles import ZOO


def rows(trace: Trace, name: str) -> list[tuple[Any, ...]]:
    return [
        row for batch in TABLES[name].batches(TableContext(trace.index)) for row in zip(*batch, strict=True)
    ]


@pytest.mark.parametrize("name", TABLES)
def test_csv_has_a_header_and_every_row(name: str, tmp_path: Path) -> None:
    trace = ZOO["measured"]()
    to_csv(trace.index, TABLES[name], tmp_path / "x.csv")
    with open(tmp_path / "x.csv", encoding="utf-8", newline="") as file:
        header, *found = csv.reader(file)
    assert header == [column.name for column in TABLES[name].columns]
    kinds = [column.type for column in TABLES[name].columns]
    for text, row in zip(found, rows(trace, name), strict=True):
        for cell, item, kind in zip(text, row, kinds, strict=True):
            if item is None:
                assert cell == ""
            elif kind == "boolean":
                assert cell == str(item).lower()
            elif kind == "real":
                assert float(cell) == item
            elif kind == "integer" or item.isprintable():
                assert cell == plain_cell(str(item))


def test_csv_lets_no_escape_code_through(tmp_path: Path) -> None:
    for name in TABLES:
        to_csv(ZOO["hostile"]().index, TABLES[name], tmp_path / name)
        assert "\x1b" not in (tmp_path / name).read_text("utf-8")
    assert "\\x1b[31mred" in (tmp_path / "ops").read_text("utf-8")


@pytest.mark.parametrize("name", ZOO)
def test_json_is_every_table_in_one_document(name: str, tmp_path: Path) -> None:
    trace = ZOO[name]()
    to_json(trace.index, list(TABLES.values()), tmp_path / "x.json.gz")

    def no_constant(word: str) -> Any:
        raise AssertionError(word)

    document = json.loads(gzip.decompress((tmp_path / "x.json.gz").read_bytes()), parse_constant=no_constant)
    assert list(document) == ["sightline", "info", "tables"]
    assert document["info"]["ops"] == "both"
    assert {table: len(found) for table, found in document["tables"].items()} == {
        table: len(rows(trace, table)) for table in TABLES
    }
    assert [op["name"] for op in document["tables"]["ops"]] == [op.name for op in trace.ops]


@pytest.mark.parametrize("name", ["measured", "hostile", "empty"])
def test_parquet_reads_back_as_it_was(name: str, tmp_path: Path) -> None:
    trace = ZOO[name]()
    to_folder(trace.index, TABLES.values(), tmp_path / "tables", "parquet")
    for table in TABLES.values():
        found = parquet.read_table(tmp_path / "tables" / f"{table.name}.parquet")
        assert found.column_names == [column.name for column in table.columns]
        assert list(zip(*(column.to_pylist() for column in found.columns), strict=True)) == rows(
            trace, table.name
        )


def test_parquet_takes_values_out_of_its_range(tmp_path: Path) -> None:
    data = make_trace(1).data
    huge = TensorMeta((1 << 40, 1 << 40), None, "float32", "cpu")
    names = list(data.names)
    names[data.ops.name[0]] = "a\ud800b"
    trace = Trace(replace(data, metas=[huge, *data.metas[1:]], names=names))
    to_parquet(trace.index, TABLES["values"], tmp_path / "values.parquet")
    found = parquet.read_table(tmp_path / "values.parquet")
    assert max(found["numel"].to_pylist()) == (1 << 63) - 1
    to_parquet(trace.index, TABLES["ops"], tmp_path / "ops.parquet")
    assert "a?b" in parquet.read_table(tmp_path / "ops.parquet")["name"].to_pylist()


def test_without_pyarrow_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError) as caught:
        check_format("parquet")
    assert str(caught.value) == NO_PYARROW
    assert NO_PYARROW == "Parquet needs pyarrow, which is not installed: `pip install pyarrow` brings it."
    check_format("csv")


def test_a_fault_half_way_leaves_no_folder(tmp_path: Path) -> None:
    def fails(rows: int) -> None:
        raise RuntimeError(f"after {rows} rows")

    with pytest.raises(RuntimeError):
        to_folder(make_trace().index, TABLES.values(), tmp_path / "tables", "csv", fails)
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_in_a_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "ops.csv").write_text("old")
    (tmp_path / "mine.txt").write_text("mine")
    to_folder(make_trace().index, [TABLES["ops"]], tmp_path, "csv")
    assert (tmp_path / "ops.csv").read_text("utf-8").startswith("id,name,")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "ops.csv"]
    with pytest.raises(UsageError, match="is a file: give the name of a folder"):
        to_folder(make_trace().index, [TABLES["ops"]], tmp_path / "mine.txt", "csv")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match=r"file/tables cannot be written: Not a directory\.$"):
        to_folder(make_trace().index, [TABLES["ops"]], tmp_path / "file" / "tables", "csv")


def test_a_cell_that_begins_a_formula_is_only_shown(tmp_path: Path) -> None:
    trace = make_trace(1)
    names = ["=HYPERLINK(1)", "@SUM(A1)", "+1+1", "-1+1"]
    data = replace(trace.data, names=[names[at % 4] for at in range(len(trace.data.names))])
    to_csv(Index(data), TABLES["ops"], tmp_path / "ops.csv")
    with open(tmp_path / "ops.csv", encoding="utf-8", newline="") as file:
        written = {row["name"] for row in csv.DictReader(file)}
    assert written <= {f"'{name}" for name in names}
