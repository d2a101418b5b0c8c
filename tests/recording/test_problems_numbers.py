"""Problems in the numbers, planted beside healthy twins: NaN, a broadcast, precision, dead layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.problems import Severity
from sightline.analysis.problems.broadcasts import _has_features
from sightline.analysis.problems.context import ProblemContext
from sightline.notation import number_text
from tests.recording.engines import NATIVE
from tests.recording.problematic import BATCH, STATS, Calls, Regression, found, kinds, only, trained

# -- not finite --------------------------------------------------------------------------------------------


class Rooted(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.fc(x).abs() - self.shift).mean()


def test_the_op_that_made_the_first_nan_is_named() -> None:
    model = Rooted(100.0)
    with sl.trace(model, stats=STATS) as t:
        model(torch.randn(BATCH, 8)).backward()
    problem = only(t, "non-finite")
    assert problem.severity is Severity.ERROR
    assert problem.title.startswith("sqrt made 48 NaN of 48 in f32[6, 8] out of f32[6, 8] (-1")
    assert problem.op is not None
    assert t.ops[problem.op].name == "sqrt"
    assert problem.module == "Rooted"
    assert "in Rooted.forward" in problem.place


def test_a_root_of_positive_numbers_is_healthy() -> None:
    assert kinds(trained(Rooted(-1.0), stats=STATS)) == []


def test_an_infinity_of_a_gradient_is_found_at_its_forward_line() -> None:
    x = torch.zeros(BATCH, requires_grad=True)
    with sl.trace(stats=STATS) as t:
        torch.sqrt(x).sum().backward()
    assert "div.Tensor (backward of sqrt) made 6 Inf of 6" in only(t, "non-finite").title


class Attention(nn.Module):
    """Scores are masked with -inf; a row that is masked whole has no softmax."""

    def __init__(self, whole: bool = False, safe: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.whole = whole
        self.safe = safe

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(0 if self.whole else 1)
        scores = (h @ h.T).masked_fill(mask, float("-inf")) + torch.log((~mask).float())
        weights = scores.softmax(-1)
        result: Tensor = (weights.nan_to_num() if self.safe else weights) @ h
        return result


@pytest.mark.parametrize("model", [Attention(), Attention(whole=True, safe=True)], ids=["masked", "handled"])
def test_infinities_that_a_mask_asks_for_and_a_softmax_takes_away_are_healthy(model: nn.Module) -> None:
    with sl.trace(model, stats=STATS) as t, torch.no_grad():
        model(torch.randn(BATCH, 8))
    assert kinds(t) == []


def test_a_softmax_over_nothing_is_not() -> None:
    model = Attention(whole=True)
    with sl.trace(model, stats=STATS) as t:
        model(torch.randn(BATCH, 8))
    assert "_softmax made 6 NaN of 36" in found(t)[-1].title


def test_a_mask_that_is_written_through_a_view_is_healthy() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        logits = net.second(net.first(x)) * 1.0
        logits[:, 3] = float("-inf")
        result: Tensor = logits / 2
        return result

    model = Calls(forward)
    with sl.trace(model, stats=STATS) as t, torch.no_grad():
        model(torch.randn(BATCH, 8))
    assert kinds(t) == []


def test_memory_that_was_not_filled_is_no_problem() -> None:
    with sl.trace(stats=STATS) as t:
        for _ in range(50):
            torch.empty(64).fill_(0.0)
            torch.empty(64)
    assert kinds(t) == []


# -- broadcast ---------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "written out": lambda y, target: ((y - target) ** 2).mean(),
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "absolute": lambda y, target: (target - y).abs().sum(),
    "weighted": lambda y, target: (y.square() * target).mean(),
    "in two steps": lambda y, target: (y - target).pow(2).mean(-1).sum(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("ops", ["both", "aten"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("squeeze", [False, True], ids=["column", "row"])
def test_a_loss_between_a_column_and_a_row(loss: Any, squeeze: bool, ops: Any) -> None:
    model, x = Regression(squeeze), torch.randn(BATCH, 4)
    target = torch.randn(BATCH, 1) if squeeze else torch.randn(BATCH)
    with sl.trace(model, ops=ops) as t:
        loss(model(x), target).backward()
    problem = only(t, "broadcast")
    assert "broadcasts both to [6, 6], which becomes a loss" in problem.title
    assert problem.severity is Severity.ERROR


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("squeeze", [False, True], ids=["column", "row"])
def test_a_loss_between_equal_shapes_is_healthy(loss: Any, squeeze: bool) -> None:
    model, x = Regression(squeeze), torch.randn(BATCH, 4)
    target = torch.randn(BATCH) if squeeze else torch.randn(BATCH, 1)
    with sl.trace(model) as t:
        loss(model(x), target).backward()
    assert kinds(t) == []


#: Ways to a column: the loss, and how many numbers the model predicts.
COLUMNS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "slice": (lambda y, target: F.mse_loss(y[:, :1], target), 2),
    "slice, written out": (lambda y, target: (y[:, 1:] - target).pow(2).mean(), 2),
    "view": (lambda y, target: F.l1_loss(y.view(-1, 1), target), 1),
    "view, written out": (lambda y, target: (y.flatten().view(-1, 1) - target).abs().mean(), 1),
    "view of the target": (lambda y, target: (y.squeeze(-1) - target.view(-1, 1)).pow(2).mean(), 1),
    "unsqueeze": (lambda y, target: F.huber_loss(y.squeeze(-1).unsqueeze(1), target), 1),
    "gather": (lambda y, target: F.smooth_l1_loss(y.gather(1, y.argmax(-1, True)), target), 2),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("ops", ["both", "aten"])
@pytest.mark.parametrize(("loss", "outputs"), COLUMNS.values(), ids=COLUMNS.keys())
def test_a_column_that_was_sliced_or_viewed_meets_a_row(loss: Any, outputs: int, ops: Any) -> None:
    model = nn.Linear(4, outputs)
    with sl.trace(model, ops=ops) as t:
        loss(model(torch.randn(BATCH, 4)), torch.randn(BATCH)).backward()
    assert "broadcasts both to [6, 6], which becomes a loss" in only(t, "broadcast").title


HEALTHY_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one coordinate": lambda y, _: (y[:, :1] - y[:, 0]).pow(2).mean(),
    "of a view": lambda y, _: (y[:, 0].view(-1, 1) - y[:, 0].detach()).abs().mean(),
    "energy distance": lambda y, target: (y[:, 0][:, None] - target).abs().mean(),
    "kernel": lambda y, target: (-(y[:, 0].unsqueeze(1) - target).pow(2)).exp().mean(),
    "equal shapes": lambda y, target: F.mse_loss(y[:, :1], target[:, None]),
    "rows": lambda y, target: F.mse_loss(y[:, 0], target),
}


@pytest.mark.parametrize("loss", HEALTHY_PAIRS.values(), ids=HEALTHY_PAIRS.keys())
def test_pairs_that_are_meant_are_healthy(loss: Any) -> None:
    model = nn.Linear(4, 2)
    with sl.trace(model) as t:
        loss(model(torch.randn(BATCH, 4)), torch.randn(BATCH)).backward()
    assert kinds(t) == []


def test_a_mask_without_its_channel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 1, 3, padding=1), nn.Sigmoid())
    images, masks = torch.randn(4, 3, 8, 8), torch.rand(4, 8, 8)
    with sl.trace(model) as t:
        ((model(images) - masks) ** 2).mean().backward()
    assert "[4, 4, 8, 8]" in only(t, "broadcast").title


def pairwise(x: Tensor) -> Tensor:
    return (x[:, None] - x).abs().mean()


def distances(x: Tensor) -> Tensor:
    square = x[:, None].pow(2)
    return (square.sum(1, keepdim=True) + square.sum(1) - 2 * square @ square.T).mean()


def outer(x: Tensor) -> Tensor:
    return (torch.ones(len(x), 1) * x).sum() + (torch.arange(len(x)).float().view(-1, 1) * x).sum()


def advantages(x: Tensor) -> Tensor:
    return (x.unsqueeze(1).expand(len(x), len(x)) - x.expand(len(x), len(x))).pow(2).mean()


def scores(x: Tensor) -> Tensor:
    column = F.linear(x[:, None], torch.ones(1, 1))
    return (column + x).softmax(-1)


@pytest.mark.parametrize("ops", ["both", "aten"])
@pytest.mark.parametrize("code", [pairwise, distances, outer, advantages, scores])
def test_outer_operations_on_purpose_are_healthy(code: Any, ops: Any) -> None:
    with sl.trace(ops=ops) as t:
        code(torch.randn(BATCH))
    assert kinds(t) == []


# -- precision ---------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer, a table in float32 as one writes it, and a layer."""

    def __init__(self, cast: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        table = torch.linspace(0, 1, 8)
        h = self.first(x)
        if self.cast == "table":
            h = h * table.to(h.dtype)
        elif self.cast == "written":
            h = (h.float() * table).to(x.dtype)
        elif self.cast == "back":
            h = (h * table).to(x.dtype)
        else:
            h = h * table
        result: Tensor = self.second(torch.relu(h))
        return result


def test_a_float32_table_in_a_model_of_low_precision_under_autocast() -> None:
    model = Scaled().bfloat16()
    with sl.trace(model) as t, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(BATCH, 8).bfloat16()).sum().backward()
    problem = only(t, "upcast")
    ops = 2 if NATIVE else 3  # a mode sees the cast, too
    spread = f"* of bf16[6, 8] and f32[8] gives float32, which spreads over {ops} ops to "
    assert problem.title.startswith(spread)
    assert problem.title.endswith(" in Scaled.forward and needs 192 B more memory")
    assert "Cast the float32 tensor where it is made, " in problem.why
    assert problem.why.endswith(" in Scaled.forward: .to(torch.bfloat16).")
    assert "Scaled.forward" in problem.place


