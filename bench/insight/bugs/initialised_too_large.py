"""A plain deep network with weights drawn by hand."""
#: kind exploding-gradients
import torch
from torch import nn


def draw(layer, scale):
    nn.init.normal_(layer.weight, std=scale)
    nn.init.zeros_(layer.bias)
    return layer


class Plain(nn.Module):
    def __init__(self, depth=10, width=64):
        super().__init__()
        scale = 1.0  #!~
        #+ scale = (2 / width) ** 0.5
        self.enter = draw(nn.Linear(8, width), 0.3)
        self.layers = nn.ModuleList(draw(nn.Linear(width, width), scale) for _ in range(depth))
        self.leave = draw(nn.Linear(width, 1), 0.1)

    def forward(self, x):
        x = torch.relu(self.enter(x))
        for layer in self.layers:
            x = torch.relu(layer(x))  #@
        return self.leave(x).squeeze(-1)


torch.manual_seed(0)
plain = Plain()
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-4)
for _ in range(3):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    loss = nn.functional.smooth_l1_loss(plain(x), x.sum(1))
    loss.backward()
    optimizer.step()
#: check
assert max(p.grad.norm().item() for p in plain.parameters()) < 1e4
