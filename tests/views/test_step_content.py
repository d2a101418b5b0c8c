"""The steps of a run on the first screen: what one does, and its losses, for loops of less usual kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sightline as sl
from tests.recording.engines import BOTH_ENGINES


def _line(t: sl.Trace, title: str) -> str:
    return next(line for line in str(t).splitlines() if line.startswith(title))


class _Deep(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in self.cells:
            x = checkpoint(cell, x, use_reentrant=self.reentrant)
        return x


@BOTH_ENGINES
@pytest.mark.parametrize("reentrant", [False, True])
def test_modules_that_run_again_for_the_backward_pass_are_not_called_by_a_step(
    engine: Any, reentrant: bool
) -> None:
    model = _Deep(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    with sl.trace(model, engine=engine) as t:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    assert _line(t, "one step") == "one step  _Deep; backward; SGD (lr 0.1)"


@BOTH_ENGINES
def test_backward_passes_are_counted_without_api_calls(engine: Any) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, engine=engine, ops="aten") as t:
        for _ in range(3):
            model(torch.ones(2, 4)).mean().backward()
            (torch.ones_like(model.weight) * model.weight).sum().backward()
            optimizer.step()
    assert _line(t, "one step") == "one step  Linear; backward ×2; SGD (lr 0.1)"
    starts = [op for op in t.ops if op.name == "ones_like" and op.phase == "backward"]
    assert len(starts) == 6


def test_a_closure_that_runs_several_times_has_one_range_of_losses() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0
    )
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.ones(2, 4)) - 5).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    with sl.trace(model) as t:
        optimizer.step(closure)
    assert f"; loss {losses[0]:.3g}…{losses[-1]:.3g}; " in _line(t, "steps")


@BOTH_ENGINES
def test_other_gradients_are_no_backward_passes(engine: Any) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    with sl.trace(model, engine=engine, ops="aten") as t:
        for _ in range(2):
            out = model(x).mean()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            (out + slope.sum()).backward()
            optimizer.step()
    assert _line(t, "one step") == "one step  Linear; backward; SGD (lr 0.1)"


@BOTH_ENGINES
def test_the_gradient_norm_is_that_of_the_gradients_an_optimizer_used(engine: Any) -> None:
    """A critic gets gradients of another loss too, after its own step; nothing uses them."""
    critic = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    norms = []
    with sl.trace(engine=engine, stats=True) as t:
        for _ in range(2):
            optimizer.zero_grad()
            critic(torch.ones(3, 2)).mean().backward()
            grads = [each.grad for each in critic.parameters() if each.grad is not None]
            norms.append(sum(float(grad.square().sum()) for grad in grads) ** 0.5)
            optimizer.step()
            (-9 * critic(torch.ones(3, 2)).mean()).backward()
    table = [line.split() for line in str(t).splitlines() if line[:2] in ("0 ", "1 ")]
    assert [row[-3] for row in table] == [f"{norm:.3g}" for norm in norms]
