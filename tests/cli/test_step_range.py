"""``--step``: every verb takes it, in the same words."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import sightline as sl
from tests.cli.recorded import cli, refused
from tests.recording import training_loops as loops


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run.sight"
    model = loops.net()
    with sl.trace(model, capture=True, stats=True, name="net") as t:
        loops.plain(model, 4)
    t.save(path)
    return path


@pytest.mark.parametrize("view", "overview code log order summary source memory problems nonfinite".split())
def test_every_view_takes_a_step(trained: Path, view: str) -> None:
    whole, one = (cli("show", trained, "--view", view, *step) for step in ((), ("--step", "2")))
    assert one
    assert one != whole
    assert cli("show", trained, "--view", view, "--step", "last").count("\n") <= whole.count("\n") + 1


def test_ops_of_a_step_are_those_of_the_step(trained: Path) -> None:
    t = sl.load(trained)
    rows = [json.loads(line) for line in cli("ops", trained, "--step", "1", "--json").splitlines()]
    assert [row["name"] for row in rows] == [op.name for op in t.steps[1].ops]
    both = cli("ops", trained, "--step", "1:3", "--json")
    assert both.count("\n") == len(t.steps[1].ops) + len(t.steps[2].ops)


def test_the_numbers_of_ops_and_lineage_agree(trained: Path) -> None:
    rows = [json.loads(line) for line in cli("ops", trained, "--step", "1", "--json").splitlines()]
    mean = next(row for row in rows if row["name"] == "mean")
    lineage = cli("lineage", trained, mean["id"], "--step", "1")
    assert lineage.split()[0] == mean["outputs"][0]["value"]
    assert "loss" in cli("lineage", trained, "loss", "--step", "1")


def test_every_table_is_that_of_the_step(trained: Path, tmp_path: Path) -> None:
    counts = cli("sql", trained, "select count(*) from module_calls", "--step", "2", "--csv")
    assert counts.splitlines()[1] == "4"
    assert cli("sql", trained, "select name from steps", "--step", "2", "--csv") == "name\nstep2\n"
    assert cli("sql", trained, "select count(*) from steps", "--csv").splitlines()[1] == "4"
    from tests.cli.recorded import invoke

    assert invoke("convert", trained, "--step", "2", "-o", tmp_path / "module_calls.csv").exit_code == 0
    with (tmp_path / "module_calls.csv").open() as file:
        assert len(list(csv.reader(file))) == 1 + 4


def test_graphs_and_tensors_of_a_step(trained: Path) -> None:
    whole, one = (cli("graph", trained, "--no-fold", "--to", "list", *step) for step in ((), ("--step", "0")))
    assert len(one) < len(whole) / 2
    keys = [json.loads(line)["key"] for line in cli("tensors", trained, "--step", "2", "--json").splitlines()]
    assert {key.split("/")[-2] for key in keys} == {"2"}


@pytest.mark.parametrize("verb", ["show", "ops", "sql", "graph", "tensors", "lineage"])
def test_a_step_that_is_not_there_is_answered_with_those_there_are(trained: Path, verb: str) -> None:
    more = {"sql": ["select 1"], "lineage": ["loss"]}.get(verb, [])
    sentence = "--step '9' is not there; this recording has the steps 0 to 3."
    assert refused(verb, trained, *more, "--step", "9") == sentence


def test_what_is_no_step_is_said_in_the_words_of_the_command_line(trained: Path) -> None:
    sentence = "--step 'x' must be a step, counted from 0: 3, '3:5', 'last', or a name."
    assert refused("show", trained, "--step", "x") == sentence
