"""Fit the demand for bicycles by hour and weather."""
#: kind gradients-not-cleared
import torch
from torch import nn


class Demand(nn.Module):
    def __init__(self):
        super().__init__()
        self.hour = nn.Embedding(24, 8)
        self.weather = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, hour, weather):
        return self.out(torch.tanh(self.hour(hour) + self.weather(weather))).squeeze(-1)


def fit(demand, steps=6):
    optimizer = torch.optim.SGD(demand.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        hour = torch.randint(0, 24, (64,), generator=generator)
        weather = torch.randn(64, 4, generator=generator)
        loss = nn.functional.mse_loss(demand(hour, weather), weather[:, 0] + hour / 24)
        #+ optimizer.zero_grad()
        loss.backward()  #@
        optimizer.step()  #@


torch.manual_seed(0)
demand = Demand()
fit(demand)
#: check
before = demand.out.weight.grad.norm().item()
demand2 = Demand()
demand2.load_state_dict(demand.state_dict())
fit(demand, 1)
fit(demand2, 1)
assert torch.allclose(demand.out.weight.grad, demand2.out.weight.grad)
