"""Replicas whose buffers differ in several ways, and some where they do so as they should."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sightline as sl

warnings.filterwarnings("ignore", category=FutureWarning)  # newer versions of torch call the option otherwise
dist.init_process_group("gloo")
RANK = dist.get_rank()


class Head(nn.Module):
    scale: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        out: torch.Tensor = self.linear(x) * self.scale
        return out


def replica(*, broadcast: bool, norm: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), Head()
    return DistributedDataParallel(nn.Sequential(*layers), broadcast_buffers=broadcast)


def train(model: nn.Module) -> None:
    """A step on data of its own."""
    model(torch.randn(4, 8) + RANK).square().mean().backward()


def alike() -> None:
    """DDP copies buffers before each forward pass, whatever ranks have made of them."""
    model = replica(broadcast=True, norm=True)
    for _ in range(3):
        train(model)
        if RANK == 1:
            model.module[2].scale.mul_(2)
    model.eval()(torch.ones(4, 8))


def running() -> None:
    model = replica(broadcast=False, norm=True)
    for _ in range(3):
        train(model)


def evaluated() -> None:
    model = replica(broadcast=True, norm=True)
    train(model)
    model.module.eval()(torch.ones(4, 8))


def changed() -> None:
    model = replica(broadcast=False, norm=False)
    for step in range(3):
        train(model)
        if RANK == 1 and step == 1:
            model.module[2].scale.mul_(2)


def counted() -> None:
    model = replica(broadcast=False, norm=False)
    train(model)
    if RANK == 1:
        model.module[2].count.add_(5)
    train(model)


for scenario in (alike, running, evaluated, changed, counted):
    with sl.trace(path=f"{scenario.__name__}.sight", stats=True):
        scenario()
    dist.barrier()
dist.destroy_process_group()
