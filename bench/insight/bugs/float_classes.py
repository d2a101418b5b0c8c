"""Train on labels read from a table of numbers."""
#: kind failure
import torch
import torch.nn.functional as F
from torch import nn


def read_table(rows=32):
    """Eight features and a label in each row."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(rows, 9, generator=generator)
    table[:, 8] = torch.randint(0, 3, (rows,), generator=generator).float()
    return table[:, :8], table[:, 8]  #!
    #+ return table[:, :8], table[:, 8].long()


torch.manual_seed(0)
features, labels = read_table()
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(3):
    logits = net(features)
    loss = F.cross_entropy(logits, labels)  #@
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
#: check
