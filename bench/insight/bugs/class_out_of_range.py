"""Sort flowers into classes counted from one."""
#: kind failure
import torch
import torch.nn.functional as F
from torch import nn


class Flowers(torch.utils.data.Dataset):
    def __init__(self, count=48, classes=6):
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(count, 12, generator=generator)
        self.labels = torch.arange(count) % classes + 1  #!
        #+ self.labels = torch.arange(count) % classes

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        return self.features[at], self.labels[at]


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for features, labels in torch.utils.data.DataLoader(Flowers(), batch_size=16):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(features), labels)  #@
    loss.backward()
    optimizer.step()
#: check
