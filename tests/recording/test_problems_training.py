"""Kinds of training in which everything is as it should be: nothing is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl
from tests.recording.problematic import BATCH, STATS, found, kinds, trained

# -- healthy kinds of training -------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """Variational, or with a codebook, a straight-through estimator and a commitment loss."""

    def __init__(self, codes: int = 0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(8 if codes else 4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.codebook = nn.Embedding(codes, 8) if codes else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        if self.codebook is None:
            mean, log_variance = h.chunk(2, dim=-1)
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            extra = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        else:
            weight = self.codebook.weight
            far = h.pow(2).sum(1, keepdim=True) - 2 * h @ weight.T + weight.pow(2).sum(1)
            code = self.codebook(far.argmin(1))
            extra = F.mse_loss(code, h.detach()) + 0.25 * F.mse_loss(h, code.detach())
            z = h + (code - h).detach()
        result: Tensor = F.mse_loss(self.decoder(z), x) + extra
        return result


class Contrast(nn.Module):
    """Two views of a batch, pulled together; the targets come of a frozen moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.average = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)
            target = F.normalize(self.average(x + 0.1 * torch.randn_like(x)), dim=-1)
        one = F.normalize(self.online(x + 0.1 * torch.randn_like(x)), dim=-1)
        return F.cross_entropy(one @ target.T / 0.1, torch.arange(len(x)))


class Adapted(nn.Module):
    """A frozen layer with a low-rank update that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


class Actor(nn.Module):
    """Policy gradients: advantages are detached, values have a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        chosen = torch.distributions.Categorical(logits=self.policy(h))
        actions, returns = chosen.sample(), torch.randn(len(x))
        values = self.value(h).squeeze(-1)
        advantage = (returns - values).detach()
        result: Tensor = -(chosen.log_prob(actions) * advantage).mean() + F.mse_loss(values, returns)
        return result


class Physics(nn.Module):
    """The loss holds a derivative of the network, and its value at the border."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        result: Tensor = (slope.sum(1, keepdim=True) + u).pow(2).mean() + u[:1].pow(2).mean()
        return result


CLASSICS = {
    "variational": Autoencoder, "quantised": lambda: Autoencoder(BATCH), "contrastive": Contrast,
    "low rank": Adapted, "policy gradient": Actor, "physics": Physics,
}  # fmt: skip


@pytest.mark.parametrize("ops", ["both", "aten"])
@pytest.mark.parametrize("make", CLASSICS.values(), ids=CLASSICS.keys())
def test_healthy_kinds_of_training(make: Callable[[], nn.Module], ops: Any) -> None:
    torch.manual_seed(0)
    assert found(trained(make(), ops=ops, stats=STATS)) == []


def test_learning_from_a_target_network_is_healthy() -> None:
    online, target, x = nn.Linear(8, 3), nn.Linear(8, 3), torch.randn(BATCH, 8)
    with sl.trace() as t:
        with torch.no_grad():
            goal = torch.randn(BATCH) + 0.9 * target(x).max(1).values
        F.smooth_l1_loss(
            online(x).gather(1, torch.zeros(BATCH, 1, dtype=torch.long)).squeeze(1), goal
        ).backward()
    assert kinds(t) == []
