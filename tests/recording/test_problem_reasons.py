"""The reason that a problem gives is one that the recording shows, never only the usual one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl
from tests.recording.problematic import found

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def _problem(t: sl.Trace, kind: str) -> Any:
    return next(problem for problem in found(t) if problem.kind == kind)


# -- a step without gradients ---------------------------------------------------------------------------


def _number(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X), Y).item()
    torch.tensor(loss, requires_grad=True).backward()
    optimizer.step()


def _detached(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(X).detach().requires_grad_(), Y).backward()
    optimizer.step()


def _without_grad(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    with torch.no_grad():
        out = model(X)
    F.cross_entropy(out.requires_grad_(), Y).backward()
    optimizer.step()


def _cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    F.cross_entropy(model(X), Y).backward()
    optimizer.zero_grad()
    optimizer.step()


def _returned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.grad(F.cross_entropy(model(X), Y), list(model.parameters()))
    optimizer.step()


def _too_late(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()
    F.cross_entropy(model(X), Y).backward()


def _frozen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.requires_grad_(False)
    scale = torch.ones((), requires_grad=True)
    (model(X) * scale).mean().backward()
    optimizer.step()


REASONS: dict[str, tuple[Step, str, int]] = {
    "a number": (_number, "did not reach them: its loss was computed from a new tensor alone, tensor at ", 3),
    "detached": (_detached, "did not reach them: they are cut off by detach at ", 2),
    "no_grad": (_without_grad, "them: they are cut off by a block without gradients, linear", -1),
    "cleared": (_cleared, "they were cleared after loss.backward() and before the step", 0),
    "returned": (_returned, "none was left in .grad: torch.autograd.grad leaves none there", 0),
    "frozen": (_frozen, "they are frozen (requires_grad=False)", 0),
    "too late": (_too_late, "no backward pass ran before its first step", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_why_a_step_finds_no_gradient(case: str) -> None:
    step, reason, line = REASONS[case]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model) as t:
        for _ in range(3):
            step(model, optimizer)
    title = _problem(t, "step-without-gradients").title
    assert reason in title
    if line > 0:
        assert title.endswith(f"test_problem_reasons.py:{step.__code__.co_firstlineno + line}")
    if case != "cleared":
        assert "cleared" not in title


# -- a branch without gradients -------------------------------------------------------------------------


class _Printing(nn.Module):
    """A branch whose result is only looked at."""

    def __init__(self, look: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.used, self.unused, self.look = nn.Linear(4, 2), nn.Linear(4, 2), look

    def forward(self, x: Tensor) -> Any:
        used, unused = self.used(x), self.unused(x)
        seen = self.look(used, unused)
        return used * seen if isinstance(seen, Tensor) else used


LOOKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "equal": torch.equal,
    "accuracy": lambda used, unused: (used.argmax(-1) == unused.argmax(-1)).float().mean().item(),
    "printed": lambda used, unused: str(unused.argmax(-1).tolist()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_result_that_is_only_printed_is_not_said_to_pass_no_gradient_to_the_loss(look: str) -> None:
    model = _Printing(LOOKS[look])
    with sl.trace(model) as t:
        F.cross_entropy(model(X), Y).backward()
    problem = _problem(t, "no-gradient")
    assert "the result of F.linear at " in problem.title
    assert problem.title.endswith(" does not reach the loss")
    assert problem.why.startswith("They stay as they were initialised. Use what they compute in the loss")


def test_a_comparison_on_the_way_to_the_loss_passes_no_gradient() -> None:
    model = _Printing(lambda used, unused: unused > 0)
    with sl.trace(model) as t:
        F.cross_entropy(model(X), Y).backward()
    problem = _problem(t, "no-gradient")
    assert "> at " in problem.title
    assert problem.title.endswith(" passes none back")


# -- results that differ --------------------------------------------------------------------------------


def test_running_statistics_that_were_updated_are_no_lack_of_determinism() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    with sl.trace(model, stats=True) as t:
        model.eval()(X)
        model.train()(X * 3)
        model.eval()(X)
    assert "not-deterministic" not in [problem.kind for problem in found(t)]


def test_noise_is_still_found_beside_a_batch_norm() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            return self.norm(x) + torch.randn(4)

    model = Noisy().eval()
    with sl.trace(model, stats=True) as t:
        model(X)
        model(X)
    problem = _problem(t, "not-deterministic")
    assert "draws new random numbers" in problem.title
    assert problem.why.endswith("Draw noise only if self.training.")


@pytest.mark.parametrize("engine", ["auto", "python"])
@pytest.mark.parametrize("ops", ["both", "aten", "api"])
def test_lineage_shows_no_numbers_of_running_statistics_that_were_updated(engine: Any, ops: Any) -> None:
    model = nn.BatchNorm1d(4)
    with sl.trace(model, stats=True, engine=engine, ops=ops) as t:
        first = model(X)
        later = model.eval()(X)
    assert first.shape == later.shape
    calls = [call.outputs[0] for call in t.module_calls]
    before, after = (" ".join(str(t.lineage(value)).split()) for value in calls)
    assert "running_mean f32[4] (all 0)" in before
    assert "running_mean f32[4] (updated since it was measured)" in after
    assert str(t.lineage("running_mean")).endswith("buffer running_mean  updated since it was measured")


# -- numbers that are not finite ------------------------------------------------------------------------


def _nan(x: Tensor) -> Tensor:
    return (x - x) * torch.tensor(float("inf"))


def test_a_nan_that_did_no_harm_is_not_said_to_destroy_the_weights() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, stats=True) as t:
        out = model(X)
        F.cross_entropy(out, Y).backward()
        optimizer.step()
        _nan(out.detach()).sum()
    whys = [problem.why for problem in found(t) if problem.kind == "non-finite"]
    assert whys
    assert all("in no loss or gradient" in why for why in whys), whys


@pytest.mark.parametrize("is_loss", [False, True])
def test_a_nan_in_gradients_that_no_optimizer_took_is_said_to_be_in_gradients(is_loss: bool) -> None:
    model = nn.Linear(4, 2)
    with sl.trace(model, stats=True) as t:
        product = (model(X).abs() + 1e10).prod()
        loss = product if is_loss else torch.tanh(product)
        torch.autograd.grad(loss, list(model.parameters()))
    whys = [problem.why for problem in found(t) if problem.kind == "non-finite"]
    assert whys
    assert not any("no loss or gradient" in why or "no gradient that was measured" in why for why in whys), (
        whys
    )


def test_a_nan_that_reached_the_weights_is_said_to_have() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, stats=True) as t:
        (model(X) * _nan(X[:, :2])).sum().backward()
        optimizer.step()
    whys = [problem.why for problem in found(t) if problem.kind == "non-finite"]
    assert any("has reached weight" in why and "the weights are lost" in why for why in whys), whys
