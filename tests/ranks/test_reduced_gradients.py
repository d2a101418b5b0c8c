"""Replicas that a program keeps by itself: however it reduces gradients, their weights are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import sightline as sl
from tests.ranks.fake_ranks import problems_of, record_ranks
from tests.recording.engines import BOTH_ENGINES

Reduce = Callable[[list[torch.nn.Parameter]], None]


def gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def sums(parameters: list[torch.nn.Parameter]) -> None:
    for grad in gradients(parameters):
        dist.all_reduce(grad)


def means_in_place(parameters: list[torch.nn.Parameter]) -> None:
    for grad in gradients(parameters):
        dist.all_reduce(grad)
        grad /= 2


def means_anew(parameters: list[torch.nn.Parameter]) -> None:
    for each in parameters:
        assert each.grad is not None
        dist.all_reduce(each.grad)
        each.grad = each.grad / 2


def of_data(parameters: list[torch.nn.Parameter]) -> None:
    for grad in gradients(parameters):
        dist.all_reduce(grad.data)
        grad.data.div_(2)


def clipped(parameters: list[torch.nn.Parameter]) -> None:
    means_in_place(parameters)
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)


def bucket(parameters: list[torch.nn.Parameter]) -> None:
    grads = gradients(parameters)
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= 2
    for grad, each in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(each)


def gathered(parameters: list[torch.nn.Parameter]) -> None:
    for each in parameters:
        assert each.grad is not None
        parts = [torch.zeros_like(each.grad) for _ in range(2)]
        dist.all_gather(parts, each.grad)
        each.grad = torch.stack(parts).mean(0)


def train(rank: int, reduce: Reduce, seed: int, *, optimizer: bool = True, hooks: bool = False) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    torch.manual_seed(100 + rank)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if hooks:
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda each: reduce([each]))
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        if not hooks:
            reduce(list(model.parameters()))
        if optimizer:
            sgd.step()
        else:
            with torch.no_grad():
                for each in model.parameters():
                    assert each.grad is not None
                    each.sub_(0.1 * each.grad)


WAYS: dict[str, Callable[..., None]] = {
    **{
        way.__name__: partial(train, reduce=way)
        for way in (sums, means_in_place, means_anew, of_data, clipped, bucket, gathered)
    },
    "in hooks": partial(train, reduce=means_in_place, hooks=True),
    "no optimizer": partial(train, reduce=means_in_place, optimizer=False),
    "no optimizer, bucket": partial(train, reduce=bucket, optimizer=False),
}


@BOTH_ENGINES
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_differ_at_first_are_named(tmp_path: Path, way: str, engine: str) -> None:
    run = WAYS[way]
    stats = sl.Stats(fingerprint=False) if engine == "native" else True  # as `sightline run` takes them
    record_ranks(tmp_path / "run.sight", lambda rank: run(rank, seed=rank), 2, stats=stats, engine=engine)
    problem = problems_of(tmp_path / "run.sight")[0]
    assert problem.title == "0.weight is not the same on rank 1 as on rank 0 before the first forward pass"
    line = train.__code__.co_firstlineno + 2
    assert problem.place.endswith(f"test_reduced_gradients.py:{line} in train")


@pytest.mark.parametrize("way", [sums, means_in_place, bucket])
def test_replicas_of_other_groups_are_not_compared(tmp_path: Path, way: Reduce) -> None:
    """Two pipelines of two stages: a stage has weights of its own, and is reduced with its like only."""

    def run(rank: int) -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[rank % 2]
        reduce = dist.all_reduce
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", lambda x: reduce(x, group=group))
            train(rank, way, seed=rank % 2 if own[rank] is None else 9)

    own: list[int | None] = [None] * 4
    record_ranks(tmp_path / "run.sight", run, 4, stats=True)
    before = [each for each in problems_of(tmp_path / "run.sight") if "before" in each.title]
    assert before == []
    own[3] = 9
    record_ranks(tmp_path / "odd.sight", run, 4, stats=True)
    (problem,) = [each for each in problems_of(tmp_path / "odd.sight") if "before" in each.title]
    assert problem.title == "0.weight is not the same on rank 3 as on rank 1 before the first forward pass"


def test_averages_of_weights_are_no_gradients(tmp_path: Path) -> None:
    """Weights that are averaged now and then may differ in between."""

    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = torch.nn.Linear(4, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            sgd.step()
            for each in model.parameters():
                dist.all_reduce(each.data)
                each.data /= 2

    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    assert problems_of(tmp_path / "run.sight") == []


def forgets_biases(rank: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    torch.manual_seed(100 + rank)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        sgd.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        for name, each in model.named_parameters():
            assert each.grad is not None
            if "bias" not in name:
                each.grad.fill_(0.01)  # a fake group leaves each rank its own
                dist.all_reduce(each.grad)
        sgd.step()


def test_a_gradient_that_is_forgotten_is_named(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", forgets_biases, 2, stats=sl.Stats(fingerprint=False))
    (problem,) = problems_of(tmp_path / "run.sight")
    assert problem.title == "0.bias of rank 1 differs from that of rank 0 since its update 1"
    line = forgets_biases.__code__.co_firstlineno
    assert problem.place.endswith(f"test_reduced_gradients.py:{line + 13} in forgets_biases")
    assert problem.detail.startswith("its gradient is not reduced; those of 2 others are, at ")
    assert problem.detail.endswith(f"test_reduced_gradients.py:{line + 12} in forgets_biases")
    assert problem.severity.word == "warning"


def test_shards_beside_weights_that_are_reduced_are_their_own(tmp_path: Path) -> None:
    """A tensor-parallel layer by hand: shards with biases of zeros, a norm that is reduced, and one batch."""

    def run(rank: int) -> None:
        torch.manual_seed(rank)
        layer = torch.nn.Linear(4, 8)
        torch.nn.init.zeros_(layer.bias)
        model = torch.nn.Sequential(torch.nn.LayerNorm(4), layer)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            for each in model[0].parameters():
                assert each.grad is not None
                each.grad.fill_(0.01)
                dist.all_reduce(each.grad)
            sgd.step()

    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    assert problems_of(tmp_path / "run.sight") == []
