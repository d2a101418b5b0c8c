"""Recordings of which `last=` kept different parts: what belongs together is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.errors import UsageError


def train(*, steps: int = 6, rate: float = 0.1, named: bool = False, **options: Any) -> sl.Trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> None:
        loss = model(torch.randn(3, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with sl.trace(model, stats=True, **options) as t:
        for number in range(steps):
            if named:
                with sl.step(f"batch {chr(97 + number)}"):
                    step()
            else:
                step()
    return t


def infer(*, calls: int = 6, **options: Any) -> sl.Trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with sl.trace(model, stats=True, **options) as t, torch.no_grad():
        for _ in range(calls):
            model(torch.randn(3, 4))
    return t


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("last", [(None, 60), (60, None), (130, 60), (60, 60)])
def test_a_run_is_the_same_as_its_own_end(last: tuple[int | None, int | None], named: bool) -> None:
    d = sl.diff(*(train(named=named, last=each) for each in last))
    assert d.verdict == "same"
    assert d.parameters.same
    assert any("keeps its last 60 ops only" in note for note in d.notes)


def test_another_rate_is_found_from_the_first_common_step_on() -> None:
    d = sl.diff(train(), train(rate=0.2, last=130))
    assert d.verdict == "different"
    assert d.divergence is not None


def test_of_calls_without_steps_the_last_ones_are_compared() -> None:
    whole, end = infer(), infer(last=12)
    d = sl.diff(whole, end)
    assert d.verdict == "same"
    assert len(d.pairs) == sum(op.level == "aten" for op in end.ops)


def test_a_step_that_one_lacks_the_beginning_of_is_left_out() -> None:
    whole, end = train(), train(last=60)
    d = sl.diff(whole, end)
    first = whole.step(5).ops[0]
    assert min(pair.a for pair in d.pairs) >= first.id
    assert len(d.pairs) == sum(op.level == "aten" for op in whole.step(5).ops)


@pytest.mark.parametrize(
    ("one", "other", "kept"),
    [
        (
            lambda: train(last=60), lambda: train(steps=20, last=60),
            "a keeps step 5, b step 19; step='last' compares",
        ),
        (
            lambda: train(last=130), lambda: train(steps=20, last=130),
            "a keeps the steps 4 to 5, b the steps 18 to 19; step='last'",
        ),
        (infer, lambda: infer(calls=9, last=12), "a keeps all its 42 ops, b its last 12 ops; steps that"),
    ],
)  # fmt: skip
def test_parts_of_which_nothing_belongs_together(
    one: Callable[[], sl.Trace], other: Callable[[], sl.Trace], kept: str
) -> None:
    with pytest.raises(UsageError) as caught:
        sl.diff(one(), other())
    assert kept in str(caught.value)


def test_a_step_may_still_be_chosen() -> None:
    d = sl.diff(train(last=60), train(steps=20, last=60), step=(5, 19))
    assert d.verdict == "different"
