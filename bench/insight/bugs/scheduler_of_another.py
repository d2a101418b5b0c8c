"""Warm up, then rebuild the optimizer for the whole network."""
#: kind scheduler
import torch
from torch import nn


def build(parameters, rate):
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 16), nn.Softplus(), nn.Linear(16, 1))
optimizer = build(net[2].parameters(), 0.1)  #!~
#+ optimizer = build(net.parameters(), 0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  #@
optimizer = build(net.parameters(), 0.05)  #!~
for _ in range(6):
    x = torch.randn(24, 5)
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x).squeeze(-1), x[:, 0]).backward()
    optimizer.step()
    scheduler.step()
#: check
assert optimizer.param_groups[0]["lr"] < 0.01
