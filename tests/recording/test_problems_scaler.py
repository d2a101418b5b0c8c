"""A gradient scaler and what runs between the backward pass and the step: clipping, schedulers, warnings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

import sightline as sl
from tests.recording import training_loops as loops
from tests.recording.engines import BOTH_ENGINES
from tests.recording.problematic import found, kinds

STEPS = 4


def scaled(
    *,
    unscales: bool = False,
    scale: float = 2.0**16,
    enabled: bool = True,
    clip: Any = nn.utils.clip_grad_norm_,
    limit: float = 1.0,
    scheduler_first: bool | None = None,
    overflows: int = -1,
    **options: Any,
) -> Any:
    """A trace of a training loop with a gradient scaler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sl.trace(model, **options) as t:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
        scheduler = StepLR(optimizer, 2)
        for number in range(STEPS):
            loss = F.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
            loss = loss * float("inf") if number == overflows else loss
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip(model.parameters(), limit)
            if scheduler_first:
                scheduler.step()
            scaler.step(optimizer)
            scaler.update()
            if scheduler_first is False:
                scheduler.step()
    return t


@BOTH_ENGINES
@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_gradients_that_are_clipped_before_they_are_unscaled(engine: str, stats: bool, clip: Any) -> None:
    t = scaled(engine=engine, stats=stats, clip=clip, scheduler_first=False)
    (problem,) = found(t)
    assert (problem.kind, problem.count) == ("scaled-gradients", STEPS)
    assert problem.title.startswith(
        f"{clip.__name__} clips gradients that the scaler has multiplied by 65,536 "
    )
    assert "1/65,536 of the limit" in problem.why
    assert "scaler.unscale_(optimizer)" in problem.why
    assert problem.place.endswith(" in scaled")


@BOTH_ENGINES
@pytest.mark.parametrize(
    "options",
    [
        {"unscales": True},
        {"scale": 1.0},
        {"scale": 1.0, "stats": True},
        {"enabled": False},
        {"clip": None},
        {"limit": float("inf")},  # a way to compute the norm
        {"clip": lambda parameters, _: nn.utils.get_total_norm([one.grad for one in parameters])},
    ],
)
def test_gradients_that_are_divided_first_or_not_changed_are_healthy(engine: str, options: Any) -> None:
    assert kinds(scaled(engine=engine, scheduler_first=False, **options)) == []


@pytest.mark.parametrize("takes_step", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_overflow_are_a_problem_where_a_step_takes_them(takes_step: bool, clips: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sl.trace(model, stats=True) as t:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if clips:
                print(f"norm {nn.utils.clip_grad_norm_(model.parameters(), 1.0):.4f}")  # it reads the NaN
            if takes_step:
                optimizer.step()  # the mistake
            else:
                scaler.step(optimizer)
            scaler.update()
    assert ("non-finite" in kinds(t)) is takes_step


def _scaled_steps(steps: int, scale: float, own: bool, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer: Any = loops.ForeignOptimizer(model) if own else torch.optim.SGD(model.parameters(), 0.1)
    with sl.trace(model, **options) as t:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(steps):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
            model.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return t


@BOTH_ENGINES
@pytest.mark.parametrize("options", [{"stats": True}, {}, {"ops": "aten"}, {"ops": "api"}])
def test_a_scaler_that_skips_every_step_is_a_problem(engine: Any, options: Any) -> None:
    t = _scaled_steps(8, 2.0**40, own=False, engine=engine, **options)
    (problem,) = found(t)
    assert (problem.kind, problem.title) == ("skipped-steps", "the gradient scaler skipped all of 8 steps")


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("steps", "scale", "own"),
    [
        (12, 2.0**24, False),  # it skips the first ones
        (4, 2.0**40, False),  # it may become low enough
        (8, 2.0**8, True),
    ],
)
def test_a_scaler_that_skips_some_steps_is_healthy(engine: Any, steps: int, scale: float, own: bool) -> None:
    assert kinds(_scaled_steps(steps, scale, own, engine=engine)) == []


def test_two_optimizers_of_which_one_is_unscaled() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
    scaler = torch.amp.GradScaler("cpu")
    with sl.trace() as t:
        for _ in range(STEPS):
            loss = second(first(torch.randn(6, 4))).square().mean()
            for each in optimizers:
                each.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizers[0])
            nn.utils.clip_grad_norm_(first.parameters(), 1.0)
            nn.utils.clip_grad_norm_(second.parameters(), 1.0)  # the mistake
            for each in optimizers:
                scaler.step(each)
            scaler.update()
    (problem,) = found(t)
    assert (problem.kind, problem.count) == ("scaled-gradients", STEPS)


@BOTH_ENGINES
def test_a_scheduler_before_a_scaled_step(engine: str) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        t = scaled(engine=engine, clip=None, scheduler_first=True)
    (problem,) = found(t)
    assert (
        problem.title
        == "StepLR.step() runs before the first optimizer.step(): each rate comes one step early"
    )


@BOTH_ENGINES
@pytest.mark.parametrize(("first", "expected"), [(False, []), (True, ["python-warning"])])
def test_torch_warns_of_the_order_where_the_scaler_skips_the_first_step(
    engine: str, first: bool, expected: list[str]
) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        t = scaled(engine=engine, clip=None, scheduler_first=first, overflows=0)
    assert [str(each.message)[:40] for each in shown] == ["Detected call of `lr_scheduler.step()` b"]
    assert kinds(t) == expected


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("scale", "factor", "to_blame"),
    [(2.0**127, 1.0, "The scale did it"), (2.0**16, 2.0**115, "The loss grew")],
)
def test_a_scaled_loss_that_overflows_is_the_fault_of_the_larger_factor(
    engine: Any, scale: float, factor: float, to_blame: str
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sl.trace(model, engine=engine, stats=True) as t:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = (model(torch.randn(6, 4)).square().mean() + 4) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    (problem,) = (each for each in found(t) if each.kind == "non-finite")
    assert problem.title.endswith(": the loss times the scale of the gradient scaler overflows")
    assert problem.why.startswith(to_blame)
