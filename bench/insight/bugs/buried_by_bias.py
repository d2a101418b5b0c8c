"""Predict a count per hour: never below zero, and small at first."""
#: kind dead-activation
import torch
from torch import nn


class Hourly(nn.Module):
    def __init__(self):
        super().__init__()
        self.hours = nn.Embedding(24, 16)
        self.layer = nn.Linear(16 + 5, 64)
        self.out = nn.Linear(64, 1)
        nn.init.constant_(self.layer.bias, -12.0)  #!~
        #+ nn.init.constant_(self.layer.bias, 0.1)

    def forward(self, hour, weather):
        given = torch.cat([self.hours(hour), weather], -1)
        return self.out(self.layer(given).clamp(min=0.0)).squeeze(-1)  #@


torch.manual_seed(0)
model = Hourly()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(4):
    hour, weather, count = torch.randint(0, 24, (32,)), torch.randn(32, 5), torch.rand(32) * 9
    optimizer.zero_grad()
    nn.functional.mse_loss(model(hour, weather), count).backward()
    optimizer.step()
#: check
assert model.layer.weight.grad.abs().sum() > 0
