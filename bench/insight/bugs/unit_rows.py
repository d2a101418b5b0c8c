"""Compare every item with every other by the angle between them."""
#: kind broadcast
import torch
from torch import nn


class Similar(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.project = nn.Linear(12, width)

    def forward(self, items):
        vectors = self.project(items)
        vectors = vectors / vectors.norm(dim=1)  #!
        #+ vectors = vectors / vectors.norm(dim=1, keepdim=True)
        return vectors @ vectors.T


torch.manual_seed(0)
similar = Similar()
optimizer = torch.optim.Adam(similar.parameters(), lr=1e-3)
for _ in range(3):
    items = torch.randn(32, 12)
    optimizer.zero_grad()
    (similar(items) - torch.eye(32)).square().mean().backward()
    optimizer.step()
#: check
assert torch.allclose(similar(torch.randn(32, 12)).diagonal(), torch.ones(32), atol=1e-4)
