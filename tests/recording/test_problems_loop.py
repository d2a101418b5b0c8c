"""Mistakes of training loops, losses and weights, each beside a healthy twin, on both engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import sightline as sl
from sightline.analysis.problems import Confidence, find
from tests.recording.engines import BOTH_ENGINES
from tests.recording.problematic import found, kinds

STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.drop(torch.relu(self.first(x))))
        return result


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


def looped(step: Callable[..., object], model: nn.Module | None = None, **options: Any) -> Any:
    """A trace of some steps: ``step(model, optimizer, number)`` is one of them."""
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, **options) as t:
        for number in range(STEPS):
            step(model, optimizer, number)
    return t


def healthy(model: nn.Module, optimizer: Any, number: int) -> Tensor:
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def never_cleared(model: nn.Module, optimizer: Any, number: int) -> None:
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def accumulating(model: nn.Module, optimizer: Any, number: int) -> None:
    for _ in range(2):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def cleared_too_early(model: nn.Module, optimizer: Any, number: int) -> None:
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    optimizer.step()


def stepping_first(model: nn.Module, optimizer: Any, number: int) -> None:
    x, y = batch()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    optimizer.step()
    loss.backward()


def clipping_last(model: nn.Module, optimizer: Any, number: int) -> None:
    x, y = batch()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def softmax_first(model: nn.Module, optimizer: Any, number: int) -> None:
    x, y = batch()
    optimizer.zero_grad()
    F.cross_entropy(model(x).softmax(-1), y).backward()
    optimizer.step()


def no_logarithm(model: nn.Module, optimizer: Any, number: int) -> None:
    x, y = batch()
    optimizer.zero_grad()
    F.nll_loss(model(x), y).backward()
    optimizer.step()


def validating_in_training(model: nn.Module, optimizer: Any, number: int) -> None:
    healthy(model, optimizer, number)
    with torch.no_grad():
        model(batch()[0]).argmax(-1).sum()


def validating(model: nn.Module, optimizer: Any, number: int) -> None:
    healthy(model, optimizer, number)
    model.eval()
    with torch.no_grad():
        model(batch()[0]).argmax(-1).sum()
    model.train()


def left_in_evaluation(model: nn.Module, optimizer: Any, number: int) -> None:
    healthy(model, optimizer, number)
    model.eval()
    with torch.no_grad():
        model(batch()[0]).argmax(-1).sum()


def pseudo_labels(model: nn.Module, optimizer: Any, number: int) -> None:
    """What is made without gradients, in training mode, teaches the model: that is meant."""
    x, _ = batch()
    with torch.no_grad():
        wanted = model(x).softmax(-1)
    optimizer.zero_grad()
    F.cross_entropy(model(x), wanted).backward()
    optimizer.step()


MISTAKES: dict[Callable[..., object], str] = {
    never_cleared: "gradients-not-cleared", cleared_too_early: "step-without-gradients",
    stepping_first: "step-without-gradients", clipping_last: "clipped-after-step",
    softmax_first: "probabilities-as-logits", no_logarithm: "logits-as-log-probabilities",
    validating_in_training: "training-mode-in-evaluation", left_in_evaluation: "evaluation-mode-in-training",
}  # fmt: skip


@BOTH_ENGINES
@pytest.mark.parametrize("step", MISTAKES, ids=lambda step: step.__name__)
def test_a_mistake_of_the_loop_is_named_at_its_line(step: Callable[..., object], engine: str) -> None:
    (problem,) = found(looped(step, engine=engine))
    assert problem.kind == MISTAKES[step]
    assert problem.confidence is Confidence.CERTAIN
    assert "test_problems_loop.py:" in problem.place


@BOTH_ENGINES
@pytest.mark.parametrize("step", [healthy, accumulating, validating, pseudo_labels], ids=lambda s: s.__name__)
def test_a_healthy_loop_has_none(step: Callable[..., object], engine: str) -> None:
    assert kinds(looped(step, engine=engine, stats=True)) == []


def test_what_a_recording_on_disk_says_of_its_loop(tmp_path: Path) -> None:
    t = looped(never_cleared, path=tmp_path / "run.sight")
    loaded = sl.load(tmp_path / "run.sight")
    assert kinds(t) == [problem.kind for problem in find(loaded.index)] == ["gradients-not-cleared"]


def test_an_optimizer_of_another_model() -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.Adam(other.parameters())
    with sl.trace(model) as t:
        for _ in range(3):
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.zero_grad()
    (problem,) = found(t)
    assert problem.title == (
        "Adam.step() finds no gradient in any of its 4 parameters: the gradients are in first.weight, "
        "first.bias, second.weight and 1 more, which no optimizer holds"
    )


@BOTH_ENGINES
def test_a_scheduler_that_never_steps(engine: Any) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, engine=engine) as t:
        scheduler = CosineAnnealingLR(optimizer, STEPS)
        for number in range(STEPS):
            healthy(model, optimizer, number)
    (problem,) = found(t)
    assert problem.title.startswith("CosineAnnealingLR never steps, in 6 steps of its optimizer")
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("early", [True, False])
def test_a_scheduler_before_its_optimizer(early: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model) as t:
        scheduler = StepLR(optimizer, 2)
        for number in range(STEPS):
            if early:
                with (
                    pytest.warns(UserWarning, match="before `optimizer.step")
                    if number == 0
                    else pytest.MonkeyPatch.context()
                ):
                    scheduler.step()
            healthy(model, optimizer, number)
            if not early:
                scheduler.step()
    assert kinds(t) == (["scheduler"] if early else [])


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("divided", [True, False])
def test_a_sum_of_losses_is_over_as_many_steps_as_ran(after: bool, divided: bool) -> None:
    total: Any = 0.0

    def summing(model: nn.Module, optimizer: Any, number: int) -> None:
        nonlocal total
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        total = total if after else total + loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = total + loss if after else total
        if divided and number == STEPS - 1:
            (total / STEPS).item()

    t = looped(summing)
    titles = [problem.title for problem in found(t) if problem.kind == "graph-grows"]
    assert titles == [f"+ sums up what still has its graph, over {STEPS} steps"]


def test_losses_that_are_kept_are_counted_by_steps_not_by_optimizers() -> None:
    kept = []
    first, second = Net(), Net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    with sl.trace() as t:
        for _ in range(STEPS):
            healthy(first, optimizers[0], 0)
            kept.append(healthy(second, optimizers[1], 0))
    (title,) = [problem.title for problem in found(t) if problem.kind == "graph-kept"]
    assert title.endswith(f" is kept with its graph in {STEPS} steps")


def test_a_rate_of_zero_and_a_warm_up_that_begins_there() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sl.trace(model) as t:
        for number in range(3):
            healthy(model, optimizer, number)
    assert kinds(t) == ["learning-rate"]
    with sl.trace(model) as t:
        for number in range(3):
            optimizer.param_groups[0]["lr"] = 0.01 * number
            healthy(model, optimizer, number)
    assert kinds(t) == []


@pytest.mark.parametrize(("later", "expected"), [(0.0, 1), (0.1, 0)])
def test_a_rate_of_zero_is_one_of_all_steps_of_a_long_run(later: float, expected: int) -> None:
    """Only the first 256 steps are noted one by one."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with sl.trace(ops="aten") as t:
        for step in range(300):
            optimizer.param_groups[0]["lr"] = later if step > 260 else 0.0
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
    titles = [problem.title for problem in found(t) if problem.kind == "learning-rate"]
    assert titles == ["the learning rate of SGD is 0 in all of 300 steps"] * expected


