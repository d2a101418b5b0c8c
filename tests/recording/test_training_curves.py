"""Numbers on the first screen that are themselves a finding: they never stand beside "none found"."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.analysis.problems import find as find_problems
from sightline.api import Trace
from tests.recording import training_loops as loops


def problems_line(trace: Trace) -> str:
    return next(line for line in str(trace).splitlines() if line.startswith("problems"))


def train(
    steps: int = 12,
    rate: float = 0.01,
    loss_of: Callable[[torch.Tensor, int], torch.Tensor] = lambda y, _: y.pow(2).mean(),
    schedule: Callable[[int], float] = lambda _: 1.0,
    clip: bool = False,
    stats: bool = False,
) -> Trace:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    x = torch.randn(8, 4)
    with sl.trace(model, stats=stats) as t:
        for number in range(steps):
            loss = loss_of(model(x), number)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e30).item()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            loss.item()
    return t


@pytest.mark.parametrize("stats", [False, True])
def test_a_healthy_run_has_none_and_says_what_was_not_looked_at(stats: bool) -> None:
    line = problems_line(train(stats=stats))
    assert line.startswith("problems  none found")
    assert ("numbers in tensors" in line) is not stats


def test_a_loss_that_diverges_is_a_problem() -> None:
    t = train(rate=3.0, loss_of=lambda y, _: (y - 3).pow(2).mean())
    assert "the loss is inf or nan in 8 of 12 steps, the first of them step 4" in str(t.problems())
    t = train(rate=1e-9, steps=5, loss_of=lambda y, step: y.mean() + 1.7 * 80**step)
    assert "1 error" in problems_line(t)
    assert re.search(r"the loss grows from 1\.\d+ to [67].\d+e\+07 in 5 steps", str(t.problems()))


def test_a_loss_that_grows_tenfold_is_likely_one_and_one_odd_batch_is_none() -> None:
    t = train(rate=1e-6, loss_of=lambda y, step: y.mean() + 1.5**step)
    assert "Likely a mistake" in str(t.problems(kind="diverging-loss"))
    t = train(rate=1e-6, loss_of=lambda y, step: y.mean() + 1 + 40 * (step == 6))
    assert "none found" in problems_line(t)


@pytest.mark.parametrize("start", [0.3, 1e-4])
def test_a_loss_that_grows_and_settles_is_no_problem(start: float) -> None:
    """As that of contrastive learning does while its queue of negatives fills up."""
    t = train(rate=1e-9, steps=7, loss_of=lambda y, step: 1e-4 * y.mean() + start + 3.2 * (1 - 0.5**step))
    assert "none found" in problems_line(t)


def test_a_loss_that_was_read_as_nan_is_a_problem_without_statistics() -> None:
    t = train(loss_of=lambda y, step: y.mean() * (math.nan if step >= 7 else 1.0))
    assert "the loss is nan in 5 of 12 steps, the first of them step 7" in str(t.problems())
    t = train(loss_of=lambda y, step: (y.mean().abs() + 7.5 - step).log(), stats=True)
    assert "The first one was made by log at" in " ".join(str(t.problems()).split())
    t = train(loss_of=lambda y, step: (y.mean().abs() + 7.5 - step).sqrt(), stats=True)
    assert "sqrt made" in str(t.problems(kind="non-finite"))
    assert "the loss is" not in str(t.problems()), "the op that made it is the problem"


def _non_finite(t: Trace) -> str:
    (why,) = [each.why for each in find_problems(t.index) if each.kind == "non-finite"]
    return why


def test_a_loss_that_is_not_finite_destroys_the_weights_only_where_its_gradients_do() -> None:
    dead = train(loss_of=lambda y, _: (y * 0).relu().log().mean(), stats=True)
    assert "norm of the gradients is 0" in _non_finite(dead)
    assert "destroys" not in _non_finite(dead)
    assert "zeros come from relu" in _non_finite(dead)
    finite = train(loss_of=lambda y, step: y.mean() + (math.inf if step == 7 else 0), stats=True)
    assert "norm of the gradients is finite" in _non_finite(finite)
    unmeasured = train(loss_of=lambda y, step: y.mean() + (math.inf if step == 7 else 0))
    assert "The last one is finite again" in _non_finite(unmeasured)
    lost = train(loss_of=lambda y, step: y.mean() * (math.nan if step >= 7 else 1.0))
    assert "not finite destroys the weights" in _non_finite(lost)


@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("ops", ["both", "aten"])
def test_a_batch_whose_targets_are_all_ignored_is_named(ignored: int, ops: Any) -> None:
    model, loss_of = nn.Linear(4, 3), nn.CrossEntropyLoss(ignore_index=ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, stats=True, ops=ops) as t:
        for step in range(4):
            targets = torch.full((5,), ignored if step == 2 else 1)
            loss = loss_of(model(torch.randn(5, 4)), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    assert f"all targets are {ignored}, which the loss ignores" in _non_finite(t)


def test_a_rate_that_vanishes_is_a_problem_and_a_schedule_that_ends_is_none() -> None:
    t = train(rate=0.1, schedule=lambda step: 10.0**-step)
    assert "lr 0.1 → 1e-12" in str(t)
    assert "falls from 0.1 to 1e-12: 6 of 12 steps hardly move" in " ".join(str(t.problems()).split())
    t = train(rate=0.1, schedule=lambda step: max(0.0, 1 - step / 6))
    assert "falls from 0.1 to 0" in str(t.problems())
    cosine = train(rate=0.1, schedule=lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 11))
    assert "none found" in problems_line(cosine)
    assert "no step moves anything" in str(train(rate=1e-12).problems())


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1])
def test_a_rate_that_no_step_can_take_is_a_problem(rate: float) -> None:
    t = train(rate=0.1, steps=4, schedule=lambda step: 1.0 if step < 2 else rate / 0.1)
    (title,) = [each.title for each in find_problems(t.index) if each.kind == "learning-rate"]
    assert title == f"the learning rate of SGD is {rate:.3g}"


def test_a_norm_of_zero_in_every_step_is_a_problem() -> None:
    t = train(clip=True, loss_of=lambda y, _: (y * 0).sum())
    assert "the norm of the gradients is 0 in all of 12 steps" in str(t.problems())
    t = train(clip=True, loss_of=lambda y, step: (y * (step < 5)).sum())
    assert "the norm of the gradients is 0 in every step from step 5 on" in str(t.problems())
    t = train(loss_of=lambda y, _: (y * 0).sum())
    assert "all gradients are 0 in every step in which they were measured" in str(t.problems())


def test_a_norm_that_explodes_is_a_problem() -> None:
    t = train(rate=1e-9, clip=True, loss_of=lambda y, step: y.mean() * 10.0**step)
    assert "the norm of the gradients grows from" in str(t.problems())


def test_steps_that_a_scaler_skipped_are_no_loss_that_is_not_finite() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.scaled(model, 4, overflow=2)
    assert "none found" in problems_line(t)


def test_what_no_check_saw_is_named() -> None:
    model = nn.Linear(2, 2)
    with sl.trace(model, stats=True) as t:
        model(torch.randn(3, 2)).argmax(-1)
    assert problems_line(t) == "problems  none found; not looked at: the values of integers"
    with sl.trace(model, ops="api") as t:
        model(torch.randn(3, 2))
    assert "not looked at: aten ops" in problems_line(t)
    with sl.trace(model, stats=True) as t:
        model(torch.randn(3, 2))
    assert problems_line(t) == "problems  none found"


def test_two_steps_are_enough_for_a_loss_that_explodes() -> None:
    t = train(rate=1e-9, steps=2, loss_of=lambda y, step: y.mean() + 1.7 * 80000**step)
    assert re.search(r"the loss grows from 1\.\d+ to 1\.36e\+05 in 2 steps", str(t.problems()))


def test_a_loss_that_jumps_and_comes_back_is_named_with_its_step() -> None:
    t = train(rate=1e-9, steps=6, loss_of=lambda y, step: y.mean() + (2e6 if step == 2 else 2.0))
    found = str(t.problems(kind="loss-spike"))
    assert "the loss jumps to 2e+06 in step 2" in found
    assert "none found" not in problems_line(t)


def scripted(losses: list[float]) -> Trace:
    """A run with these losses."""
    return train(rate=1e-9, steps=len(losses), loss_of=lambda y, step: y.mean() * 1e-9 + losses[step])


@pytest.mark.parametrize(
    ("losses", "numbers"),
    [
        ([0.97, 4.62, 86.2], ("0.97", "86.2")),
        ([1.07, 672, 209, 150, 120, 100, 88.2, 95.2], ("1.07", "95.2")),
        ([1.07, 672, 209], ("1.07", "209")),
        ([1.1, 600], ("1.1", "600")),
        ([1.2, 1.0, 1.1, 700], ("1.2", "700")),
        ([300, 20, 1, 0.9, 1, 1.1, 1, 1, 200, 290, 280, 285], ("0.9", "285")),
        ([2.3, 2.2, 1.9, 1.8, 1.7] * 4 + [500, 400, 350, 300, 260, 250, 240, 230], ("1.7", "230")),
        ([-1, -50, -5000, -600000], ("-1", "-6e+05")),
    ],
)
def test_a_loss_that_is_itself_the_finding_is_a_problem(
    losses: list[float], numbers: tuple[str, str]
) -> None:
    t = scripted(losses)
    assert "none found" not in problems_line(t)
    (title,) = [each.title for each in find_problems(t.index) if each.kind == "diverging-loss"]
    assert re.findall(r"(?<![\w.])(?:from|to) (-?[\d.]+(?:e[+]\d+)?)", title) == list(numbers)
    assert ("falls" in title) is (losses[-1] < 0)


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([5000, 800, 90, 12, 4, 2, 1.5, 1.2], id="starts high and falls"),
        pytest.param([2e6, 30, 2], id="starts high and falls at once"),
        pytest.param([1e5, 2e4, 4e3, 900, 200, 300, 150, 240, 110], id="starts high, falls and is noisy"),
        pytest.param([2.1, 1.4, 3.2], id="three noisy steps"),
        pytest.param([0.4, 2.9, 9.5], id="three steps of a small batch"),
        pytest.param([2.3, 8.0, 40.0, 22.0, 9.0, 4.0, 2.2, 2.1], id="a bump while the rate warms up"),
        pytest.param([3e-5, 2e-3, 4e-6, 0.3, 1e-5, 8e-4, 0.02, 0.4], id="near 0 with noise"),
        pytest.param([0.69, 1.2, 2.4, 3.1, 4.8, 5.5, 4.9, 6.1], id="the generator of a GAN"),
        pytest.param([0.69, 0.4, 0.1, 0.02, 0.9, 0.01, 0.05, 0.3], id="the critic of a GAN"),
        pytest.param([40, 300, 90, 210, 60, 350, 120, 80, 260, 310], id="sums over batches of all sizes"),
        pytest.param([1e-3, 0.8, 1.9, 2.6, 3.0, 3.2, 3.3], id="grows and settles"),
        pytest.param([900, -20, -300, -800, -1200, -1500], id="a likelihood that falls below 0"),
    ],
)
def test_a_healthy_loss_is_no_problem(losses: list[float]) -> None:
    assert "none found" in problems_line(scripted(losses))


@pytest.mark.parametrize(
    ("losses", "jump"),
    [
        ([2, 2, 2, 900, 2, 2, 2], "900 in step 3, 450 times"),
        ([1, 5000, 1.2, 1.1], "5e+03 in step 1"),
        ([1.07, 672, 209, 80, 30, 9, 4, 1.5], "672 in step 1"),
        ([5000, 40, 3, 2, 2, 2, 2, 2, 2, 4000, 3, 2], "4e+03 in step 9"),
    ],
)
def test_a_jump_is_one_beside_the_steps_around_it(losses: list[float], jump: str) -> None:
    found = str(scripted(losses).problems(kind="loss-spike"))
    assert f"the loss jumps to {jump}" in found


def accumulated(divisor: float, passes: int, steps: int = 8) -> Trace:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0 * divisor / passes)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    with sl.trace(model) as t:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(passes):
                loss = nn.functional.mse_loss(model(x), y) / divisor
                loss.backward()
                loss.item()
            optimizer.step()
    return t


@pytest.mark.parametrize(("divisor", "passes"), [(4.0, 4), (1.0, 4), (1.0, 1)])
def test_the_loss_of_a_problem_is_that_of_the_step_in_the_table(divisor: float, passes: int) -> None:
    t = accumulated(divisor, passes)
    (title,) = [each.title for each in find_problems(t.index) if each.kind == "diverging-loss"]
    first = next(line for line in str(t).splitlines() if line.startswith("0 "))
    shown = (
        re.findall(r"sum ([\d.e+]+)", first) if passes > 1 else re.findall(r" ([\d.e+]+) +[\d.]+ KiB", first)
    )
    assert f" from {shown[0]} to " in title
    assert title.startswith("the sum of the losses of a step" if passes > 1 else "the loss grows")


def test_a_norm_that_explodes_in_the_first_step_is_a_problem() -> None:
    scales = [1.0, 9e5, 4e5, 3e5, 3e5, 2e5, 2e5, 2e5]
    t = train(rate=1e-9, steps=8, clip=True, loss_of=lambda y, step: y.mean() * scales[step])
    assert "the norm of the gradients grows from" in str(t.problems(kind="exploding-gradients"))


def test_gradients_that_are_0_in_the_last_two_steps_are_a_problem() -> None:
    t = train(steps=6, clip=True, loss_of=lambda y, step: y.mean() * (step < 4))
    assert "the norm of the gradients is 0 in every step from step 4 on" in str(t.problems())


def test_calls_on_another_thread_are_not_looked_at() -> None:
    model = loops.net()
    with sl.trace(model, stats=True, engine="native") as t:
        model(torch.randn(2, 4))
        worker = threading.Thread(target=lambda: model(torch.randn(2, 4)))
        worker.start()
        worker.join()
    assert "not looked at: other threads" in problems_line(t)
    assert "module calls on other threads" in str(t.problems())
