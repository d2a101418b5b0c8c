"""One call is one row: backward passes, optimizers, and torch functions that run several ops."""

# mypy: disable-error-code="arg-type,no-any-return,no-untyped-call"
# torch's stubs know less of torch than these tests call.

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sightline as sl
from tests.recording.engine_parity import assert_parity
from tests.recording.engines import needs_native

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore")]


def names(t: sl.Trace) -> list[str]:
    return [op.name for op in t.ops.where(level="api")]


def leaf() -> Tensor:
    return torch.randn(3, requires_grad=True)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


# -- backward passes ---------------------------------------------------------------------------------------


def repeated() -> None:
    x = leaf()
    y, weights = x.sin(), torch.ones(3)
    for _ in range(4):
        y.backward(weights, retain_graph=True)
    for _ in range(4):
        torch.autograd.grad(y, x, weights, retain_graph=True)
    for _ in range(4):
        torch.autograd.backward([y], [weights], retain_graph=True)
    for _ in range(4):
        y.sum().backward(retain_graph=True)


def of_higher_order() -> None:
    x = leaf()
    for _ in range(2):
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        torch.autograd.grad(gradient.sum(), x)
    (x**3).sum().backward(create_graph=True)
    torch.autograd.functional.hvp(lambda v: (v**2).sum(), x, x)
    torch.func.grad(lambda v: (v**2).sum())(x)


def with_hooks() -> None:
    x = leaf()
    y = x * 2
    y.register_hook(lambda gradient: gradient * 2 + 1)

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)
        parameter.grad.add_(1)

    x.register_post_accumulate_grad_hook(scale)
    y.sum().backward()
    model = net()
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    model(torch.ones(2, 4)).sum().backward()


def with_an_end_callback() -> None:
    def later() -> None:
        torch.ones(2).add_(1).mul_(2)
        torch.ones(2).neg()

    def hook(gradient: Tensor) -> Tensor:
        torch.autograd.Variable._execution_engine.queue_callback(later)
        return gradient

    y = leaf() * 2
    y.register_hook(hook)
    for _ in range(2):
        y.sum().backward(retain_graph=True)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.exp() * 2


class Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def through_functions_of_ones_own() -> None:
    for _ in range(2):
        Exponential.apply(Unchanged.apply(leaf())).sum().backward()


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (inner * inner).sum().backward()
            (again,) = torch.autograd.grad((inner * 3).sum(), inner)
            assert inner.grad is not None
        return gradients[0] * inner.grad + again


def nested() -> None:
    for _ in range(2):
        Nested.apply(leaf()).sum().backward()
    y = Nested.apply(leaf())
    for _ in range(2):
        y.backward(torch.ones(3), retain_graph=True)


def with_checkpoints() -> None:
    model, x = net(), torch.randn(2, 4, requires_grad=True)
    for reentrant in (True, False):
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    checkpoint(lambda v: checkpoint(inner, v, use_reentrant=True) * 2, x, use_reentrant=True).sum().backward()


def with_autocast() -> None:
    model = net()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 0]))
        loss.backward()


#: In torch 2.10 and older nothing can override `torch.autograd.backward`: docs/limits.md.
OVERRIDABLE = "handle_torch_function" in torch.autograd.backward.__code__.co_names
BACKWARDS = [
    (repeated, 16 if OVERRIDABLE else 12), (of_higher_order, 9), (with_hooks, 2), (with_an_end_callback, 2),
    (through_functions_of_ones_own, 2), (nested, 4), (with_checkpoints, 5), (with_autocast, 2),
]  # fmt: skip


@pytest.mark.parametrize(("run", "count"), BACKWARDS, ids=[run.__name__ for run, _ in BACKWARDS])
def test_each_backward_call_is_one_row(run: Callable[[], None], count: int) -> None:
    calls = names(assert_parity(run))
    assert (
        sum(name in ("Tensor.backward", "torch.autograd.grad", "torch.autograd.backward") for name in calls)
        == count
    )


@pytest.mark.parametrize("ops", ["api", "aten"])
@pytest.mark.parametrize(
    "run", [with_hooks, with_an_end_callback, nested, with_checkpoints], ids=lambda run: run.__name__
)
def test_one_level_alone(run: Callable[[], None], ops: str) -> None:
    assert_parity(run, ops=ops)


def test_the_end_of_a_backward_pass_is_part_of_it() -> None:
    t = assert_parity(with_an_end_callback, ops="aten")
    assert [op.phase for op in t.ops if op.name == "neg"] == ["backward", "backward"]


# -- optimizers ----------------------------------------------------------------------------------------------


def step(optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
    model = net()
    updates = optimizer(model.parameters(), lr=0.01, **settings)

    def closure() -> Tensor:
        updates.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    for _ in range(2):
        updates.step(closure)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad], ids=lambda one: one.__name__
)
def test_optimizers(optimizer: Any, way: dict[str, bool]) -> None:
    assert_parity(lambda: step(optimizer, **way))


@pytest.mark.parametrize(
    "settings", [{"max_iter": 3}, {"max_iter": 3, "line_search_fn": "strong_wolfe"}], ids=str
)
def test_an_optimizer_that_calls_the_model_itself(settings: dict[str, Any]) -> None:
    assert_parity(lambda: step(torch.optim.LBFGS, **settings))


# -- torch functions that run several ops --------------------------------------------------------------------


def copies() -> None:
    x = torch.randn(3, 3)
    for _ in range(2):
        copy.deepcopy(x)
    copy.deepcopy([x, x + 1])
    torch.load(io.BytesIO(saved(x)))
    x.numpy(), torch.from_numpy(x.numpy()), x.tolist(), x.untyped_storage().clone()


def saved(x: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def indexes_inside() -> None:
    for _ in range(2):
        torch.unravel_index(torch.tensor(3), (2, 2))
        torch.unique(torch.tensor([2, 1])), torch.tensor([2, 1]).unique_consecutive()
        F.interpolate(torch.randn(1, 1, 4, 4), scale_factor=2.0, mode="bilinear", recompute_scale_factor=True)
    for _ in range(2):
        torch.unravel_index(torch.tensor(3), (2, 2))


def operators_by_name() -> None:
    x = torch.randn(2, 2)
    torch.ops.aten.add(x, 1), torch.ops.aten.add.Tensor(x, x), torch.ops.aten.linear(x, x)
    for _ in range(2):
        torch.ops.aten.relu_.default(x)


def tensors_without_a_call() -> None:
    x = torch.randn(2, 2)
    nn.Parameter(x), torch.Tensor([1.0, 2.0]), torch.Tensor(3), torch.FloatTensor([1.0])
    nn.Linear(2, 2), torch.distributions.Categorical(logits=x).sample(), x == x, x != x


RUNS = [copies, indexes_inside, operators_by_name, tensors_without_a_call]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_one_call_is_one_row(run: Callable[[], None]) -> None:
    assert_parity(run)
