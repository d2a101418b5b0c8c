"""Detect events in a signal with shifted units."""
#: kind dead-activation
import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)
        nn.init.constant_(self.second.bias, -30.0)  #!~
        #+ nn.init.constant_(self.second.bias, 0.0)

    def forward(self, signal):
        hidden = torch.relu(self.first(signal))
        hidden = torch.relu(self.second(hidden))  #@
        return self.out(hidden)


torch.manual_seed(0)
detector = Detector()
optimizer = torch.optim.Adam(detector.parameters(), lr=1e-3)
for _ in range(4):
    signal = torch.randn(24, 16)
    event = (signal[:, 0] > 0).long()
    optimizer.zero_grad()
    nn.functional.cross_entropy(detector(signal), event).backward()
    optimizer.step()
#: check
assert detector.second.weight.grad.abs().max() > 0
