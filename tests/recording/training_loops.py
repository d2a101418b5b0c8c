"""Training loops for tests: small ones of every kind, each run inside a recording."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ForeignOptimizer:
    """An optimizer that is none of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad


def net(inputs: int = 4, outputs: int = 1) -> nn.Module:
    """A small model, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def plain(model: nn.Module, steps: int, read: bool = True) -> list[float]:
    """Forward, backward, clip, step; the loss of each step, where it is read."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, 4)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if read:
            losses.append(loss.item())
    return losses


def accumulating(model: nn.Module, batches: int, each: int) -> None:
    """An optimizer step after every few backward passes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(batches):
        (model(torch.randn(5, 4)).pow(2).mean() / each).backward()
        if (number + 1) % each == 0:
            optimizer.step()
            optimizer.zero_grad()


def scaled(model: nn.Module, steps: int, overflow: int) -> None:
    """A gradient scaler, which skips the step in which the loss overflows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number in range(steps):
        factor = float("inf") if number == overflow else 1.0
        loss = model(torch.randn(5, 4)).pow(2).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def adversarial(generator: nn.Module, critic: nn.Module, steps: int) -> None:
    """Two models and two optimizers, which take turns."""
    first = torch.optim.Adam(critic.parameters(), lr=0.01)
    second = torch.optim.Adam(generator.parameters(), lr=0.01)
    for _ in range(steps):
        real = torch.randn(6, 4)
        fake = generator(torch.randn(6, 4))
        loss = critic(fake.detach()).mean() - critic(real).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        second.zero_grad()
        (-critic(fake).mean()).backward()
        second.step()


def with_closure(model: nn.Module, steps: int) -> None:
    """LBFGS, which runs forward and backward several times in each of its steps."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 4)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def evaluating(model: nn.Module, steps: int) -> None:
    """An evaluation between the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(5, 4)).pow(2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(2, 4))


def plain_of(model: nn.Module, sizes: list[int]) -> None:
    """Steps with batches of these sizes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in sizes:
        model(torch.randn(size, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
