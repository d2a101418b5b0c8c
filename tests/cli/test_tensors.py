"""``sightline tensors``: the kept tensors as a table, and one of them as a picture."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sightline as sl
from sightline.cli.tensor_plot import BARS, SHADES, array_statistics, tensor_lines
from sightline.errors import UsageError
from sightline.store import save
from sightline.store.shards.stores import MemoryStore
from sightline.views.rendering import View
from tests.builders import make_trace
from tests.cli.recorded import cli, misused, refused
from tests.store.shards.captured import capture


def drawn(given: Any, *at: int) -> list[str]:
    return str(View(tuple(tensor_lines(np.asarray(given), at)))).splitlines()


# -- the table ---------------------------------------------------------------------------------------------


def test_the_table_has_every_tensor(run: Path) -> None:
    trace = sl.load(run)
    lines = cli("tensors", run).splitlines()
    assert lines[0].split("  ")[0] == "key"
    assert [line.split()[0] for line in lines[2:]] == list(trace.tensors)
    wrong = next(line for line in lines if line.startswith("step1/blocks.0.fc/output"))
    assert wrong.endswith("8 NaN")
    listed = cli("tensors", run, "--no-stats").splitlines()
    assert listed[0].split() == ["key", "tensor", "size", "value"]


def test_json_and_csv(run: Path) -> None:
    trace = sl.load(run)
    rows = [json.loads(line) for line in cli("tensors", run, "--json").splitlines()]
    assert [row["key"] for row in rows] == list(trace.tensors)
    for row in rows:
        tensor = trace.tensors[row["key"]]
        values = tensor.numpy().astype(np.float64)
        assert row["shape"] == list(tensor.shape)
        assert row["nans"] == int(np.isnan(values).sum())
        assert row["mean"] == pytest.approx(float(np.nanmean(values)))
        assert row["std"] == pytest.approx(float(np.nanstd(values, ddof=1)))
    table = list(csv.DictReader(cli("tensors", run, "--csv").splitlines()))
    assert [row["key"] for row in table] == list(trace.tensors)
    assert table[0]["shape"] == "2; 5; 8"


def test_filters(run: Path) -> None:
    trace = sl.load(run)

    def keys(*options: object) -> list[str]:
        return [json.loads(line)["key"] for line in cli("tensors", run, *options, "--json").splitlines()]

    assert (
        keys("--module", "blocks.0", "--step", "step1")
        == trace.tensors.where(module="blocks.0", step="step1").keys()
    )
    assert keys("--role", "output", "--tail", 2) == trace.tensors.where(role="output").keys()[-2:]
    assert keys("blocks.1") == trace.tensors["blocks.1"].keys()
    assert keys("blocks.1", "--step", "step0") == ["step0/blocks.1/output/0/0"]


def test_a_name_that_was_not_kept_names_the_near_ones(run: Path) -> None:
    sentence = refused("tensors", run, "blocks.0.fcc")
    assert sentence.startswith("No tensor was captured as 'blocks.0.fcc'; did you mean 'blocks.0.fc'")
    sentence = refused("tensors", run, "step1/blocks.0.fc/output/0/0")
    assert "did you mean 'step0/blocks.0.fc/output/0/0', 'step1/blocks.0.fc/output/1/0' or" in sentence
    assert refused("tensors", run, "--module", "nowhere") == (
        "--module nowhere matches none of the 16 kept tensors."
    )


def test_a_recording_without_tensors(tmp_path: Path) -> None:
    save(make_trace().data, tmp_path / "run.sight")
    assert cli("tensors", tmp_path / "run.sight") == (
        "(no tensors were kept: record with sightline run --capture GLOB)\n"
    )
    assert cli("tensors", tmp_path / "run.sight", "--json") == ""


def test_a_dtype_that_numpy_does_not_know(tmp_path: Path) -> None:
    info = capture("fc", dtype="qint9", shape=(3,))
    held = MemoryStore({info.key: np.zeros(5, dtype=np.uint8)})
    save(replace(make_trace().data, captures=[info], store=held), tmp_path / "run.sight")
    assert cli("tensors", tmp_path / "run.sight").splitlines()[2] == "fc/output/0/0  qint9[3]   5 B"
    row = json.loads(cli("tensors", tmp_path / "run.sight", "--json"))
    assert (row["min"], row["nans"]) == (None, 0)
    assert refused("tensors", tmp_path / "run.sight", info.key).startswith("numpy has no numbers for qint9")


def test_wrong_calls(run: Path) -> None:
    assert misused("tensors", run, "--slice", "0") == (
        "--slice needs a KEY: it chooses a part of that tensor to draw."
    )
    assert misused("tensors", run, "step0/head/output/0/0", "--slice", "a") == (
        "Invalid value for --slice: 'a' is not a list of whole numbers; write 0,2."
    )
    assert refused("tensors", run, "head", "--slice", "0") == (
        "--slice is for one tensor; 'head' means 2: give 'step0/head/output/0/0', 'step1/head/output/1/0'."
    )
    assert refused("tensors", run, "step0/head/output/0/0", "--slice", "2") == (
        "--slice 2 is out of dimension 0, which has 2 entries."
    )
    assert misused("tensors", run, "--head", 1, "--tail", 1).startswith(
        "--head and --tail do not go together"
    )


# -- one tensor --------------------------------------------------------------------------------------------


def test_one_tensor_is_drawn(run: Path) -> None:
    lines = cli("tensors", run, "step1/blocks.0.fc/output/1/0", "--slice", "0").splitlines()
    assert lines[0] == "step1/blocks.0.fc/output/1/0  f32[2, 5, 8]  320 B"
    assert lines[1].startswith("value      $")
    assert "recorded.py:" in lines[1]
    assert lines[2].startswith("numbers    ")
    assert lines[2].endswith("8 NaN")
    at = lines.index("[0, :, :]  rows 0 … 4, columns 0 … 7")
    assert lines[at + 2] == "N" * 16
    assert lines[at + 1].strip(SHADES) == ""
    assert lines[-1].endswith("N NaN")
    assert cli("tensors", run, "blocks.0.fc", "--step", "step1", "--slice", "0").splitlines() == lines


def test_a_line_is_drawn_as_bars() -> None:
    assert drawn([0.0, 1.0, math.nan, 7.0, -math.inf])[-3:] == [
        "entries 0 … 4",
        "▁▂N█∞",
        "▁ 0   █ 7   N NaN   ∞ Inf",
    ]
    long = drawn(np.arange(1000))
    assert long[-3] == "entries 0 … 999, averaged"
    assert len(long[-2]) == 72
    assert long[-2] == "".join(sorted(long[-2], key=BARS.index))


def test_what_is_not_finite_is_never_averaged_away() -> None:
    given = np.zeros((500, 900))
    given[250, 450], given[499, 899] = np.nan, np.inf
    lines = drawn(given)
    maps = lines[lines.index("rows 0 … 499, columns 0 … 899, averaged") + 1 : -1]
    assert len(maps) == 24
    assert {len(row) for row in maps} == {72}
    assert sum(row.count("N") for row in maps) == 1
    assert maps[-1][-1] == "∞"


def test_more_dimensions_are_sliced() -> None:
    given = np.arange(24).reshape(2, 3, 4)
    assert drawn(given)[-5] == "[0, :, :]  rows 0 … 2, columns 0 … 3"
    assert drawn(given, 1, -1)[-3:] == ["[1, 2, :]  entries 0 … 3", "▁▃▆█", "▁ 20   █ 23"]
    assert drawn(given, 1, 2, 3)[-2:] == ["[1, 2, 3]", "23"]
    with pytest.raises(UsageError, match="--slice has 4 indices; the tensor has 3 dimensions"):
        drawn(given, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (3.5, "3.5"),
        ([], "there are none"),
        (np.zeros((2, 0, 3)), "there are none"),
        ([math.nan] * 4, "all NaN"),
        ([True, False, True], "0 … 1, mean 0.667, std 0.577"),
        ([3 + 4j, 0], "0 … 5, mean 2.5, std 3.54 of the magnitudes"),
        ([1e308, -1e308, 0], "-1e+308 … 1e+308, mean 0, std 1e+308"),
        ([5e-324, 0, -5e-324], "-4.94e-324 … 4.94e-324, mean 0, std 4.94e-324"),
        (np.full((3, 3), 7, dtype=np.uint8), "all 7"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_any_numbers_can_be_drawn(given: Any, numbers: str) -> None:
    assert drawn(given)[0] == f"numbers    {numbers}"


@pytest.mark.filterwarnings("error")
def test_a_large_tensor_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    given = np.random.default_rng(0).normal(5, 2, (37, 41))
    given[3, 4], given[5, 6] = np.nan, np.inf
    whole = array_statistics(given)
    monkeypatch.setattr("sightline.cli.tensor_plot._CHUNK", 100)
    parts = array_statistics(given)
    assert (parts.low, parts.high, parts.nans, parts.infs) == (whole.low, whole.high, 1, 1)
    assert parts.mean == pytest.approx(whole.mean)
    assert parts.std == pytest.approx(np.std(given[np.isfinite(given)], ddof=1))
