"""``sightline demo`` runs wherever the package is installed and shows every view."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from examples import tiny_transformer as example
from sightline.cli import VERBS, demo, main


def test_every_verb_can_be_asked_for_help() -> None:
    for verb, what in VERBS.items():
        result = CliRunner().invoke(main, [verb, "--help"])
        assert result.exit_code == 0
        assert what in result.output.replace("\n  ", " ")


def test_an_unknown_verb_is_said_so() -> None:
    result = CliRunner().invoke(main, ["dmeo"])
    assert result.exit_code == 2
    assert "No such command 'dmeo'" in result.output


def test_the_source_of_the_example_can_be_shown() -> None:
    result = CliRunner().invoke(main, ["demo", "--source"])
    assert result.exit_code == 0
    assert "class TinyTransformer(nn.Module):" in result.output


def test_the_command_and_the_example_know_the_same_views() -> None:
    assert tuple(example.VIEWS) == demo.VIEWS


def test_the_demo_prints_every_view(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(main, ["demo"])
    printed = capfd.readouterr()
    assert printed.err == ""
    assert result.exit_code == 0
    for headline in example.VIEWS.values():
        assert f"── {headline} ──" in printed.out
    assert "scores = q @ k.transpose(-2, -1)" in printed.out
    assert "click" not in printed.out  # the example is shown, not what started it


def test_one_view_can_be_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert CliRunner().invoke(main, ["demo", "--view", "call_order"]).exit_code == 0
    printed = capfd.readouterr().out
    assert "blocks.0.attn" in printed
    assert "t.summary()" not in printed


def test_the_model_sees_nothing_of_the_future() -> None:
    model, (tokens, _) = example.TinyTransformer(), example.sample()
    changed = tokens.clone()
    changed[:, -1] = 0
    assert torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])


def test_the_example_is_a_sound_recording() -> None:
    with torch.random.fork_rng(devices=[]):
        trace = example.record()
    trace.validate()
    assert trace.ops.where(phase="backward")
