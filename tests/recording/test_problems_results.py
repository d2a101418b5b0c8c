"""Results that differ, batches of one, rates that stay, wrong inputs of losses; each with healthy twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import sightline as sl
from sightline.analysis.problems import Confidence
from sightline.analysis.problems import find as find_problems
from tests.recording.engines import BOTH_ENGINES
from tests.recording.problematic import Calls, found, kinds, only

STEPS = 8


def noisy(net: Any, x: Tensor) -> Tensor:
    return net.second(torch.relu(net.first(x) + 0.1 * torch.randn(len(x), 8)))  # type: ignore[no-any-return]


def from_outside(net: Any, x: Tensor) -> Tensor:
    scale = torch.from_numpy(np.random.default_rng().random(8, dtype=np.float32))
    return net.second(net.first(x) * scale)  # type: ignore[no-any-return]


def sampling(net: Any, x: Tensor) -> Tensor:
    mean, spread = net.first(x), net.second(x).exp()
    return mean + spread * torch.randn_like(mean)  # type: ignore[no-any-return]


def noise_in_training(net: Any, x: Tensor) -> Tensor:
    return net.second(net.first(x) + torch.randn(len(x), 8) * net.training)  # type: ignore[no-any-return]


def called_twice(code: Callable[..., Tensor], engine: Any, *, training: bool = False) -> Any:
    torch.manual_seed(0)
    net, x = Calls(code).train(training), torch.randn(6, 8)
    with torch.no_grad(), sl.trace(net, engine=engine, stats=True) as t:
        net(x)
        net(x)
    return t


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("code", "name", "what"),
    [(noisy, "torch.randn", "draws new random numbers"), (from_outside, "from_numpy", "made anew")],
)
def test_two_calls_that_differ_in_evaluation(code: Any, name: str, what: str, engine: Any) -> None:
    problem = only(called_twice(code, engine), "not-deterministic")
    assert name in problem.title or engine == "python"
    assert what in problem.title
    assert problem.confidence is Confidence.LIKELY


@BOTH_ENGINES
@pytest.mark.parametrize("code", [sampling, noise_in_training])
def test_samples_and_noise_of_the_training_are_healthy(code: Any, engine: Any) -> None:
    assert kinds(called_twice(code, engine)) == []
    assert kinds(called_twice(noisy, engine, training=True)) == []


def test_a_state_that_the_model_keeps_is_healthy() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 8)
            self.state = torch.zeros(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.cell(x, self.state)
            return self.state

    net, x = Memory().eval(), torch.randn(6, 8)
    with torch.no_grad(), sl.trace(net, stats=True) as t:
        net(x)
        net(x)
    assert kinds(t) == []


def stepped(net: nn.Module, batch: int, engine: Any, **settings: Any) -> Any:
    """A trace of some steps; ``schedule(optimizer)`` makes a scheduler, each begins with ``before``."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sl.trace(net, engine=engine) as t:
        scheduler = settings["schedule"](optimizer) if "schedule" in settings else None
        for _ in range(STEPS):
            if "before" in settings:
                settings["before"](optimizer)
            optimizer.zero_grad()
            net(torch.randn(batch, 3, 10)).pow(2).mean().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return t


def convolution(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3), norm, nn.ReLU(), nn.Conv1d(8, 2, 3))


@BOTH_ENGINES
def test_a_batch_norm_of_one_sample(engine: Any) -> None:
    problem = only(stepped(convolution(nn.BatchNorm1d(8)), 1, engine), "batch-of-one")
    assert problem.title == "BatchNorm1d takes mean and variance of one sample, [1, 8, 8], in 8 of 8 calls"
    assert problem.confidence is Confidence.GUESS
    assert kinds(stepped(convolution(nn.BatchNorm1d(8)), 2, engine)) == []
    assert kinds(stepped(convolution(nn.InstanceNorm1d(8)), 1, engine)) == []
    assert kinds(stepped(convolution(nn.GroupNorm(2, 8)), 1, engine)) == []


def set_back(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1


@BOTH_ENGINES
def test_a_rate_that_stays_though_its_schedule_steps(engine: Any) -> None:
    def cosine(optimizer: Any) -> Any:
        return CosineAnnealingLR(optimizer, 20)

    net = convolution(nn.Identity())
    problem = only(stepped(net, 2, engine, schedule=cosine, before=set_back), "learning-rate-unchanged")
    assert problem.title == "CosineAnnealingLR stepped 8 times, and the learning rate is still 0.1"
    assert kinds(stepped(net, 2, engine, schedule=cosine)) == []
    assert kinds(stepped(net, 2, engine, schedule=lambda optimizer: StepLR(optimizer, 30))) == []


def test_a_step_of_a_scheduler_is_one_in_recordings_inside_others() -> None:
    net = nn.Linear(4, 2)
    with sl.trace(net) as outer, sl.trace(net, engine="python") as inner:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = CosineAnnealingLR(optimizer, 20)
        for _ in range(3):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            scheduler.step()
    for t in (outer, inner):
        assert [row["steps"] for row in t.info["training"]["schedulers"]] == [3]


def test_a_scheduler_of_an_optimizer_that_wraps_another_is_healthy() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["optimizer"], name)

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    net = nn.Linear(4, 2)
    with sl.trace(net) as t:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = CosineAnnealingLR(Wrapper(optimizer), 20)
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
    assert kinds(t) == []


