"""What the tests of streaming share: a model that does awkward things, how recordings are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import sightline as sl
from sightline.data.trace_data import TraceData

#: What recordings of two runs that do the same need not have in common.
TIMES = {"start", "duration"}


class Awkward(torch.nn.Module):
    """In-place changes through views, a buffer that changes, batch norm, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.second = torch.nn.Linear(16, 8)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(4, 8))

    def forward(self, x: Any) -> Any:
        row = self.seen[1]
        self.seen[:2].add_(1.0)
        y = self.second(torch.relu(self.norm(self.first(x)))).clone()
        flat = y.view(-1)
        y[0].mul_(2)
        flat = flat + 1
        y.add_(1)
        return (flat.view_as(y) + row).sum() + (self.seen @ self.seen.T).sum()


def awkward(optimizer: Any = torch.optim.Adam, steps: int = 3) -> tuple[Any, Callable[[], None]]:
    """A model, and its training."""
    model = Awkward()
    return model, lambda: train(model, steps, optimizer)


def train(model: Any, steps: int, optimizer: Any = torch.optim.Adam) -> None:
    """A few steps of training."""
    updates = optimizer(model.parameters(), lr=0.01)
    for number in range(steps):
        with sl.step(f"step{number}"):
            updates.zero_grad()
            loss = model(torch.randn(5, 8)) + model(torch.randn(5, 8))
            loss.backward()
            updates.step()


def both_ways(make: Callable[[], tuple[Any, Callable[[], Any]]], asked: dict[str, Any], **kept: Any) -> Any:
    """Two recordings of the same run: one in memory, and one that is kept in another way."""
    found = []
    for more in ({}, kept):
        torch.manual_seed(0)
        model, work = make()
        with sl.trace(model, name="run", **asked, **more) as trace:
            work()
        found.append(trace)
    return found


def session_of(trace: sl.trace) -> Any:
    """What is behind a trace that is running."""
    assert trace._recorder is not None
    assert trace._recorder._session is not None
    return trace._recorder._session


def differences(one: TraceData, other: TraceData, ignored: set[str] = TIMES) -> list[str]:
    """What two recordings say that is not the same."""
    found = []
    for kind in ("ops", "values", "calls", "frames", "stats"):
        left, right = getattr(one, kind), getattr(other, kind)
        for field in dataclasses.fields(left):
            a, b = getattr(left, field.name), getattr(right, field.name)
            if field.name == "name":
                a, b = (
                    [one.names[i] if i >= 0 else "" for i in a],
                    [other.names[i] if i >= 0 else "" for i in b],
                )
            if field.name not in ignored and not np.array_equal(a, b, equal_nan=kind == "stats"):
                found.append(f"{kind}.{field.name}")
    if "storages" not in ignored and not np.array_equal(one.storages, other.storages):
        found.append("storages")
    small = ("metas", "forms", "codes", "modules", "captures", "schemas")
    found += (name for name in small if getattr(one, name) != getattr(other, name))
    if [(s.name, s.first_op, s.end_op, s.first_call, s.end_call) for s in one.steps] != [
        (s.name, s.first_op, s.end_op, s.first_call, s.end_call) for s in other.steps
    ]:
        found.append("steps")
    return found
