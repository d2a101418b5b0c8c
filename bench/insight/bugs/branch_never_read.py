"""Two scales of a picture, joined."""
#: kind no-gradient
import torch
from torch import nn


class TwoScales(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = nn.Conv2d(1, 6, 3, padding=1)
        self.coarse = nn.Conv2d(1, 6, 7, padding=3)
        self.out = nn.Linear(12, 4)

    def forward(self, picture):
        fine = torch.relu(self.fine(picture)).mean((2, 3))
        coarse = torch.relu(self.coarse(picture)).mean((2, 3))  #@
        return self.out(torch.cat([fine, fine], -1))  #!~
        #+ return self.out(torch.cat([fine, coarse], -1))


torch.manual_seed(0)
net = TwoScales()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(torch.randn(4, 1, 10, 10)), torch.randint(0, 4, (4,))).backward()
    optimizer.step()
#: check
assert net.coarse.weight.grad is not None