def clamped(scores: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(scores.clamp(0.01, 0.99), y)


def softmax_by_hand(scores: Tensor, y: Tensor) -> Tensor:
    powers = scores.exp()
    return F.cross_entropy(powers / powers.sum(1, keepdim=True), y.argmax(1))


def probabilities(scores: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(scores.log_softmax(1).exp(), y.argmax(1))


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (clamped, "logits-as-probabilities"),
        (softmax_by_hand, "probabilities-as-logits"),
        (probabilities, "logits-as-log-probabilities"),
    ],
)
def test_a_loss_that_is_given_the_wrong_thing(loss: Any, kind: str, engine: Any) -> None:
    net, x, y = nn.Linear(4, 5), torch.randn(6, 4), torch.rand(6, 5)
    with sl.trace(net, engine=engine) as t:
        loss(net(x), y).backward()
    only(t, kind)


def test_clamped_probabilities_and_shares_of_a_sum_are_healthy() -> None:
    net, x, y = nn.Linear(4, 5), torch.randn(6, 4), torch.rand(6, 5)
    with sl.trace(net) as t:
        scores = net(x)
        F.binary_cross_entropy(scores.sigmoid().clamp(1e-6, 1 - 1e-6), y).backward(retain_graph=True)
        F.cross_entropy(scores / scores.norm(dim=1, keepdim=True), y.argmax(1)).backward()
    assert kinds(t) == []


def test_logits_that_a_binary_cross_entropy_refuses() -> None:
    net = nn.Linear(4, 1)
    with pytest.raises(RuntimeError) as error, sl.trace(net) as t:
        F.binary_cross_entropy(net(torch.randn(9, 4)) * 50, torch.ones(9, 1))
    assert "the probabilities are from *" in error.value.__notes__[0]
    assert "apply a sigmoid, or give logits to binary_cross_entropy_with_logits" in found(t)[0].detail


def attend(mask: Tensor) -> Any:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.all(x).chunk(3, -1)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    net = Attention()
    with sl.trace(net, stats=True) as t:
        net(torch.randn(2, 8, 16)).sum().backward()
    return t


def test_attention_that_may_look_at_nothing() -> None:
    problem = only(attend(torch.zeros(2, 8, 8, dtype=torch.bool)), "masks-everything")
    assert problem.title.startswith("F.scaled_dot_product_attention masks all f32[2, 8, 8] with -inf")
    assert kinds(attend(torch.ones(8, 8, dtype=torch.bool).tril())) == []


