"""The steps of a run on the first screen: what one does, and its losses, for loops of less usual kinds."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sightline as sl
from sightline.analysis.step_summaries import step_summaries
from sightline.data.index import Index
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


def _norm_of(optimizer: torch.optim.Optimizer) -> float:
    held = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    return math.sqrt(sum(float(one.grad.square().sum()) for one in held))


@BOTH_ENGINES
@pytest.mark.parametrize("rows", [1, 2])
def test_the_gradient_norm_is_that_of_all_tensors_of_the_optimizer(engine: Any, rows: int) -> None:
    """Those that belong to no module count, in each group, and those that no optimizer holds do not."""
    frozen, model = nn.Linear(3, 3), nn.Linear(3, 2)
    bare = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(2.0))]
    groups = [{"params": [bare[0], *model.parameters()]}, {"params": bare[1:]}][:rows]
    optimizer, norms = torch.optim.AdamW(groups, lr=0.1), []
    with sl.trace(engine=engine, stats=True) as t:
        for _ in range(3):
            out = model(frozen(torch.ones(4, 3))) * bare[0] * bare[1] * bare[2]
            frozen.zero_grad()
            optimizer.zero_grad()
            out.square().mean().backward()
            norms.append(_norm_of(optimizer))
            optimizer.step()
    assert [step.norm for step in step_summaries(t.index)] == pytest.approx(norms)


def test_a_part_of_the_gradients_has_no_norm() -> None:
    """Recordings may lack the gradients of tensors that belong to no module."""
    model, bare = nn.Linear(3, 2), nn.Parameter(torch.tensor(3.0))
    optimizer = torch.optim.SGD([*model.parameters(), bare], lr=0.1)
    with sl.trace(model, stats=True) as t:
        (model(torch.ones(4, 3)) * bare).mean().backward()
        optimizer.step()
    data = t.data
    names = ["" if name.startswith("parameter ") else name for name in data.names]
    assert [step.norm for step in step_summaries(t.index)] != [None]
    assert [step.norm for step in step_summaries(Index(replace(data, names=names)))] == [None]


def test_losses_of_several_lines_say_by_how_much_each_was_divided() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model) as t:
        for _ in range(2):
            whole = model(torch.randn(3, 4)).pow(2).mean()
            (whole / 2).backward()
            half = model(torch.randn(3, 4)).pow(2).mean() / 2
            half.backward()
            optimizer.step()
            whole.item(), half.item()
    note = next(line for line in str(t).splitlines() if line.startswith("loss "))
    assert re.search(r":\d+ \(then divided by 2\) and \S+:\d+ \(already divided by 2\)$", note)


def test_a_division_that_is_a_part_of_the_loss_is_not_named() -> None:
    one, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    x = torch.randn(3, 4)
    with sl.trace(stats=True) as t:
        for _ in range(2):
            (one(x).square().mean() / 2).backward()
            optimizers[0].step()
            (other(x).square().mean() + other(x).abs().mean()).div(2).backward()
            optimizers[1].step()
    note = next(line for line in str(t).splitlines() if line.startswith("loss "))
    assert "divided" not in note


def test_the_forward_pass_of_the_step_that_failed_is_named_as_that() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for number in range(3):
            y = model(torch.randn(3, 4))
            (y - torch.randn(3 + number // 2, 1)).mean().backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="must match the size"):
        with sl.trace(model) as t:
            train()
    outside = next(line for line in str(t).splitlines() if line.startswith("outside "))
    assert "Linear, in the step that failed; " in outside


def test_calls_that_a_backward_pass_makes_are_counted_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with sl.trace(model) as t:
        checkpoint(model, torch.randn(3, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert "modules     3 · calls 3 · 3 in backward passes" in str(t.summary())


class Adjoint(torch.autograd.Function):
    """Calls a module in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.module(gradient), None


@BOTH_ENGINES
def test_a_module_that_only_a_backward_pass_calls_is_called(engine: Any) -> None:
    model = nn.Linear(4, 4)
    with sl.trace(engine=engine) as t:
        Adjoint.apply(torch.randn(3, 4, requires_grad=True), model).sum().backward()
    row = next(line for line in str(t.summary()).splitlines() if line.startswith("Linear"))
    assert "only in backward passes" in row
    assert "modules     1 · calls 0 · 1 in backward passes" in str(t.summary())
