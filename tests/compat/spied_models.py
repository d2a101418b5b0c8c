"""A model that spies on itself, for the tests of torchspy's names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sightline.compat.torchspy import spy_save

#: The paths of its linear layers.
LINEAR = {"heads.0.q", "heads.0.k", "heads.1.q", "heads.1.k", "out.0"}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.q(x), self.k(x)
        spy_save("query", query, self)
        return torch.sigmoid(query * key)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(2))
        self.out = nn.Sequential(nn.Linear(4, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for head in self.heads:
            x = head(x)
        return self.out(x)  # type: ignore[no-any-return]


def run(model: nn.Module) -> None:
    model(torch.ones(1, 4))


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    return [(one.name, one.levelname, one.getMessage()) for one in caplog.records]
