"""``sightline demo`` runs wherever the package is installed and shows every view."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from sightline.cli import VERBS, main
from sightline.cli.demo import VIEWS
from sightline.cli.demo_model import TinyTransformer, next_token_loss, sample


def test_every_verb_can_be_asked_for_help() -> None:
    for verb, what in VERBS.items():
        result = CliRunner().invoke(main, [verb, "--help"])
        assert result.exit_code == 0
        assert what in result.output.replace("\n  ", " ")


def test_an_unknown_verb_is_said_so() -> None:
    result = CliRunner().invoke(main, ["dmeo"])
    assert result.exit_code == 2
    assert "No such command 'dmeo'" in result.output


def test_the_source_of_the_model_can_be_shown() -> None:
    result = CliRunner().invoke(main, ["demo", "--source"])
    assert result.exit_code == 0
    assert "class TinyTransformer(nn.Module):" in result.output


def test_the_model_learns_nothing_from_the_future() -> None:
    model, (tokens, _) = TinyTransformer(), sample()
    changed = tokens.clone()
    changed[:, -1] = 0
    assert torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])


def test_the_model_trains() -> None:
    model, (tokens, targets) = TinyTransformer(), sample()
    loss = next_token_loss(model, tokens, targets)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_is_printed(view: str) -> None:
    result = CliRunner().invoke(main, ["demo", "--view", view], catch_exceptions=False)
    assert result.exit_code == 0
    assert VIEWS[view] in result.output
    assert len(result.output.splitlines()) > 5


def test_the_demo_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    CliRunner().invoke(main, ["demo", "--view", "overview"])
    assert torch.equal(torch.rand(4), wanted)
