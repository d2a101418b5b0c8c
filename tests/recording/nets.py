"""The small models the recorder's tests run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two layers that fit, or with ``width=7`` do not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        return self.fc2(h)  # type: ignore[no-any-return]  # nn.Module's call is untyped


class Shared(nn.Module):
    """One layer under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]  # nn.Module's call is untyped


@dataclass
class Output:
    """What a model of the kind people publish returns."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str = "plain"


class Nested(nn.Module):
    """Takes keyword arguments and dicts, returns a dataclass."""

    def forward(self, batch: dict[str, Tensor], *, mask: Tensor | None = None, scale: float = 1.0) -> Output:
        h = batch["ids"] * scale
        if mask is not None:
            h = h + mask
        return Output(h.sum(-1), (h, h + 1))


def aten(trace: Any, **equal: Any) -> list[str]:
    """The names of the aten ops of a trace."""
    return [op.name for op in trace.ops.where(level="aten", **equal)]


def api(trace: Any, **equal: Any) -> list[str]:
    """The names of the API calls of a trace."""
    return [op.name for op in trace.ops.where(level="api", **equal)]
