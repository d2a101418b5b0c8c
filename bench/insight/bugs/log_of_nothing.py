"""A loss on the logarithm of counts."""
#: kind non-finite
import torch
from torch import nn


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1), nn.ReLU())

    def forward(self, x):
        return self.rate(x).squeeze(-1)


torch.manual_seed(0)
counts = Counts()
optimizer = torch.optim.Adam(counts.parameters(), lr=1e-2)
for _ in range(3):
    x = torch.randn(32, 5)
    seen = torch.poisson(torch.full((32,), 2.0))
    rate = counts(x)
    loss = (rate - seen * torch.log(rate)).mean()  #!
    #+ loss = (rate - seen * torch.log(rate + 1e-3)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
#: check
assert torch.isfinite(loss)
