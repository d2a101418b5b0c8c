"""One first NaN for all: `nonfinite`, `problems` and the check name the same op at the same line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.problems import Problem, find
from tests.recording.engines import needs_native

each_engine = pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "python"])


class Net(nn.Module):
    """Two layers around whatever is given."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.middle(self.first(x)))
        return made


def divided(x: Tensor) -> Tensor:
    zeros = x - x.detach()
    shares = zeros / zeros  # here
    return torch.where(torch.ones_like(x) > 0, x, shares)


def hidden_by_where() -> None:
    Net(divided)(torch.randn(6, 3)).sum().backward()


def out_of_infinities() -> None:
    weight = torch.full((3, 3), 1e38)
    mixed = torch.randn(6, 3) @ (weight * 10)  # here
    mixed.sum()


def log_of_zero() -> None:
    logs = torch.zeros(4).log()  # here
    (logs - logs).sum()


def after_a_mask() -> None:
    mask = torch.ones(4, 4).triu(1).bool()
    weights = torch.randn(4, 4).masked_fill(mask, float("-inf")).softmax(-1)
    weights.log().sum()  # here


def mask_of_everything() -> None:
    scores = torch.randn(2, 3).masked_fill(torch.ones(2, 3).bool(), float("-inf"))
    scores.softmax(-1).sum()  # here


def only_in_a_gradient() -> None:
    x = torch.zeros(3, requires_grad=True)
    (x.sqrt() * 1).sum().backward()  # here


def in_a_module() -> None:
    Net(lambda x: (x - 1e3).log())(torch.randn(6, 3)).sum().backward()  # here


def in_the_optimizer() -> None:
    net = Net(torch.relu)
    optimizer = torch.optim.SGD(net.parameters(), lr=3e38, foreach=False)
    (net(torch.randn(6, 3)) * 1e4).sum().backward()
    optimizer.step()  # here


def changed_through_a_view() -> None:
    x = torch.rand(4, 4) + 1
    x[:, 1].sub_(5).log_()  # here
    x.sum()


def in_place_on_a_slice() -> None:
    x = torch.full((4, 4), 50.0)
    x[:, 1].mul_(50).exp_()  # here
    x.sum()


def later_than_a_harmless_one() -> None:
    logs = torch.zeros(3).log()  # here
    kept = torch.where(logs.isinf(), torch.zeros(3), logs)
    (kept - 1).sqrt().sum()


class Case(NamedTuple):
    run: Callable[[], None]
    op: str


FAULTS = [
    Case(hidden_by_where, "div.Tensor"),
    Case(out_of_infinities, "mul.Tensor"),
    Case(log_of_zero, "log"),
    Case(after_a_mask, "log"),
    Case(mask_of_everything, "_softmax"),
    Case(only_in_a_gradient, "div.Tensor"),
    Case(in_a_module, "log"),
    Case(in_the_optimizer, "add_.Tensor"),
    Case(changed_through_a_view, "log_"),
    Case(in_place_on_a_slice, "exp_"),
    Case(later_than_a_harmless_one, "log"),
]


def recorded(run: Callable[[], None], engine: Any, **asked: Any) -> tuple[sl.Trace, str]:
    """A run, and the first line of the error that stopped it, if one did."""
    torch.manual_seed(0)
    error = ""
    block = sl.trace(engine=engine, **asked)
    t = block.__enter__()
    try:
        run()
    except sl.NonFiniteError as stopped:
        error = str(stopped).splitlines()[0]
    try:
        block.__exit__(None, None, None)
    except sl.NonFiniteError as stopped:  # the native engine may be a few ops behind
        error = str(stopped).splitlines()[0]
    return t, error


def non_finite(t: sl.Trace) -> list[Problem]:
    return [problem for problem in find(t.index) if problem.kind == "non-finite"]


def line_of(run: Callable[[], None]) -> str:
    """``test_first_nonfinite.py:31``: the line that is marked, in the case or in what it calls."""
    for function in (run, divided):
        lines, first = inspect.getsourcelines(function)
        marked = [first + number for number, line in enumerate(lines) if "# here" in line]
        if marked:
            return f"test_first_nonfinite.py:{marked[0]} "
    raise AssertionError(run)


@each_engine
@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.run.__name__)
def test_all_name_the_same_op_and_line(case: Case, engine: Any) -> None:
    measured, _ = recorded(case.run, engine, stats=True)
    reported, _ = recorded(case.run, engine, check=sl.Check(on="report"))
    stopped, error = recorded(case.run, engine, check="nonfinite")
    headline = str(measured.nonfinite()).splitlines()[0]
    assert re.match(rf"{re.escape(case.op)} (\(.*\) )?made ", headline)
    assert line_of(case.run) in headline
    assert str(reported.nonfinite()).splitlines()[0] == error == headline
    assert str(stopped.nonfinite()).splitlines()[0] == headline
    for t in (measured, reported):
        first = non_finite(t)[0]
        assert headline.startswith(first.title.partition(" out of ")[0])
        assert first.place in headline
        assert first.op is not None
        assert t.ops[first.op].name == case.op
    assert headline.startswith(non_finite(stopped)[0].title.partition(" out of ")[0])