@pytest.mark.parametrize("rectify", [lambda x: x.clamp(min=0), lambda x: torch.maximum(x, torch.zeros(1))])
def test_a_rectifier_that_is_written_as_a_bound(rectify: Callable[[Tensor], Tensor]) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.second(rectify(net.first(x)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    for bias, expected in ((-20.0, ["dead-activation"]), (0.0, [])):
        net = Calls(forward)
        nn.init.constant_(net.first.bias, bias)
        with sl.trace(net, stats=True) as t:
            net(torch.randn(6, 8)).sum().backward()
        assert kinds(t) == expected


def test_boxes_that_do_not_overlap_are_healthy() -> None:
    class Overlap(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return (torch.minimum(one, other) - torch.maximum(one, other)).clamp(min=0).prod(-1)

    with sl.trace(stats=True) as t:
        Overlap()(torch.rand(50, 2), torch.rand(50, 2) + 5)
    assert kinds(t) == []


def attacked(net: nn.Module, optimizer: Any) -> None:
    """One step on inputs that were changed against the model in evaluation mode."""
    x, y = torch.randn(6, 8), torch.randint(0, 8, (6,))
    change = torch.zeros_like(x, requires_grad=True)
    net.eval()
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(x + change), y), change)
    net.train()
    optimizer.zero_grad()
    F.cross_entropy(net(x + 0.1 * gradient.sign()), y).backward()
    optimizer.step()


def monte_carlo(net: nn.Module, optimizer: Any) -> None:
    """A step, and the spread of several predictions with dropout."""
    optimizer.zero_grad()
    net(torch.randn(6, 8)).pow(2).mean().backward()
    optimizer.step()
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.stack([net(x) for _ in range(4)]).std(0)


@BOTH_ENGINES
@pytest.mark.parametrize("step", [attacked, monte_carlo])
def test_modes_that_are_meant_are_healthy(step: Callable[..., None], engine: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sl.trace(net, engine=engine) as t:
        for _ in range(4):
            step(net, optimizer)
    assert kinds(t) == []


def test_a_branch_on_a_drawn_number_and_memory_inside_a_function_are_healthy() -> None:
    def forced(net: Any, x: Tensor) -> Tensor:
        return net.second(net.first(x) if torch.rand(()) < 2 else x)  # type: ignore[no-any-return]

    net = Calls(forced)
    with sl.trace(net) as t:
        scores = net(torch.randn(12, 3, 8)).log_softmax(-1)
        lengths = torch.full((3,), 12), torch.full((3,), 4)
        F.ctc_loss(scores, torch.randint(1, 8, (3, 4)), *lengths).backward()
    assert kinds(t) == []


@BOTH_ENGINES
def test_a_model_that_is_made_and_lost_in_the_block_has_its_gradients(engine: Any) -> None:
    def run() -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
        place = nn.Parameter(torch.zeros(3, 4))
        net.register_parameter("place", place)
        net[1](net[0](torch.randn(2, 3, 4)) + place).sum().backward()

    with sl.trace(engine=engine) as t:
        run()
    assert kinds(t) == []


@BOTH_ENGINES
def test_gradients_of_one_part_that_are_never_cleared(engine: Any) -> None:
    def run(*, whole: bool) -> Any:
        torch.manual_seed(0)
        net = Calls(lambda net, x: net.second(net.first(x)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with sl.trace(net, engine=engine) as t:
            for _ in range(4):
                (net if whole else net.second).zero_grad()
                net(torch.randn(6, 8)).pow(2).mean().backward()
                optimizer.step()
        return t

    problem = only(run(whole=False), "gradients-not-cleared")
    assert problem.title.startswith(
        "gradients of 2 parameters are never cleared, those of others are: every step"
    )
    assert problem.title.endswith("(first.bias, first.weight)")
    assert kinds(run(whole=True)) == []


def test_raw_data_flood_a_tanh() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.second(torch.tanh(net.first(x)))  # type: ignore[no-any-return]

    for scale, expected in ((2000.0, ["saturated-activation"]), (1.0, [])):
        torch.manual_seed(0)
        net = Calls(forward)
        with sl.trace(net, stats=True) as t:
            net(torch.rand(16, 8) * scale).sum().backward()
        assert kinds(t) == expected


class Dropping(nn.Module):
    """A model that differs between training and evaluation."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 8), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.drop(self.norm(self.layer(x)))
        return dropped


def test_an_evaluation_alone_in_training_mode_is_perhaps_a_mistake() -> None:
    model = Dropping()
    with sl.trace(model) as t, torch.no_grad():
        for _ in range(3):
            model(torch.randn(5, 4)).argmax(-1)
    (problem,) = find_problems(t.index)
    assert (problem.kind, problem.severity.word) == ("training-mode-in-evaluation", "note")
    assert "1 dropout drops and 1 batch norm uses the batch" in problem.title
    with sl.trace(model.eval()) as t, torch.no_grad():
        model(torch.randn(5, 4)).argmax(-1)
    assert not find_problems(t.index)


@pytest.mark.parametrize(("norm", "moving", "found"), [(False, False, 1), (True, False, 1), (False, True, 0)])
def test_a_teacher_that_drops_is_perhaps_a_mistake(norm: bool, moving: bool, found: int) -> None:
    """But not one whose weights are a moving average: its noise may be wanted."""
    teacher, student = Dropping(norm), Dropping(norm=False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with sl.trace(student) as t:
        for _ in range(3):
            x = torch.randn(5, 4)
            with torch.no_grad():
                wanted = teacher(x)
            nn.functional.mse_loss(student(x), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
            if moving:
                with torch.no_grad():
                    for mine, other in zip(
                        teacher.layer.parameters(), student.layer.parameters(), strict=True
                    ):
                        mine.mul_(0.9).add_(other, alpha=0.1)
    problems = [each for each in find_problems(t.index) if each.kind == "training-mode-in-evaluation"]
    assert len(problems) == found
    assert all("batch norm" not in each.title for each in problems)


class OwnCall(nn.Module):
    """A class with a ``__call__`` of its own, as some libraries have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.act = nn.Parameter(torch.ones(4)), nn.Softplus()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.act(x * self.scale)
        return scaled


def test_trained_tensors_of_no_module_that_was_called_are_counted() -> None:
    model = OwnCall()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace() as t:
        for _ in range(2):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
    assert "1 called, 2 calls · 1 tensor that is trained belongs to none of them" in str(t)
    assert any(
        row.startswith("parameters ") and row.endswith("1 tensor that is trained belongs to no module above")
        for row in str(t.summary()).splitlines()
    )


def test_a_trained_tensor_beside_a_model_is_named_beside_its_parameters() -> None:
    model, scale = nn.Linear(4, 1), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    with sl.trace(model) as t:
        (model(torch.randn(5, 4)) * scale).sum().backward()
        optimizer.step()
    row = next(row for row in str(t.summary()).splitlines() if row.startswith("parameters "))
    assert row.endswith("trainable 5 · 1 tensor that is trained belongs to no module above")
