"""Problems of gradients, planted in models that train, beside healthy twins that must be silent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import sightline as sl
from tests.recording.engines import BOTH_ENGINES
from tests.recording.problematic import BATCH, STATS, Calls, found, kinds, only, plain, trained

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
    assert problem.title.startswith(
        "weight, bias of Linear were used but got no gradient: the result of F.linear at "
    )
    assert problem.title.endswith(" does not reach the loss")
    assert problem.module == "second"


def test_a_branch_that_is_detached() -> None:
    problem = only(trained(Calls(lambda net, x: net.first(x) + net.second(x).detach())), "cut-gradient")
    assert problem.title == "weight, bias of Linear were cut from the loss by detach"
    assert problem.module == "second"


def test_a_branch_that_is_detached_in_a_model_made_in_the_block() -> None:
    with sl.trace() as t:
        model = Calls(lambda net, x: net.first(x) + net.second(x).detach())
        model(torch.randn(BATCH, 8)).sum().backward()
    problem = only(t, "cut-gradient")
    assert problem.title == "weight, bias of Linear were cut from the loss by detach"


def test_a_layer_that_is_never_called_in_a_model_made_in_the_block() -> None:
    with sl.trace() as t:
        model = Calls(lambda net, x: net.first(x))
        model(torch.randn(BATCH, 8)).sum().backward()
    assert only(t, "unused-parameter").title == "Linear with 2 trainable parameters was never called"


@pytest.fixture
def process_group() -> Iterator[None]:
    hook = sys.excepthook
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


def _unused(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.first(x)
    return result


def _without_effect(net: Any, x: Tensor) -> Tensor:
    net.second(x)
    return _unused(net, x)


def _detached(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.first(x) + net.second(x).detach()
    return result


@pytest.mark.parametrize(
    ("forward", "kind"),
    [(_unused, "unused-parameter"), (_without_effect, "no-gradient"), (_detached, "cut-gradient")],
)
def test_a_copy_that_makes_replicas_equal_is_no_use_of_a_parameter(
    process_group: None, forward: Any, kind: str
) -> None:
    with sl.trace() as t:
        model = nn.parallel.DistributedDataParallel(Calls(forward), find_unused_parameters=True)
        model(torch.randn(BATCH, 8)).sum().backward()
    problem = only(t, kind)
    assert problem.module == "module.second"
    assert forward is _unused or problem.place.endswith(f" in {forward.__name__}")


def test_a_moving_average_is_no_use_of_a_parameter() -> None:
    model, average = Calls(_unused), Calls(_unused)
    with sl.trace() as t:
        model(torch.randn(BATCH, 8)).sum().backward()
        with torch.no_grad():
            for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(new.detach() * 0.1)
        average(torch.randn(BATCH, 8))
    titles = {problem.title for problem in found(t) if problem.module.endswith("second")}
    assert titles == {"Linear with 2 trainable parameters was never called"}


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
    "plain": plain,
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
    model, x = plain(), torch.randn(BATCH, 8)
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
    model, x = plain(), torch.randn(BATCH, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with sl.trace(model, stats=STATS) as t:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert kinds(t) == []


def test_one_half_of_a_pair_in_its_turn() -> None:
    """A discriminator is trained on the results of a generator: the generator has its own turn."""
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    with sl.trace() as t:
        critic(generator(torch.randn(BATCH, 8)).detach()).mean().backward()
    assert kinds(t) == []


def _without_graph(encode: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = encode(x)
        return result


def _autoencoder(
    forward: Callable[[nn.Module, nn.Module, Tensor], Tensor],
    *,
    frozen: bool = False,
    holds: bool = True,
    extra: tuple[nn.Parameter, ...] = (),
    **options: Any,
) -> Any:
    """A trace of a training of two models that one optimizer holds."""
    encoder, decoder, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8), torch.randn(BATCH, 8)
    encoder.requires_grad_(not frozen)
    held = [*(encoder.parameters() if holds else ()), *decoder.parameters(), *extra]
    optimizer = torch.optim.Adam(held)
    with sl.trace(**options) as t:
        for _ in range(3):
            optimizer.zero_grad()
            (forward(encoder, decoder, x) - x).square().mean().backward()
            optimizer.step()
    return t


@pytest.mark.parametrize(
    ("forward", "kind", "title"),
    [
        (
            lambda encode, decode, x: decode(encode(x).detach()),
            "cut-gradient",
            "weight, bias of Linear were cut from the loss by detach",
        ),
        (
            lambda encode, decode, x: decode(_without_graph(encode, x)),
            "cut-gradient",
            "weight, bias of Linear were cut from the loss by a block without gradients (no_grad)",
        ),
        (
            lambda encode, decode, x: (encode(x), decode(x))[1],
            "no-gradient",
            "weight, bias of Linear were used but got no gradient: the result of F.relu at ",
        ),
        (
            lambda encode, decode, x: decode(x),
            "no-gradient",
            "2 of the 4 parameters of Adam got no gradient in any of its 3 steps: they belong to no module",
        ),
    ],
)
def test_a_model_that_its_optimizer_never_moves(forward: Any, kind: str, title: str) -> None:
    problem = only(_autoencoder(forward), kind)
    assert problem.title.startswith(title)
    for healthy in (
        _autoencoder(forward, frozen=True),
        _autoencoder(forward, holds=False),  # a teacher, or a model in its own turn
    ):
        assert kinds(healthy) == []


@BOTH_ENGINES
def test_a_parameter_of_no_module_that_gets_no_gradient(engine: Any) -> None:
    unused, frozen = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8), requires_grad=False)
    used = nn.Parameter(torch.ones(8))

    def forward(encode: nn.Module, decode: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = decode(encode(x)) * used * unused.detach()
        return result

    t = _autoencoder(forward, extra=(unused, used, frozen), engine=engine)
    title = only(t, "no-gradient").title
    assert title.startswith(
        "1 of the 7 parameters of Adam got no gradient in any of its 3 steps: it belongs to"
    )
    assert kinds(_autoencoder(forward, extra=(used, frozen), engine=engine)) == []


@pytest.mark.parametrize("modules", [True, False])
def test_heads_that_are_trained_in_turns_are_healthy(modules: bool) -> None:
    heads = [nn.Linear(8, 1, bias=False) for _ in range(2)]
    optimizer, x = torch.optim.SGD([head.weight for head in heads], 0.1), torch.randn(BATCH, 8)
    with sl.trace() as t:
        for step in range(4):
            head = heads[step % 2]
            optimizer.zero_grad()
            (head(x) if modules else x @ head.weight.T).square().mean().backward()
            optimizer.step()
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
    assert kinds(t) == ["failure"]