def test_layers_in_a_plain_list() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3)
            self.layers = [nn.Linear(4, 8)]

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.layers[0](x))
            return result

    problem = next(one for one in found(looped(healthy, Listed())) if one.kind == "unregistered-module")
    assert problem.title == (
        "Linear with 2 parameters is held in the plain layers[0] of Listed, which does not know it"
    )


@BOTH_ENGINES
def test_a_sum_of_losses_and_a_list_of_them(engine: str) -> None:
    kept: list[Any] = [0.0]

    def summing(model: nn.Module, optimizer: Any, number: int) -> None:
        kept[0] = kept[0] + healthy(model, optimizer, number)

    assert "graph-grows" in kinds(looped(summing, engine=engine))
    kept[:] = []
    assert kinds(looped(lambda *given: kept.append(healthy(*given)), engine=engine)) == ["graph-kept"]
    kept[:] = []
    assert kinds(looped(lambda *given: kept.append(healthy(*given).detach()), engine=engine)) == []


def test_memory_that_nothing_has_written() -> None:
    with sl.trace() as t:
        total = torch.empty(4, 4)
        total = total + 1
    (problem,) = found(t)
    assert problem.kind == "uninitialised"
    with sl.trace() as t:
        total = torch.empty(4, 4)
        total[:2] = 1.0
        total[2:] = 2.0
        total = total + torch.empty_like(total).normal_()
    assert kinds(t) == []


