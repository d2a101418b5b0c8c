"""Watch the hidden states of a network while it trains."""
#: kind graph-kept
import torch
from torch import nn


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 4)
        self.seen = []

    def forward(self, x):
        hidden = torch.relu(self.first(x))  #@
        self.seen.append(hidden)  #!
        #+ self.seen.append(hidden.detach())
        return self.second(hidden)


torch.manual_seed(0)
net = Watched()
optimizer = torch.optim.Adam(net.parameters())
for step in range(8):
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
print(len(net.seen), "steps watched")
#: check
assert not any(getattr(one, "grad_fn", None) for one in net.seen)
