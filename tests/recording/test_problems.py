"""Every kind of problem, planted in a model that runs, beside a healthy twin that must be silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.problems import Problem, Severity, find
from tests.recording.architectures import ZOO, Architecture
from tests.recording.test_architectures import execute, prepare, pristine

BATCH = 6
STATS = True


def found(trace: Any) -> list[Problem]:
    return find(trace.index)


def kinds(trace: Any) -> list[str]:
    return [problem.kind for problem in find(trace.index)]


def only(trace: Any, kind: str) -> Problem:
    """The one problem of a trace, which must be of this kind and point into this file."""
    problems = find(trace.index)
    assert [problem.kind for problem in problems] == [kind], problems
    assert "test_problems.py:" in problems[0].place
    return problems[0]


class Regression(nn.Module):
    """Predicts one number per row: ``[B, 1]``, or ``[B]`` if squeezed."""

    def __init__(self, squeeze: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.squeeze = squeeze

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y.squeeze(-1) if self.squeeze else y


class Calls(nn.Module):
    """Two layers, and a forward that is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.relu = nn.ReLU()
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def trained(model: nn.Module, x: Tensor | None = None, **options: Any) -> Any:
    x = torch.randn(BATCH, 8) if x is None else x
    with sl.trace(model, **options) as t:
        model(x).sum().backward()
    return t


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
    assert problem.title.startswith("sqrt made the first NaN (48 of 48 elements) out of f32[6, 8] in -1")
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
    assert "in the backward pass made the first Inf" in only(t, "non-finite").title


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
    assert "_softmax made the first NaN" in found(t)[-1].title


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
    assert problem.title == "* mixes bf16[6, 8] with f32[8] and gives f32[6, 8], which feeds a matmul"
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


# -- gradients ---------------------------------------------------------------------------------------------


def test_a_layer_that_is_never_called() -> None:
    problem = only(trained(Calls(lambda net, x: net.first(x))), "unused-parameter")
    assert problem.title == "Linear with 2 trainable parameters was never called"
    assert (problem.module, problem.parameter) == ("second", "second.weight")


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.mask_token = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y


def test_a_parameter_that_is_never_used() -> None:
    problem = only(trained(Tokens()), "unused-parameter")
    assert (problem.title, problem.parameter) == ("mask_token of Tokens was never used", "mask_token")


def test_a_result_that_never_reaches_the_loss() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.second(x)
        result: Tensor = net.first(x)
        return result

    problem = only(trained(Calls(forward)), "no-gradient")
    assert problem.title == "weight, bias of Linear were used but got no gradient"
    assert problem.module == "second"


def test_a_branch_that_is_detached() -> None:
    problem = only(trained(Calls(lambda net, x: net.first(x) + net.second(x).detach())), "cut-gradient")
    assert problem.title == "weight, bias of Linear were cut from the loss by detach"
    assert problem.module == "second"


def test_a_branch_under_no_grad() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = net.second(x)
        result: Tensor = net.first(h)
        return result

    problem = only(trained(Calls(forward)), "cut-gradient")
    assert (
        problem.title
        == "weight, bias of Linear were cut from the loss by a block without gradients (no_grad)"
    )


def test_every_layer_of_a_branch_is_told_once() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            result: Tensor = self.head(x.detach())
            return result

    problem = only(trained(Deep()), "cut-gradient")
    assert (problem.count, problem.module) == (5, "layers.0 … layers.4")
    assert problem.modules == tuple(f"layers.{at}" for at in range(5))


def frozen(model: Calls) -> Calls:
    model.second.requires_grad_(False)
    return model


def straight_through(net: Any, x: Tensor) -> Tensor:
    """Quantised forward, smooth backward: the detached part has another way to the loss."""
    h = net.second(net.first(x))
    result: Tensor = h + (h.round() - h).detach()
    return result


def tied(net: Any, x: Tensor) -> Tensor:
    net.second.weight, net.second.bias = net.first.weight, net.first.bias
    result: Tensor = net.first(x)
    return result


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Calls(lambda net, x: net.second(torch.relu(net.first(x)))),
    "frozen and unused": lambda: frozen(Calls(lambda net, x: net.first(x))),
    "frozen and detached": lambda: frozen(Calls(lambda net, x: net.first(x) + net.second(x).detach())),
    "straight through": lambda: Calls(straight_through),
    "tied": lambda: Calls(tied),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "recurrent": lambda: Last(nn.LSTM(8, 8, num_layers=2)),
    "inplace": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
}


class Last(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)[0]
        return result


@pytest.mark.parametrize("ops", ["both", "aten", "api", "none"])
@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_training(make: Callable[[], nn.Module], ops: Any) -> None:
    torch.manual_seed(0)
    assert found(trained(make(), ops=ops, stats=STATS)) == []


def test_an_embedding_of_which_some_rows_are_used() -> None:
    model = nn.EmbeddingBag(10, 4)
    with sl.trace(model) as t:
        model(torch.tensor([[1, 2], [3, 3]])).sum().backward()
    assert kinds(t) == []


