"""Small models for comparisons, each with a way to differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import sightline as sl

WIDTH = 16


class Attention(nn.Module):
    """Attention with one projection for all three, and a factor that can be wrong."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.out, self.factor = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * (self.factor * WIDTH**-0.5)
        return self.out(scores.softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(factor)

    def forward(self, x: Tensor) -> Any:
        return x + self.attn(self.norm(x))


class Net(nn.Module):
    def __init__(self, factors: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(factor) for factor in factors)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(*factors: float) -> Net:
    """Always the same weights."""
    torch.manual_seed(0)
    return Net(factors or (1.0, 1.0, 1.0)).eval()


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, WIDTH)


def recorded(model: nn.Module, x: Tensor | None = None, **options: Any) -> sl.Trace:
    """One forward, with statistics unless the options say otherwise."""
    x = inputs() if x is None else x
    with sl.trace(model, **{"stats": True, **options}) as trace, torch.no_grad():
        model(x)
    return trace
