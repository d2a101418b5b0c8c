"""A deep network for tables."""
#: kind unregistered-module
import torch
from torch import nn


class Deep(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.blocks = [nn.Sequential(nn.Linear(width, width), nn.Mish()) for _ in range(depth)]  #!
        #+ self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Mish()) for _ in range(depth))
        self.leave = nn.Linear(width, 2)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)  #@
        return self.leave(x)


torch.manual_seed(0)
deep = Deep()
optimizer = torch.optim.AdamW(deep.parameters(), lr=1e-3)
for _ in range(4):
    x, y = torch.randn(20, 6), torch.randint(0, 2, (20,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(deep(x), y).backward()
    optimizer.step()
#: check
assert sum(p.numel() for p in deep.parameters()) > 800
