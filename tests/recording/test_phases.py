"""The phase of an op follows what runs: also where an optimizer calls the function that computes the loss."""

# mypy: disable-error-code="arg-type,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl
from tests.recording.engines import BOTH_ENGINES, EVERY_WAY, options
from tests.recording.nets import Net

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Y = torch.zeros(3, 2)


class Closure:
    """What Lightning gives to an optimizer: zero the gradients, forward, backward."""

    def __init__(self, net: nn.Module, optimizer: Any) -> None:
        self.net, self.optimizer = net, optimizer

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.net(X), Y)
        loss.backward()
        return loss


class Precision:
    """Lightning's plugin, through which the closure goes."""

    def wrap(self, closure: Callable[[], Tensor]) -> Tensor:
        return closure()


def phases(trace: sl.Trace, name: str) -> set[str]:
    return {op.phase for op in trace.ops.where(level="aten") if op.name == name}


def train(optimizer_type: Any, given: Callable[[Any], Any], **asked: Any) -> sl.Trace:
    torch.manual_seed(0)
    net = Net()
    optimizer = optimizer_type(net.parameters())
    with sl.trace(net, **asked) as t:
        for _ in range(2):
            optimizer.step(closure=given(Closure(net, optimizer)))
    t.validate()
    return t


@EVERY_WAY
def test_a_closure_is_forward_and_backward(engine: str, kept: str, tmp_path: Path) -> None:
    adam = partial(torch.optim.Adam, foreach=False)
    t = train(adam, lambda closure: partial(Precision().wrap, closure), **options(engine, kept, tmp_path))
    assert phases(t, "addmm") == phases(t, "mse_loss") == {"forward"}
    assert phases(t, "mse_loss_backward") == {"backward"}
    assert phases(t, "addcdiv_") == {"optimizer"}
    assert {call.phase for call in t.module_calls} == {"forward"}
    assert "not called" not in str(t.summary())
    assert any(value.name == "fc1.weight.grad" for value in t.values)


@EVERY_WAY
def test_a_closure_is_called_many_times(engine: str, kept: str, tmp_path: Path) -> None:
    lbfgs = partial(torch.optim.LBFGS, max_iter=3)
    t = train(lbfgs, lambda closure: closure, **options(engine, kept, tmp_path))
    assert phases(t, "addmm") == phases(t, "mse_loss") == {"forward"}
    assert phases(t, "mse_loss_backward") == {"backward"}
    updates = list(t.ops.where(level="aten", phase="optimizer"))
    assert {op.name for op in updates} >= {"dot", "abs"}
    assert all(op.call is None for op in updates)


@EVERY_WAY
def test_a_module_an_optimizer_calls_itself_is_forward(engine: str, kept: str, tmp_path: Path) -> None:
    class Learned(torch.optim.Optimizer):
        """Its update is what a module says."""

        def __init__(self, parameters: Any, rule: nn.Module) -> None:
            super().__init__(parameters, {})
            self.rule = rule

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.rule(torch.ones(3)))

    rule = nn.Softplus()
    w = nn.Parameter(torch.ones(3))
    with sl.trace(rule, **options(engine, kept, tmp_path)) as t:
        Learned([w], rule).step()
        w.sin()
    found = [
        (op.name, op.phase)
        for op in t.ops.where(level="aten")
        if op.name in ("softplus", "sub_.Tensor", "sin")
    ]
    assert found == [("softplus", "forward"), ("sub_.Tensor", "optimizer"), ("sin", "forward")]


@EVERY_WAY
def test_after_a_step_inside_a_step_it_is_still_a_step(engine: str, kept: str, tmp_path: Path) -> None:
    class Ascending(torch.optim.SGD):
        """Sharpness-aware: it steps another optimizer inside its own step."""

        inner: torch.optim.Optimizer

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["params"][0].mul_(1.5)
            self.inner.step()
            self.param_groups[0]["params"][0].div_(1.5)
            return None

    w = nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    optimizer = Ascending([w], lr=0.1)
    optimizer.inner = torch.optim.SGD([w], lr=0.1, foreach=False)
    with sl.trace(**options(engine, kept, tmp_path)) as t:
        optimizer.step()
    found = [op.name for op in t.ops.where(level="aten", phase="optimizer")]
    assert found == ["mul_.Tensor", "add_.Tensor", "div_.Tensor"]


@EVERY_WAY
def test_a_step_that_raises_is_over(engine: str, kept: str, tmp_path: Path) -> None:
    def closure() -> Tensor:
        X.cos()
        raise ValueError("no loss")

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with sl.trace(**options(engine, kept, tmp_path)) as t:
        with suppress(ValueError):
            optimizer.step(closure)
        X.sin()
    assert [(op.name, op.phase) for op in t.ops.where(level="aten")] == [
        ("cos", "forward"),
        ("sin", "forward"),
    ]


@BOTH_ENGINES
def test_marks_for_a_profiler_are_no_ops(engine: Any) -> None:
    net = Net()
    optimizer = torch.optim.RMSprop(net.parameters(), foreach=False)
    with sl.trace(net, engine=engine, ops="api") as t:
        for _ in range(2):
            F.mse_loss(net(X), Y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [op.name for op in t.ops if "profiler" in op.name] == []
