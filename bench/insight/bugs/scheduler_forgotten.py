"""Train with a rate that falls along a cosine."""
#: kind scheduler
import torch
from torch import nn


def main(steps=12):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 40), nn.Hardswish(), nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)  #@
    for _ in range(steps):
        x, y = torch.randn(32, 10), torch.randint(0, 3, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        #+ scheduler.step()
    return optimizer.param_groups[0]["lr"]


rate = main()
#: check
assert rate < 1e-3
