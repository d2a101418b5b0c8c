"""A network in which each row has a gate of its own."""
#: kind broadcast
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.value = nn.Linear(10, width)
        self.gate = nn.Linear(10, 1)
        self.out = nn.Linear(width, 1)

    def forward(self, rows):
        gate = torch.sigmoid(self.gate(rows)).squeeze(-1)
        hidden = self.value(rows) * gate  #!
        #+ hidden = self.value(rows) * gate.unsqueeze(-1)
        return self.out(torch.tanh(hidden)).squeeze(-1)


torch.manual_seed(0)
gated = Gated()
optimizer = torch.optim.Adam(gated.parameters(), lr=1e-2)
for _ in range(3):
    rows = torch.randn(16, 10)
    optimizer.zero_grad()
    nn.functional.mse_loss(gated(rows), rows[:, 0]).backward()
    optimizer.step()
#: check
rows = torch.randn(16, 10)
changed = rows.clone()
changed[1:] += 1.0
assert torch.allclose(gated(rows)[0], gated(changed)[0])