@pytest.mark.parametrize("cast", ["table", "written", "back"])
def test_a_cast_that_is_written_is_healthy(cast: str) -> None:
    model = Scaled(cast).bfloat16()
    assert kinds(trained(model, torch.randn(BATCH, 8).bfloat16())) == []


def test_autocast_over_float32_weights_is_healthy() -> None:
    model = Scaled()
    with sl.trace(model) as t, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(BATCH, 8)).sum().backward()
    assert kinds(t) == []


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.linspace(0, 1, 8).cos()
        result: Tensor = (self.query(x) * angles) @ (self.key(x) * angles).T
        return result


def test_scores_that_are_computed_in_float32_by_accident() -> None:
    problems = found(trained(Rotated().bfloat16(), torch.randn(BATCH, 8).bfloat16()))
    assert {problem.kind for problem in problems} == {"upcast"}


# -- dead layers -------------------------------------------------------------------------------------------


def test_a_dead_relu() -> None:
    model = Calls(lambda net, x: net.second(net.relu(net.first(x))))
    with torch.no_grad():
        model.first.bias.fill_(-100.0)
    problem = only(trained(model, stats=STATS), "dead-activation")
    assert problem.title.startswith(
        "F.relu gives zero for all f32[6, 8] in 1 of 1 calls: the largest it is given"
    )
    assert problem.module == "relu"


