"""The first screen of a run whose steps are of several kinds, and losses of several backward passes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.views.call_order import call_order
from sightline.views.last_screen import first_sections
from sightline.views.overview import overview
from tests.recording.engines import BOTH_ENGINES


def facts(t: sl.Trace, title: str) -> list[str]:
    """The line of a title on the first screen, and the lines without one that follow."""
    rows = str(overview(t)).split("\n\n")[0].splitlines()
    at = next((at for at, row in enumerate(rows) if row.startswith(f"{title:<10}")), None)
    if at is None:
        return []
    more = next((n for n, row in enumerate(rows[at + 1 :]) if not row.startswith(" " * 10)), len(rows))
    return [row[10:] for row in rows[at : at + 1 + more]]


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()


def adversarial(rounds: int, times: int) -> sl.Trace:
    maker, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    slow, fast = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.Adam(critic.parameters(), lr=0.2)
    with sl.trace() as t:
        for _ in range(rounds):
            for _ in range(times):
                update(fast, critic(maker(torch.randn(4, 2)).detach()).mean())
            update(slow, -critic(maker(torch.randn(4, 2))).mean())
    return t


def test_optimizers_of_unequal_turns_make_two_kinds_of_steps() -> None:
    t = adversarial(3, 2)
    assert facts(t, "one step") == [
        "3 of 6 steps: maker, critic; backward; Adam (lr 0.2)",
        "3 of 6 steps: maker ×2, critic ×2; backward ×2; Adam (lr 0.2), SGD (lr 0.1)",
    ]
    assert facts(t, "steps")[0].startswith("6, with 9 optimizer steps, ")
    place = r"test_step_kinds.py:\d+"
    said = rf"of the backward passes at {place}, {place} again in 3 of the steps"
    assert re.fullmatch(said, facts(t, "loss")[0])
    (step,) = facts(t._at(1, None), "one step")
    assert step == "maker ×2, critic ×2; backward ×2; Adam (lr 0.2), SGD (lr 0.1)"


def test_two_trainings_one_after_the_other_share_no_step() -> None:
    enc, dec, clf = nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(3, 2)
    x = torch.randn(5, 4)
    with sl.trace() as t:
        first = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=0.01)
        for _ in range(3):
            update(first, dec(enc(x)).square().mean())
        second = torch.optim.SGD(clf.parameters(), lr=0.5)
        for _ in range(2):
            update(second, clf(enc(x)).square().mean())
    assert len(t.steps) == 5
    assert "optimizer steps" not in facts(t, "steps")[0]
    assert facts(t, "one step") == [
        "steps 0…2: enc, dec; backward; Adam (lr 0.01)",
        "steps 3…4: enc, clf; backward; SGD (lr 0.5)",
    ]


@BOTH_ENGINES
def test_one_model_with_two_optimizers_one_after_the_other(engine: Any) -> None:
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2, tolerance_grad=0, tolerance_change=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss: torch.Tensor = (model(x) - 5).square().mean()
        loss.backward()
        return loss

    with sl.trace(engine=engine) as t:
        for _ in range(2):
            lbfgs.step(closure)
        for _ in range(3):
            update(sgd, model(x).square().mean())
    assert facts(t, "one step") == [
        "steps 0…1: Linear ×2; backward ×2; LBFGS (lr 0.5)",
        "steps 2…4: Linear; backward; SGD (lr 0.1)",
    ]
    assert facts(t._at(1, None), "one step") == ["Linear ×2; backward ×2; LBFGS (lr 0.5)"]


def test_numbers_that_differ_from_step_to_step_are_ranges() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace() as t:
        for number in range(3):
            parts = [model(torch.randn(2, 3)).mean() for _ in range(number + 1)]
            update(optimizer, torch.stack(parts).mean())
    assert facts(t, "one step") == ["Linear ×1…3; backward; SGD (lr 0.1)"]


def test_the_last_window_of_accumulated_gradients_may_be_smaller() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with sl.trace() as t:
        for batch in range(5):
            loss = model(torch.randn(2, 3)).square().mean() / 2
            loss.backward()
            losses.append(loss.item())
            if batch in (1, 3, 4):
                optimizer.step()
                optimizer.zero_grad()
    assert facts(t, "one step") == ["Linear ×1…2; backward ×1…2; SGD (lr 0.1)"]
    said = (
        "the range over the 1…2 backward passes of a step, which the program had divided by 2, and their sum"
    )
    assert facts(t, "loss") == [said]
    assert f"sum {losses[2] + losses[3]:.3g} " in str(t)


def test_a_network_without_gradients_that_some_steps_call_is_named() -> None:
    model, target = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    goal = torch.zeros(2, 1)
    with sl.trace() as t:
        for number in range(4):
            x = torch.randn(2, 3)
            if number % 2 == 0:
                with torch.no_grad():
                    goal = target(x)
            update(optimizer, (model(x) - goal).square().mean())
    assert facts(t, "one step") == [
        "2 of 4 steps: target, model; backward; SGD (lr 0.1)",
        "2 of 4 steps: model; backward; SGD (lr 0.1)",
    ]
    assert not facts(t, "outside")


def test_more_than_three_kinds_are_counted() -> None:
    first, second, third, fourth, fifth = nets = [nn.Linear(2, 1) for _ in range(5)]
    optimizer = torch.optim.SGD([weight for net in nets for weight in net.parameters()], lr=0.1)
    x = torch.randn(3, 2)

    with sl.trace() as t:
        for number in range(2):
            update(optimizer, first(x).square().mean())
            update(optimizer, second(x).square().mean())
            if number:
                update(optimizer, third(x).square().mean())
                update(optimizer, fourth(x).square().mean())
                update(optimizer, fifth(x).square().mean())
    said = facts(t, "one step")
    assert said[0] == "2 of 7 steps: first; backward; SGD (lr 0.1)"
    assert said[2] == "step 4: third; backward; SGD (lr 0.1)"
    assert said[3] == "2 of 7 steps: 2 other kinds"


def test_the_optimizers_of_steps_after_the_recorded_ones_are_not_guessed() -> None:
    model = nn.Linear(2, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.2))
    x = torch.randn(3, 2)
    with sl.trace() as t:
        for optimizer in (first, second):
            for _ in range(140):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
    assert facts(t, "one step") == ["Linear; backward"]
    assert facts(t._at("150:160", None), "one step") == ["Linear; backward; SGD (lr 0.2)"]
    assert facts(t._at("270:280", None), "one step") == ["Linear; backward"]


def test_the_optimizers_of_a_long_loop_are_those_of_its_beginning() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    x = torch.randn(3, 2)
    with sl.trace() as t:
        for _ in range(140):
            second(first(x)).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert facts(t, "one step") == ["first, second; backward; SGD (lr 0.1) ×2"]
    assert facts(t, "steps")[0].startswith("140, ")


# -- losses -----------------------------------------------------------------------------------------------


@BOTH_ENGINES
@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_passes_with_weights_of_their_own_have_no_sum(engine: Any, factor: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(engine=engine) as t:
        for _ in range(2):
            for weight in (1.0, factor):
                loss = model(torch.randn(2, 3)).square().mean()
                (weight * loss).backward()
                loss.item()
            optimizer.step()
    assert facts(t, "loss") == ["the range over the 2 backward passes of a step"]
    assert ", sum " not in str(t)


def test_passes_of_two_expressions_on_one_line_are_no_range() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = 0.0, 0.0
    with sl.trace() as t:
        for _ in range(2):
            one, two = (model(torch.randn(2, 3)).square().mean() for _ in range(2))
            one.backward(), (0.5 * two).backward()
            losses = one.item(), two.item()
            optimizer.step()
    (said,) = facts(t, "loss")
    assert re.fullmatch(r"of the backward passes at (\S+:\d+) and \1 again \(then divided by 2\)", said)
    assert f"{losses[0]:.3g}, {losses[1]:.3g}" in str(t)


def test_losses_of_two_optimizers_are_not_added_where_a_function_starts_both_passes() -> None:
    text = str(adversarial(2, 2))
    assert ", sum " not in text
    row = next(row.split("  ") for row in text.splitlines() if row.startswith("1  "))
    assert any(re.fullmatch(r"-?[\d.]+, -?[\d.]+", cell.strip()) for cell in row)


def test_a_short_screen_says_whose_losses_they_are_only_where_it_shows_some() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace() as t:
        for batch in range(4):
            loss = model(torch.randn(2, 3)).square().mean()
            loss.backward()
            loss.item()
            if batch % 2:
                optimizer.step()
    whole = overview(t)
    assert "\nloss  " in str(first_sections(whole, 100))
    assert "\nloss  " not in str(first_sections(whole, 14))


# -- where a step ends, and depths ------------------------------------------------------------------------


def test_averages_that_are_copied_after_the_loop_are_in_no_step() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = [weight.detach().clone() for weight in model.parameters()]
    with sl.trace(model) as t:
        for _ in range(3):
            loss = model(torch.randn(2, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for mine, weight in zip(average, model.parameters(), strict=True):
                mine.sub_(0.1 * (mine - weight.detach()))
            loss.item()
        for mine, weight in zip(average, model.parameters(), strict=True):
            weight.data.copy_(mine)
    assert len(t.steps[1].ops) == len(t.steps[2].ops)


def test_models_are_at_depth_0_and_their_parts_at_1() -> None:
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    with sl.trace() as t:
        second(first(torch.ones(1, 2)))
    assert str(call_order(t.index, depth=0)).splitlines() == ["Sequential #0", "Sequential_1 (Sequential) #0"]
    assert len(str(call_order(t.index, depth=1)).splitlines()) == 4