def test_without_a_backward_pass_nothing_is_missing() -> None:
    model = Calls(lambda net, x: net.first(x))
    with sl.trace(model) as t:
        model(torch.randn(BATCH, 8))
    assert kinds(t) == []


def test_gradients_that_were_cleared_or_taken_by_hand_are_known() -> None:
    model, x = HEALTHY["plain"](), torch.randn(BATCH, 8)
    with sl.trace(model) as t:
        model(x).sum().backward()
        model.zero_grad()
    assert kinds(t) == []
    with sl.trace(model) as t:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert kinds(t) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_healthy(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(net: Any, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(net.second, net.first(x), use_reentrant=reentrant)
        return result

    assert kinds(trained(Calls(forward))) == []


def test_steps_of_an_optimizer_are_healthy() -> None:
    model, x = HEALTHY["plain"](), torch.randn(BATCH, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with sl.trace(model, stats=STATS) as t:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert kinds(t) == []


def test_one_half_of_a_pair_in_its_turn() -> None:
    """A discriminator is trained on what a generator makes: the generator has its own turn."""
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    with sl.trace() as t:
        critic(generator(torch.randn(BATCH, 8)).detach()).mean().backward()
    assert kinds(t) == []


def test_an_expert_without_tokens_is_healthy() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.experts[0](x) + self.experts[2](x)
            return result

    assert kinds(trained(Routed())) == []


def test_a_crash_in_the_forward_is_no_reason_to_miss_gradients() -> None:
    model = Calls(lambda net, x: net.second(net.first(x) @ x))
    with pytest.raises(RuntimeError), sl.trace(model) as t:
        model(torch.randn(BATCH, 8)).sum().backward()
    assert kinds(t) == []


# -- healthy kinds of training -------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """Variational, or with a codebook, a straight-through estimator and a commitment loss."""

    def __init__(self, codes: int = 0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(8 if codes else 4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.codebook = nn.Embedding(codes, 8) if codes else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        if self.codebook is None:
            mean, log_variance = h.chunk(2, dim=-1)
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            extra = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        else:
            weight = self.codebook.weight
            far = h.pow(2).sum(1, keepdim=True) - 2 * h @ weight.T + weight.pow(2).sum(1)
            code = self.codebook(far.argmin(1))
            extra = F.mse_loss(code, h.detach()) + 0.25 * F.mse_loss(h, code.detach())
            z = h + (code - h).detach()
        result: Tensor = F.mse_loss(self.decoder(z), x) + extra
        return result


class Contrast(nn.Module):
    """Two views of a batch, pulled together; the targets come of a frozen moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.average = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)
            target = F.normalize(self.average(x + 0.1 * torch.randn_like(x)), dim=-1)
        one = F.normalize(self.online(x + 0.1 * torch.randn_like(x)), dim=-1)
        return F.cross_entropy(one @ target.T / 0.1, torch.arange(len(x)))


class Adapted(nn.Module):
    """A frozen layer with a low-rank update that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


class Actor(nn.Module):
    """Policy gradients: advantages are detached, values have a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        chosen = torch.distributions.Categorical(logits=self.policy(h))
        actions, returns = chosen.sample(), torch.randn(len(x))
        values = self.value(h).squeeze(-1)
        advantage = (returns - values).detach()
        result: Tensor = -(chosen.log_prob(actions) * advantage).mean() + F.mse_loss(values, returns)
        return result


class Physics(nn.Module):
    """The loss holds a derivative of the network, and its value at the border."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        result: Tensor = (slope.sum(1, keepdim=True) + u).pow(2).mean() + u[:1].pow(2).mean()
        return result


CLASSICS = {
    "variational": Autoencoder, "quantised": lambda: Autoencoder(BATCH), "contrastive": Contrast,
    "low rank": Adapted, "policy gradient": Actor, "physics": Physics,
}  # fmt: skip


@pytest.mark.parametrize("ops", ["both", "aten"])
@pytest.mark.parametrize("make", CLASSICS.values(), ids=CLASSICS.keys())
def test_healthy_kinds_of_training(make: Callable[[], nn.Module], ops: Any) -> None:
    torch.manual_seed(0)
    assert found(trained(make(), ops=ops, stats=STATS)) == []


def test_learning_from_a_target_network_is_healthy() -> None:
    online, target, x = nn.Linear(8, 3), nn.Linear(8, 3), torch.randn(BATCH, 8)
    with sl.trace() as t:
        with torch.no_grad():
            goal = torch.randn(BATCH) + 0.9 * target(x).max(1).values
        F.smooth_l1_loss(
            online(x).gather(1, torch.zeros(BATCH, 1, dtype=torch.long)).squeeze(1), goal
        ).backward()
    assert kinds(t) == []


# -- dead layers -------------------------------------------------------------------------------------------


def test_a_dead_relu() -> None:
    model = Calls(lambda net, x: net.second(net.relu(net.first(x))))
    with torch.no_grad():
        model.first.bias.fill_(-100.0)
    problem = only(trained(model, stats=STATS), "dead-layer")
    assert problem.title == "the output f32[6, 8] is zero everywhere, though its input varies"
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


# -- the same again ----------------------------------------------------------------------------------------


def test_a_layer_that_is_called_twice_on_the_same_input() -> None:
    problem = only(trained(Calls(lambda net, x: net.second(net.first(x)) + net.first(x))), "computed-again")
    assert problem.severity is Severity.NOTE
    assert problem.title == "Linear is called again on the same inputs (768 FLOPs)"
    assert problem.module == "first"


def test_a_product_that_is_computed_twice() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.second(net.first(x))
        result: Tensor = (h @ h.T).relu() + (h @ h.T).tanh()
        return result

    assert only(trained(Calls(forward)), "computed-again").title.startswith(
        "@ runs again on the same f32[6, 8]"
    )


def chained(net: Any, x: Tensor) -> Tensor:
    """The same layers, but each time on something else."""
    h = net.first(x)
    result: Tensor = net.second(net.first(h)) + net.second(h.relu())
    return result


def test_the_same_layer_on_other_inputs_is_healthy() -> None:
    assert kinds(trained(Calls(chained))) == []


def test_two_views_of_a_dropout_are_healthy() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        result: Tensor = net.second(F.dropout(net.first(x))) + net.second(F.dropout(x))
        return result

    assert kinds(trained(Calls(forward))) == []


def test_a_model_that_is_run_twice_is_healthy() -> None:
    model, x = HEALTHY["plain"](), torch.randn(BATCH, 8)
    with sl.trace(model) as t, torch.no_grad():
        model(x)
        model(x)
    assert kinds(t) == []


def test_reading_a_number_on_a_cpu_costs_nothing() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.second(net.first(x))
        result: Tensor = h * h.max().item() if h.sum() > 0 else h[h > 0].sum() + h.nonzero().sum()
        return result

    assert kinds(trained(Calls(forward))) == []


@pytest.mark.parametrize("ops", ["both", "aten", "api", "none"])
def test_a_run_that_has_not_ended_can_be_looked_at(ops: Any) -> None:
    seen: list[list[Problem]] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        seen.append(found(t))
        h.register_hook(lambda gradient: seen.append(found(t)))
        result: Tensor = net.second(h)
        return result

    model = Calls(forward)
    with sl.trace(model, ops=ops, stats=STATS) as t:
        model(torch.randn(BATCH, 8)).sum().backward()
    assert seen == [[], []]
    assert found(t) == []


# -- whole architectures -----------------------------------------------------------------------------------

FIRST, LAST = "encoder.layers.0.conv", "encoder.layers.9.conv"
#: What is really so in these models as they are configured here, by kind and module.
QUIRKS: dict[str, set[tuple[str, str]]] = {
    # The pooler runs, and a masked language model makes no use of it.
    "big_bird": {("no-gradient", "bert.pooler")},
    "fnet": {("no-gradient", "fnet.pooler.dense")},
    # A decision transformer embeds states, actions and returns, and inherits an embedding of tokens.
    "decision_transformer": {("unused-parameter", "encoder.wte")},
    # The token for masked patches is only used in pre-training.
    "dinov2": {("unused-parameter", "dinov2.embeddings")},
    # The codes are picked by an argmax: in this implementation nothing reaches the encoder.
    "encodec": {
        ("no-gradient", f"{FIRST}.parametrizations.weight … {LAST}.parametrizations.weight"),
        ("no-gradient", f"{FIRST} … {LAST}"),
        ("no-gradient", "encoder.layers.7.lstm"),
    },
    # The bias is made and never added.
    "reformer": {("unused-parameter", "lm_head")},
    # Without token types there are no segments, and without permutations no masks.
    "xlnet": {
        ("unused-parameter", "transformer"),
        ("unused-parameter", "transformer.layer.0.rel_attn, transformer.layer.1.rel_attn"),
    },
}  # fmt: skip

#: Enough kinds of code for what is cheaper than everything.
LOW = ("gpt2", "llama", "gemma", "mixtral", "mamba", "bert", "t5", "vit", "resnet", "whisper")


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    pristine(ZOO[0])  # the first model built adds a method to nn.Module, for good
    yield
    transformers.logging.set_verbosity(before)
    pristine.cache_clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("architecture", ZOO, ids=str)
def test_real_architectures_are_healthy(architecture: Architecture, mode: str) -> None:
    run = prepare(architecture, mode)
    with sl.trace(run.model, stats=STATS) as t:
        execute(run, mode)
    expected = QUIRKS.get(architecture.name, set()) if mode == "train" else set()
    assert {(problem.kind, problem.module) for problem in found(t)} == expected, found(t)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "gemma", "mixtral", "bert", "t5", "vit", "resnet", "whisper"]
)
def test_real_architectures_of_low_precision_are_healthy(name: str, precision: str) -> None:
    run = prepare(next(one for one in ZOO if one.name == name), "train")
    if precision == "bfloat16":
        run.model.to(torch.bfloat16)
        run.inputs = {key: _lower(value) for key, value in run.inputs.items()}
    around = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
    with sl.trace(run.model) as t, around:
        execute(run, "train")
    assert found(t) == []


def _lower(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if floating else value
