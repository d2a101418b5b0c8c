"""``live=`` prints while it runs, so that what came before a crash is on the screen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sightline as sl
from tests.recording.nets import Net

X = torch.ones(1, 4)


def test_code_is_printed_up_to_the_crash(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net(width=7)
    with pytest.raises(RuntimeError), sl.trace(net, live="code") as t:
        net(X)
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("addmm(f32[2], f32[1, 8], f32[7, 2]) !! raised")
    assert "h = torch.relu(self.fc1(x))" in shown
    assert shown.count("# relu(f32[1, 8]) -> f32[1, 8];") == 1
    assert not t.info["fault_count"]


def test_live_code_is_what_code_shows_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    with sl.trace(net, live="code") as t:
        net(X).sum().backward()
    live = [line.strip("│ ") for line in capsys.readouterr().out.splitlines() if "->" in line]
    after = [line.strip("│ ") for line in str(t.code(names=False)).splitlines() if "->" in line]
    assert live == after


def test_log_is_printed_in_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    with sl.trace(net, live="log"):
        net(X)
    shown = capsys.readouterr().out
    assert "● fc1 (Linear) (in_features: 4, out_features: 8, bias: True)" in shown
    assert "● torch.relu() @ [Net.forward]" in shown


@pytest.mark.parametrize("ops", ["none", "api", "aten"])
def test_at_every_level(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    for live in ("code", "log"):
        with sl.trace(net, ops=ops, live=live) as t:  # type: ignore[arg-type]  # both are choices
            net(X)
        assert not t.info["fault_count"]
    assert "fc2" in capsys.readouterr().out


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.mul(2)


def test_what_ones_own_backward_runs_is_shown_where_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    with sl.trace(ops="aten", live="code") as t:
        Doubled.apply(x).sum().backward()
    printed = capsys.readouterr().out
    assert "in Doubled.backward:" in printed
    assert "in Doubled.backward:" in str(t.code())
