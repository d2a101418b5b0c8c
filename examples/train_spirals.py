"""Train a small network for twenty steps on two spirals: an ordinary script, which knows nothing of tracing.

Run it with ``python``, or with ``sightline run`` in its place to see what it does.
"""

from __future__ import annotations

import argparse
import hashlib
import math

import torch
from torch import nn


class Classifier(nn.Module):
    """Two hidden layers, with dropout and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(2, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))
        self.more = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 2)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Logits of the two spirals."""
        hidden = self.hidden(points)
        logits: torch.Tensor = self.head(hidden + self.more(hidden))
        return logits


def spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two spirals, and which one each is on."""
    along = torch.rand(count) * 3 * math.pi
    which = torch.randint(0, 2, (count,))
    angle = along + which * math.pi
    points = torch.stack([along * angle.cos(), along * angle.sin()], dim=1) / 10
    return points + 0.02 * torch.randn(count, 2), which


def main() -> None:
    """Train, and print the loss as it falls."""
    parser = argparse.ArgumentParser(description="Train on two spirals.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Classifier(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(options.steps):
        points, which = spirals(64)
        loss = nn.functional.cross_entropy(model(points), which)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
