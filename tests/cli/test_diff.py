"""``sightline diff``: the verdict of two recordings, its exit codes, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import sightline as sl
from tests.cli.recorded import cli, invoke, refused


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three recordings: ``a`` and ``same`` are the same, ``b`` has another eps."""
    folder = tmp_path_factory.mktemp("runs")
    x = torch.arange(8.0).view(2, 4)
    for name, eps in (("a", 1e-5), ("same", 1e-5), ("b", 0.1)):
        model = nn.Sequential(nn.LayerNorm(4, eps=eps), nn.ReLU())
        with sl.trace(model, stats=True) as trace, sl.step("only"):
            model(x)
        trace.save(folder / f"{name}.sight")
    return folder


def test_the_verdict_names_the_reason(runs: Path) -> None:
    text = cli("diff", runs / "a.sight", runs / "b.sight")
    assert "they part: F.layer_norm" in text
    assert "eps 1e-05 against 0.1" in text


def test_the_same_run_is_the_same(runs: Path) -> None:
    assert "the same, to the last bit" in cli("diff", runs / "a.sight", runs / "same.sight")


@pytest.mark.parametrize("view", ["modules", "source"])
def test_other_views(runs: Path, view: str) -> None:
    assert "different" in cli("diff", runs / "a.sight", runs / "b.sight", "--view", view) or view == "source"


def test_json_has_everything(runs: Path) -> None:
    found = json.loads(cli("diff", runs / "a.sight", runs / "b.sight", "--json"))
    assert found["verdict"] == "different"
    assert found["divergence"]["reason"]["text"] == "eps 1e-05 against 0.1"


@pytest.mark.parametrize(("other", "code"), [("same", 0), ("b", 3)])
def test_the_exit_code_tells_a_script(runs: Path, other: str, code: int) -> None:
    ran = invoke("diff", runs / "a.sight", runs / f"{other}.sight", "--fail-on", "divergence")
    assert ran.exit_code == code


def test_steps_and_names(runs: Path) -> None:
    options = ("--step", "only", "--rename", "x=y")
    assert "eps" in cli("diff", runs / "a.sight", runs / "b.sight", *options)
    sentence = refused("diff", runs / "a.sight", runs / "b.sight", "--step", "none")
    assert "--step 'none' must be a step, counted from 0: 3, '3:5', 'last', or a name." in sentence


def test_a_wrong_name_is_answered(runs: Path) -> None:
    ran = invoke("diff", runs / "a.sight", runs / "b.sight", "--rename", "mixer")
    assert ran.exit_code == 2
    assert "--rename 'mixer' must be two names: --rename mixer=attn." in ran.output


def test_a_recording_that_is_not_there(runs: Path, tmp_path: Path) -> None:
    assert "gone.sight" in refused("diff", runs / "a.sight", tmp_path / "gone.sight")
