"""Fit the price of houses."""
#: kind broadcast
import torch
from torch import nn


class Price(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, houses):
        return self.layers(houses)  #!~
        #+ return self.layers(houses).squeeze(-1)


torch.manual_seed(0)
price = Price()
optimizer = torch.optim.Adam(price.parameters(), lr=1e-2)
houses = torch.randn(40, 8)
paid = houses @ torch.randn(8)
for _ in range(4):
    optimizer.zero_grad()
    loss = ((price(houses) - paid) ** 2).mean()  #@
    loss.backward()
    optimizer.step()
#: check
assert price(houses).shape == paid.shape
