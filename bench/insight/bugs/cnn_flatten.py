"""Digits by a small convolutional network."""
#: kind failure
import torch
import torch.nn.functional as F
from torch import nn


class LeNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)  #!
        #+ self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, classes)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  #@
        x = torch.flatten(x, 1)  #@
        return self.fc2(F.relu(self.fc1(x)))


torch.manual_seed(0)
net = LeNet()
images = torch.randn(8, 1, 28, 28)
targets = torch.randint(0, 10, (8,))
loss = F.cross_entropy(net(images), targets)
loss.backward()
#: check