def test_rows_that_meet_columns() -> None:
    x = torch.randn(8, 8)
    with sl.trace() as t:
        x / x.norm(dim=1)
    assert kinds(t) == ["broadcast"]
    with sl.trace() as t:
        x / x.norm(dim=1, keepdim=True)
        x / x.norm(dim=0)
        square = (x * x).sum(1)
        square[:, None] + square - 2 * x @ x.T
    assert kinds(t) == []


# -- exceptions --------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_a_size_is_followed_to_where_it_first_appears(engine: Any, tmp_path: Path) -> None:
    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 32)
            self.pos = nn.Parameter(torch.zeros(31, 32))

        def forward(self, wave: Tensor) -> Tensor:
            frames = wave.unfold(1, 64, 16)
            result: Tensor = self.project(frames) + self.pos
            return result

    with pytest.raises(RuntimeError) as caught, sl.trace(path=tmp_path / "run.sight", engine=engine) as t:
        Front()(torch.randn(4, 1024))
    note = "\n".join(caught.value.__notes__)
    assert "  size 61 in dimension 1 first appears at unfold, " in note
    assert "from f32[4, 1024]; 31 is the size of parameter pos" in note
    if engine == "native":
        assert "pos, made at " in note
    loaded = sl.load(tmp_path / "run.sight")
    for trace in (t, loaded):
        first = find(trace.index)[0]
        assert first.kind == "failure"
        assert first.detail.startswith("size 61 in dimension 1 first appears at unfold")
        assert trace.info["note"] == note
    assert "first appears at unfold" in str(loaded)


def test_an_index_and_a_class_out_of_range() -> None:
    with pytest.raises(IndexError) as caught, sl.trace():
        nn.Embedding(7, 2)(torch.tensor([1, 7]))
    assert (
        "index 7 is out of range of parameter weight with 7 rows: from tensor, " in caught.value.__notes__[0]
    )
    with pytest.raises(IndexError) as caught, sl.trace():
        F.cross_entropy(nn.Linear(3, 4)(torch.randn(4, 3)), torch.arange(4) + 1)
    assert "class 4 is out of range of 4 classes, 0 … 3: from +, " in caught.value.__notes__[0]


def test_a_dtype_is_followed_to_where_it_first_appears() -> None:
    layer = nn.Linear(3, 3).bfloat16()
    with pytest.raises(RuntimeError) as caught, sl.trace(layer):
        layer(torch.ones(2, 3, dtype=torch.uint8).float())
    note = caught.value.__notes__[0]
    assert "f32 first appears at float, " in note
    assert "from u8[2, 3]; bf16 is the dtype of parameter " in note
    assert note.endswith("\n  cast the input, .to(torch.bfloat16), or the model, .to(torch.float32)")
    assert ", inside linear\n" in note


def test_an_input_that_a_function_copies_is_told_as_it_was_given() -> None:
    layer = nn.Linear(3, 3).bfloat16()
    with pytest.raises(RuntimeError) as caught, sl.trace(layer):
        layer(torch.ones(2, 3, 4, 4).movedim(1, -1))
    assert " f32[32, 3] = movedim, " in caught.value.__notes__[0]


def test_a_loss_that_is_replaced_in_each_step_is_not_kept() -> None:
    """A step of LBFGS returns the loss of its first closure, which lives until the next step has ended."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 1))
    x = torch.linspace(-1, 1, 200).reshape(50, 4)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1, max_iter=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: Tensor = (net(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    with sl.trace(net) as t:
        loss = optimizer.step(closure)
        for _ in range(3):
            loss = optimizer.step(closure)
    assert loss is not None
    assert "graph-kept" not in [problem.kind for problem in find(t.index)]
