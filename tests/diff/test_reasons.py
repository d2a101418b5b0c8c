"""The reasons of divergences, and differences that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sightline as sl
from tests.diff.models import WIDTH, inputs, recorded


class Body(nn.Module):
    """A model whose middle is any function of its layers and their input."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.middle = middle

    def forward(self, x: Tensor) -> Any:
        return self.second(self.middle(self, self.first(x)))


def _compared(one: Any, other: Any, dtype: torch.dtype = torch.float32, x: Tensor | None = None) -> sl.Diff:
    traces = []
    for middle, kind in ((one, torch.float32), (other, dtype)):
        torch.manual_seed(0)
        given = inputs() if x is None else x
        traces.append(recorded(Body(middle).eval().to(kind), given.to(kind)))
    return sl.diff(*traces)


EQUAL = {
    "a factor that is applied later": (
        lambda _, x: (x * 0.5) @ (x.mT @ x) * 3.0,
        lambda _, x: (x * 3.0) @ (x.mT @ x) * 0.5,
    ),
    "a sign that is squared away": (lambda _, x: (x - x.roll(1)) ** 2, lambda _, x: (x.roll(1) - x) ** 2),
    "an activation of parts": (lambda _, x: F.silu(x), lambda _, x: x * torch.sigmoid(x)),
    "rows one by one": (
        lambda self, x: F.gelu(self.norm(x)),
        lambda self, x: torch.cat([F.gelu(self.norm(row)) for row in x.split(1, 1)], 1),
    ),
}


@pytest.mark.parametrize("what", EQUAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_to_the_same_is_no_divergence(what: str, dtype: torch.dtype) -> None:
    if what == "a sign that is squared away" and dtype == torch.bfloat16:
        pytest.skip("in a coarse precision a difference may drown, so a changed sign counts")
    diff = _compared(*EQUAL[what], dtype)
    assert diff.divergence is None, str(diff)


DIFFERENT = {
    "another activation": (
        lambda _, x: F.gelu(x), lambda _, x: x * torch.sigmoid(1.702 * x), "op", r"F.gelu against .*sigmoid"),
    "inputs in another order": (
        lambda _, x: torch.cat([x[:, :2], x[:, 2:] * 2], 1),
        lambda _, x: torch.cat([x[:, 2:] * 2, x[:, :2]], 1),
        "wiring", r"torch.cat at .*takes .* against "),
    "a module left out": (
        lambda self, x: x + self.norm(x), lambda _, x: x + x,
        "module", r"norm \(LayerNorm\) ran only on the first"),
    "an op left out": (
        lambda _, x: F.relu(x), lambda _, x: x,
        "op", r"^F.relu at .*: F.relu only on the first side; the other goes on with F.linear at "),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reason_is_named(what: str, dtype: torch.dtype) -> None:
    import re

    one, other, kind, text = DIFFERENT[what]
    found = _compared(one, other, dtype).divergence
    assert found is not None
    assert found.reason.kind == kind, found.text
    assert re.search(text, found.text), found.text


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        return self.table(ids)


def test_integers_that_differ_are_suspected_where_all_else_agrees() -> None:
    torch.manual_seed(0)
    model = Tokens()
    first, second = recorded(model, torch.tensor([1, 2, 3])), recorded(model, torch.tensor([1, 2, 4]))
    diff = sl.diff(first, second)
    assert diff.divergence is not None
    assert diff.divergence.reason.kind == "input"
    assert "i64 probably differs: integers are not measured, and all else agrees" in diff.divergence.text
    assert diff.notes == ["integers are not measured: an input was not compared"]


def test_integers_are_compared_where_tensors_were_kept() -> None:
    torch.manual_seed(0)
    model = Tokens()
    first = recorded(model, torch.tensor([1, 2, 3]), capture=sl.Capture(inputs=True))
    second = recorded(model, torch.tensor([1, 2, 4]), capture=sl.Capture(inputs=True))
    diff = sl.diff(first, second)
    assert diff.divergence is not None
    assert "itself differs" in diff.divergence.text
    assert diff.notes == []


def test_a_weight_with_its_elements_in_another_order_is_suspected() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    first = recorded(model)
    layer: Any = model[0]
    layer.weight.data = layer.weight.data.t().contiguous()
    found = sl.diff(first, recorded(model)).divergence
    assert found is not None
    assert "0.weight has the statistics of the other, and its elements may be in another order" in found.text
