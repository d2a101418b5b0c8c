"""Train a normalised network on 33 rows, 8 at a time."""
#: kind failure
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(10, 20)
        self.norm = nn.BatchNorm1d(20)
        self.out = nn.Linear(20, 2)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.hidden(x))))  #@


torch.manual_seed(0)
rows = TensorDataset(torch.randn(33, 10), torch.randint(0, 2, (33,)))
loader = DataLoader(rows, batch_size=8)  #!
#+ loader = DataLoader(rows, batch_size=8, drop_last=True)
head = Head()
optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(head(x), y).backward()  #@
    optimizer.step()
#: check