def test_an_operand_of_infinities_is_told_as_such() -> None:
    def run() -> None:
        weight = torch.full((3, 2), float("inf"))
        (torch.tensor([[1.0, 0.0, -1.0]]) @ weight).sum()

    t, _ = recorded(run, "auto", stats=True)
    (problem,) = non_finite(t)
    assert problem.title == (
        "mm made 2 NaN of 2 in f32[1, 2] out of f32[1, 3] (-1 … 1, mean 0, std 1), f32[3, 2] (all Inf)"
    )


def test_what_is_left_and_not_the_first_is_told_beside_it() -> None:
    t, _ = recorded(later_than_a_harmless_one, "auto", stats=True)
    titles = [problem.title for problem in non_finite(t)]
    assert [title.split(" in ")[0] for title in titles] == ["log made 3 -Inf of 3", "sqrt made 3 NaN of 3"]
    assert "sqrt made 3 NaN of 3" in str(t.nonfinite())


# -- what is no op's fault -----------------------------------------------------------------------------------


def attended() -> None:
    mask = torch.ones(4, 4).triu(1).bool()
    x = torch.randn(4, 4, requires_grad=True)
    (x.masked_fill(mask, float("-inf")).softmax(-1) @ x).sum().backward()


def added_mask() -> None:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    ((torch.randn(4, 4) + mask).softmax(-1) * 2).sum()


MASK = torch.full((4, 4), float("-inf")).triu(1)


def mask_changed_in_place() -> None:
    MASK.triu_(1)
    MASK[:2].mul_(2)


@each_engine
@pytest.mark.parametrize("run", [attended, added_mask, mask_changed_in_place])
def test_a_mask_is_harmless_to_all(run: Callable[[], None], engine: Any) -> None:
    for asked in ({"stats": True}, {"check": sl.Check(on="report")}, {"check": "nonfinite"}):
        t, error = recorded(run, engine, **asked)
        assert error == ""
        assert "made" not in str(t.nonfinite()).splitlines()[0]
        assert non_finite(t) == []


@each_engine
@pytest.mark.parametrize("broken", ["input", "parameter"])
def test_a_nan_that_came_from_outside_is_no_ops(broken: str, engine: Any) -> None:
    net, x = Net(torch.relu), torch.randn(6, 3)
    told = "input $"
    if broken == "input":
        x[2, 1] = float("nan")
    else:
        net.load_state_dict({**net.state_dict(), "second.weight": torch.full((3, 3), float("nan"))})
        told = "parameter second.weight came with 9 NaN of 9 in f32[3, 3]"

    def run() -> None:
        net(x).sum().backward()

    for asked in ({"stats": True}, {"check": sl.Check(on="report")}, {"check": "nonfinite"}):
        torch.manual_seed(0)
        with sl.trace(net, engine=engine, **asked) as t:
            run()
        lines = str(t.nonfinite()).splitlines()
        assert lines[0].startswith(told)
        assert " made " not in lines[0]
        assert lines[0] == non_finite(t)[0].title
        assert not any(" made " in problem.title for problem in non_finite(t))


@each_engine
@pytest.mark.parametrize("allow", ["log", "Tensor.log", "log*"])
def test_what_is_allowed_is_allowed_by_all(allow: str, engine: Any) -> None:
    t, error = recorded(log_of_zero, engine, check=sl.Check(allow=allow))
    assert error.startswith("sub.Tensor made 4 NaN of 4")
    t, _ = recorded(log_of_zero, engine, check=sl.Check(allow=allow, on="report"))
    assert str(t.nonfinite()).splitlines()[0] == error
    assert non_finite(t)[0].title.startswith("sub.Tensor made 4 NaN of 4")
    t, error = recorded(log_of_zero, engine, check=sl.Check(allow=[allow, "sub"]))
    assert error == ""
    assert "made" not in str(t.nonfinite()).splitlines()[0]
    assert non_finite(t) == []


@each_engine
def test_of_what_was_measured_only_in_part_the_first_that_was_is_named_as_that(engine: Any) -> None:
    net = nn.Sequential(Net(lambda x: (x - 1e3).log()), nn.ReLU(), nn.Linear(3, 3))
    with sl.trace(net, engine=engine, stats=sl.Stats(modules="2")) as t:
        net(torch.randn(6, 3)).sum().backward()
    headline = str(t.nonfinite()).splitlines()[0]
    assert " made " not in headline
    assert "returned 18 NaN of 18 in f32[6, 3], the first that was measured, " in headline
    first = non_finite(t)[0]
    assert headline.startswith(first.title.partition(" out of ")[0])


def test_modules_alone_are_named_by_both() -> None:
    net = nn.Sequential(nn.Linear(3, 3), Net(lambda x: (x - 1e3).log()))
    with sl.trace(net, ops="none", stats=True) as t:
        net(torch.randn(6, 3))
    assert str(t.nonfinite()).startswith(non_finite(t)[0].title)


def test_gradients_of_a_loss_scaler_are_no_problem() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with sl.trace(stats=True) as t:
        scaler.scale(weight.sqrt().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert "made 3 Inf of 3" in str(t.nonfinite())
    assert non_finite(t) == []
