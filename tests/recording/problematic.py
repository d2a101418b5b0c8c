"""What the tests of problems share: two small models, and how to ask for the problems of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.problems import Problem, find

BATCH = 6
STATS = True


def found(trace: Any) -> list[Problem]:
    return find(trace.index)


def kinds(trace: Any) -> list[str]:
    return [problem.kind for problem in find(trace.index)]


def only(trace: Any, kind: str) -> Problem:
    """The one problem of a trace, which must be of this kind and point into a test of problems."""
    problems = find(trace.index)
    assert [problem.kind for problem in problems] == [kind], problems
    assert "recording/test_problems" in problems[0].place or "recording/problematic.py" in problems[0].place
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


def plain() -> nn.Module:
    """Two layers, one after the other: nothing to find."""
    return Calls(lambda net, x: net.second(torch.relu(net.first(x))))
