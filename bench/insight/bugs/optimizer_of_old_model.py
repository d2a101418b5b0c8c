"""Resume a run from the best weights so far."""
#: kind step-without-gradients
import copy

import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ELU(), nn.Linear(24, 24), nn.ELU())
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


def main():
    torch.manual_seed(0)
    best = Regressor()
    optimizer = torch.optim.AdamW(best.parameters(), lr=1e-2)
    model = copy.deepcopy(best)
    #+ optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(40, 6)
    y = x.sum(1)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()  #@
        losses.append(loss.item())
    return losses


losses = main()
#: check
assert losses[-1] < losses[0]
