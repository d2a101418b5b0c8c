"""The reasons of divergences, and differences that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sightline as sl
from sightline.recording.statistics import observer
from tests.compare.models import WIDTH, inputs, recorded


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


@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_computations_are_no_divergence(case: str, dtype: torch.dtype) -> None:
    if case == "a sign that is squared away" and dtype == torch.bfloat16:
        pytest.skip("in a coarse precision a difference may drown, so a changed sign counts")
    diff = _compared(*EQUAL[case], dtype)
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


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reason_is_named(case: str, dtype: torch.dtype) -> None:
    import re

    one, other, kind, text = DIFFERENT[case]
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


def test_tokens_that_differ_are_named() -> None:
    torch.manual_seed(0)
    model = Tokens()
    diff = sl.diff(recorded(model, torch.tensor([1, 2, 3])), recorded(model, torch.tensor([1, 2, 4])))
    assert diff.divergence is not None
    assert diff.divergence.reason.kind == "input"
    assert "an input itself differs; it came from outside" in diff.divergence.text
    assert diff.notes == []


def test_integers_that_differ_are_suspected_where_all_else_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "_MOST_INTEGERS", 2)  # of more, nothing is measured
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


class Scores(nn.Module):
    """Products of queries and keys, which come from one matrix and are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = WIDTH**-0.5

    def forward(self, x: Tensor) -> Any:
        q, k = self.both(x).chunk(2, -1)
        return self.out((q @ k.mT * self.scale).softmax(-1) @ x)


def _scores(dtype: torch.dtype, change: Any) -> sl.Diff:
    torch.manual_seed(0)
    first, second = Scores().eval(), Scores().eval()
    second.load_state_dict(first.state_dict())
    change(second)
    x = torch.randn(3, 5, WIDTH)
    return sl.diff(recorded(first, x), recorded(second.to(dtype), x.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_that_is_in_the_weights_is_no_divergence(dtype: torch.dtype) -> None:
    def scaled(model: Scores) -> None:
        model.both.weight.data[:WIDTH] *= model.scale
        model.scale = 1.0

    diff = _scores(dtype, scaled)
    assert diff.divergence is None, str(diff)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_in_another_order_is_named_though_its_statistics_agree(dtype: torch.dtype) -> None:
    def shuffled(model: Scores) -> None:
        model.both.weight.data = model.both.weight.data.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)

    found = _scores(dtype, shuffled).divergence
    assert found is not None
    assert found.reason.kind == "parameter", found.text
    assert (
        "both.weight has the statistics of the other, and its elements may be in another order" in found.text
    )


def test_results_of_one_line_are_distinguished() -> None:
    def middle(which: int) -> Any:
        def run(_: Any, x: Tensor) -> Tensor:
            parts = [x * factor for factor in (2.0, 3.0)]
            return torch.cat([parts[0], parts[1], parts[which]], -1)[..., -WIDTH:]

        return run

    found = _compared(middle(0), middle(1)).divergence
    assert found is not None
    assert "result 1 of that line, against result 2 of it" in found.text, found.text


# -- random numbers ------------------------------------------------------------------------------------------

DRAWS: dict[str, tuple[Any, Any, int, str, str]] = {
    "another seed": (
        lambda _, x: x + torch.randn(WIDTH), lambda _, x: x + torch.randn(WIDTH), 1,
        "random", "the two sides draw other random numbers"),
    "a dropout with another seed": (
        lambda _, x: F.dropout(x), lambda _, x: F.dropout(x), 1,
        "random", "the two sides draw other random numbers"),
    "equal draws around other means": (
        lambda _, x: torch.normal(x.sin(), 1.0), lambda _, x: torch.normal(x.cos(), 1.0), 0,
        "op", "Tensor.sin against Tensor.cos"),
    "equal integers, and another op": (
        lambda _, x: F.relu(x[:, torch.randperm(5)]), lambda _, x: F.gelu(x[:, torch.randperm(5)]), 0,
        "op", "F.relu against F.gelu"),
    "a draw that one side lacks": (
        lambda _, x: x + torch.randn(WIDTH), lambda _, x: x, 0,
        "random", "draws random numbers, only on the first side"),
}  # fmt: skip


@pytest.mark.parametrize("case", DRAWS)
def test_random_numbers_are_the_reason_only_where_they_differ(case: str) -> None:
    one, other, seed, kind, text = DRAWS[case]
    traces = []
    for middle, offset in ((one, 0), (other, seed)):
        torch.manual_seed(0)
        model, x = Body(middle), inputs()
        torch.manual_seed(2 + offset)
        traces.append(recorded(model, x))
    found = sl.diff(*traces).divergence
    assert found is not None
    assert (found.reason.kind, found.reason.text) == (kind, text)
