"""Train two towers to agree on pairs."""
#: kind cut-gradient
import torch
import torch.nn.functional as F
from torch import nn


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 12))
        self.right = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 12))

    def forward(self, one, other):
        a = F.normalize(self.left(one), dim=-1)
        b = F.normalize(self.right(other), dim=-1).detach()  #!
        #+ b = F.normalize(self.right(other), dim=-1)
        return a @ b.T


torch.manual_seed(0)
pair = Pair()
optimizer = torch.optim.Adam(pair.parameters(), lr=1e-3)
for _ in range(3):
    scores = pair(torch.randn(8, 9), torch.randn(8, 7))
    optimizer.zero_grad()
    F.cross_entropy(scores / 0.1, torch.arange(8)).backward()
    optimizer.step()
#: check
assert pair.right[0].weight.grad is not None
