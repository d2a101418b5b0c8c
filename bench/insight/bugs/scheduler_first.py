"""Decay the rate a little after every step."""
#: kind scheduler
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(7, 21), nn.Tanh(), nn.Linear(21, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
rates = []
for _ in range(4):
    x, y = torch.randn(16, 7), torch.randint(0, 2, (16,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    schedule.step()  #!
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    #+ schedule.step()
#: check
assert rates[0] == 0.02
