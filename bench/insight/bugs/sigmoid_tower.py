"""Twelve layers of sigmoids on two rings."""
#: kind vanishing-gradients
import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self, depth=12, width=24):
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.leave = nn.Linear(width, 2)

    def forward(self, x):
        x = torch.sigmoid(self.enter(x))  #!~
        #+ x = torch.relu(self.enter(x))
        for layer in self.layers:
            x = torch.sigmoid(layer(x))  #!
            #+ x = x + torch.relu(layer(x))
        return self.leave(x)


torch.manual_seed(0)
tower = Tower()
optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
for _ in range(4):
    angle = torch.rand(64) * 6.283
    ring = torch.randint(0, 2, (64,))
    points = torch.stack([angle.cos(), angle.sin()], 1) * (1 + ring)[:, None]
    optimizer.zero_grad()
    nn.functional.cross_entropy(tower(points), ring).backward()
    optimizer.step()
#: check
first, last = tower.layers[0].weight.grad.norm(), tower.layers[-1].weight.grad.norm()
assert first > 1e-4 * last