def test_zero_initialised_branches_dropout_and_small_outputs_are_healthy() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
            self.drop = nn.Dropout(1.0)
            self.gate = nn.ReLU()
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

        def forward(self, x: Tensor) -> Tensor:
            small: Tensor = self.gate(-x[:2, :2].abs())
            result: Tensor = x + self.up(self.down(x)) + self.drop(x) + small.sum()
            return result

    assert kinds(trained(Adapter(), stats=STATS)) == []


def test_a_loss_that_diverges_until_it_is_infinite() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    x, y = torch.randn(64, 10), torch.randn(64, 1)
    losses = []
    with sl.trace(model, stats=True) as t:
        for _ in range(8):
            loss = F.mse_loss(model(x), y * 9)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    bad = next(at for at, number in enumerate(losses) if not math.isfinite(number))
    first, *others = found(t)
    assert first.kind == "diverging-loss"
    assert first.title == (
        f"the loss grows from {number_text(losses[0])} in step 0 to {number_text(losses[bad - 1])} in step "
        f"{bad - 1} and is {'NaN' if math.isnan(losses[bad]) else 'infinite'} in step {bad}"
    )
    texts = {problem.title.split(" ")[0]: problem.why for problem in others}
    assert "the weights are lost" not in texts["mse_loss"]  # no gradient is computed from the loss's number
    assert any("the weights are lost" in text for text in texts.values())


def test_an_infinity_that_is_chosen_away_is_no_pointer() -> None:
    x = torch.arange(4.0)
    with sl.trace(stats=True) as t:
        bucket = torch.log(x) / 3
        torch.where(x < 1, x, bucket).sum().item()
    assert kinds(t) == []
    assert "1 with Inf" not in str(t).replace("2 with Inf, as given, meant or discarded", "")
    assert "nonfinite" not in str(t)


def test_a_matrix_multiplication_without_weights_has_no_features() -> None:
    model, scale = nn.Linear(4, 4), torch.randn(4, 4)
    with sl.trace(model) as t:
        model.weight.sum()  # the first value of the recording is a parameter
        wide = torch.mm(scale, scale.clone())
        wide - torch.randn(4, 3).mean(-1)
    context = ProblemContext(t.index)
    op = next(op.id for op in t.ops if op.name.startswith("mm"))
    assert context.kind(0) == "parameter"
    assert not _has_features(context, context.outputs(op)[0])
