"""A residual network whose blocks begin with their activation."""
#: kind changed-before-skip
import torch
import torch.nn.functional as F
from torch import nn


class PreBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        skip = x
        out = self.conv1(F.relu(x, inplace=True))  #!
        #+ out = self.conv1(F.relu(x))
        out = self.conv2(F.relu(out, inplace=True))
        return out + skip  #@


class PreNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*[PreBlock(8) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


torch.manual_seed(0)
net = PreNet()
images, labels = torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    F.cross_entropy(net(images), labels).backward()
    optimizer.step()
#: check
block = PreBlock(2)
x = torch.randn(1, 2, 4, 4)
same = x.clone()
wanted = x + block.conv2(F.relu(block.conv1(F.relu(x))))
assert torch.allclose(block(same), wanted)
