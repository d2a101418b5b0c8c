"""The gradient norm of a step is that of all gradients that its optimizers use, or it is not known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sightline as sl
from sightline.analysis.step_summaries import step_summaries
from tests.recording import training_loops as loops
from tests.recording.engines import BOTH_ENGINES

_STEPS = 3


def norm_of(parameters: Iterable[nn.Parameter]) -> float:
    return math.hypot(*(float(one.grad.norm()) for one in parameters if one.grad is not None))


def found(t: Any) -> list[float | None]:
    return [step.norm for step in step_summaries(t.index)]


class Halves(nn.Module):
    """A model of two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def trained(clip: Callable[[Halves], Any], two: bool = False, **options: Any) -> tuple[Any, list[float]]:
    """A trace of a training with a clipping, and the norms of all gradients before it."""
    model, norms = Halves(), []
    parts = [model.body, model.head] if two else [model]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    with sl.trace(model, **options) as t:
        for _ in range(_STEPS):
            model.zero_grad()
            F.mse_loss(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
            norms.append(norm_of(model.parameters()))
            norm = clip(model)
            if isinstance(norm, torch.Tensor):
                norm.item()
            for optimizer in optimizers:
                optimizer.step()
    return t, norms


clip_norm, clip_value = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
_WHOLE: list[Callable[[Halves], Any]] = [
    lambda model: clip_norm(model.parameters(), 0.01),
    lambda model: clip_norm(model.parameters(), 0.01, foreach=False),
]
_PARTS: list[Callable[[Halves], Any]] = [
    lambda model: clip_norm(model.body.parameters(), 0.01),
    lambda model: clip_norm(model.head.weight, 0.01),
    lambda model: [clip_norm(part.parameters(), 0.01).item() for part in (model.body, model.head)],
    lambda model: clip_norm(model.body.parameters(), 0.01).item() + clip_norm(model.head.weight, 0.01).item(),
    lambda model: clip_norm(model.parameters(), 0.01, norm_type=math.inf),
    lambda model: clip_norm(model.parameters(), 0.01, norm_type=1),
]


@BOTH_ENGINES
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("clip", [*_WHOLE, *_PARTS, lambda model: clip_value(model.parameters(), 0.001)])
def test_the_norm_is_that_of_all_gradients_before_they_were_clipped(
    clip: Callable[[Halves], Any], two: bool, engine: Any
) -> None:
    t, norms = trained(clip, two, engine=engine, stats=True)
    assert found(t) == pytest.approx(norms, rel=1e-5)
    assert "gradient norm: before clipping" in " ".join(str(t).split())


@BOTH_ENGINES
@pytest.mark.parametrize("ops", ["both", "aten", "api"])
def test_without_statistics_it_is_the_norm_that_clipped_all_of_them(engine: Any, ops: Any) -> None:
    for clip in _WHOLE:
        t, norms = trained(clip, engine=engine, ops=ops)
        assert found(t) == pytest.approx(norms, rel=1e-5)
    for clip in _PARTS:
        t, _ = trained(clip, engine=engine, ops=ops)
        assert found(t) == [None] * _STEPS
        assert "gradient norm" not in str(t)


def test_a_norm_that_covers_more_than_the_optimizer_holds_is_not_its_own() -> None:
    model = Halves()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with sl.trace(model) as t:
        for _ in range(_STEPS):
            model.zero_grad()
            F.mse_loss(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
            clip_norm(model.parameters(), 1.0).item()
            optimizer.step()
    assert found(t) == [None] * _STEPS


@BOTH_ENGINES
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_out_of_compiled_code_count(engine: Any, clips: bool) -> None:
    """They are not measured: a norm that clipping computed is known, that of the others alone is none."""
    torch._dynamo.reset()
    model, norms = Halves(), []
    model.body = torch.compile(model.body, backend="aot_eager")  # type: ignore[assignment]  # a callable
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, engine=engine, stats=True) as t:
        for _ in range(_STEPS):
            model.zero_grad()
            F.mse_loss(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
            norms.append(norm_of(model.parameters()))
            if clips:
                clip_norm(model.parameters(), 1.0)
            optimizer.step()
    assert found(t) == (pytest.approx(norms, rel=1e-5) if clips else [None] * _STEPS)
    assert ("those of compiled code are not measured" in str(t)) is not clips


def test_a_gradient_of_an_earlier_step_makes_the_norm_unknown() -> None:
    """The optimizer uses it again, though no backward pass of the step has made it."""
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, stats=True) as t:
        for step in range(_STEPS):
            model.head.zero_grad()
            features = model.body(torch.randn(5, 4))
            model.head(features if step == 0 else features.detach()).square().mean().backward()
            optimizer.step()
    assert [norm is None for norm in found(t)] == [False, True, True]


@BOTH_ENGINES
def test_a_critic_in_turn_with_its_generator_has_no_norm(engine: Any) -> None:
    """Neither in the steps in which it is alone: the column would be of one model, then of none."""
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (critic, generator)]
    with sl.trace(engine=engine, stats=True) as t:
        for _ in range(2):
            for times, optimizer in zip((2, 1), optimizers, strict=True):
                for _ in range(times):
                    optimizer.zero_grad()
                    critic(generator(torch.randn(3, 2))).mean().backward()
                    optimizer.step()
    assert len(found(t)) == 4
    assert set(found(t)) == {None}


@BOTH_ENGINES
@pytest.mark.parametrize("options", [{"stats": True}, {}, {"ops": "aten"}, {"ops": "api"}])
@pytest.mark.parametrize("own", [False, True])
def test_a_step_is_skipped_where_the_scaler_found_an_infinity(engine: Any, options: Any, own: bool) -> None:
    """Also one of an optimizer whose steps are not seen."""
    model = Halves()
    optimizer: Any = loops.ForeignOptimizer(model) if own else torch.optim.SGD(model.parameters(), 0.1)
    weights, same = model.head.weight, []
    with sl.trace(model, engine=engine, **options) as t:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            before = weights.detach().clone()
            loss = model(torch.randn(5, 4)).square().mean() * (math.inf if step in (0, 2) else 1)
            model.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            same.append(torch.equal(before, weights))
    steps = step_summaries(t.index)
    assert [step.skipped for step in steps] == same == [True, False, True, False]
    if "stats" in options:
        finite = [step.norm is not None and math.isfinite(step.norm) for step in steps]
        assert finite == [False, not own, False, True]
        assert all(step.norm is not None for step in steps if step.skipped)


@BOTH_ENGINES
@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_is_without_the_scale_of_a_scaler(engine: Any, fused: bool) -> None:
    """A fused optimizer divides the gradients itself, and leaves them scaled where they are."""
    model, norms = Halves(), []
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    with sl.trace(model, engine=engine, stats=True) as t:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(5, 4)).square().mean()).backward()
            norms.append(norm_of(model.parameters()) / 64)
            scaler.step(optimizer)
            scaler.update()
    assert found(t) == pytest.approx(norms, rel=1e-5)
