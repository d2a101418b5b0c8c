"""Buffers of replicas that differ as they should are no warning: each way in which they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks.fake_ranks import problems_of, record_ranks


class Scaled(nn.Module):
    """A layer, and buffers that users keep beside it."""

    scale: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.zeros(2, 4), persistent=False)

    def forward(self, x: Tensor, keep: bool = False) -> Tensor:
        if keep:
            self.cache.copy_(x)
        return torch.mul(self.linear(x), self.scale)


def train(model: nn.Module, *inputs: Any) -> None:
    """One step; the gradients are reduced by hand, which makes ranks replicas. The weights stay."""
    model(*inputs).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    torch.optim.SGD(model.parameters(), lr=0.0).step()


def one_batch_more(rank: int) -> None:
    model = Scaled()
    for epoch in range(3):
        model.scale.fill_(1 / (epoch + 1))
        for batch in range(3 - rank):
            train(model, torch.full((2, 4), rank + 1.0 + batch))


def more_batches_to_evaluate(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for _ in range(2):
        train(model.train(), torch.randn(8, 4))
        for _ in range(3 - rank):
            model.eval()(torch.ones(8, 4))


def changed_by_all(rank: int) -> None:
    model = Scaled()
    for step in range(20):
        model.scale.mul_(0.9)
        train(model, torch.full((2, 4), rank + 1.0 + step))
        if rank == 0:
            torch.ones(3).add(1).mul(2)


def instance_norm(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4, track_running_stats=True))
    torch.manual_seed(rank)
    for _ in range(3):
        train(model, torch.randn(2, 4, 4))


def cached(rank: int) -> None:
    model = Scaled()
    for step in range(3):
        train(model, torch.full((2, 4), rank + 1.0 + step), True)


def changed_by_one(rank: int) -> None:
    model = Scaled()
    for step in range(3):
        if rank == 1:
            model.scale.mul_(0.9)
        train(model, torch.full((2, 4), rank + 1.0 + step))


@pytest.mark.parametrize(
    ("run", "options", "expected"),
    [
        (one_batch_more, {}, []),
        (more_batches_to_evaluate, {}, []),
        (changed_by_all, {}, []),
        (changed_by_all, {"last": 150}, []),
        (instance_norm, {}, [("note", "Running statistics of 1 on rank 1 differ from those on rank 0")]),
        (cached, {}, [("note", "cache of rank 1 differs from that of rank 0 since call 1")]),
        (changed_by_one, {}, [("warning", "scale of rank 1 differs from that of rank 0 since call 0")]),
    ],
)
def test_problems_of_buffers(
    tmp_path: Path, run: Callable[[int], None], options: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    def seeded(rank: int) -> None:
        torch.manual_seed(0)
        run(rank)

    record_ranks(tmp_path / "run.sight", seeded, 2, stats=True, **options)
    found = [each for each in problems_of(tmp_path / "run.sight") if each.kind == "replicas"]
    assert [each.severity.word for each in found] == [severity for severity, _ in expected]
    for problem, (_, title) in zip(found, expected, strict=True):
        assert problem.title.startswith(title)
