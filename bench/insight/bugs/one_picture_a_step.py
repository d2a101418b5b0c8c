"""Segment large pictures, of which only one fits into memory."""
#: kind batch-of-one
import torch
from torch import nn


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 12, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(12)  #!~
        #+ self.norm = nn.GroupNorm(4, 12)
        self.up = nn.ConvTranspose2d(12, 2, 4, stride=2, padding=1)

    def forward(self, picture):
        features = torch.relu(self.norm(self.down(picture)))  #@
        return self.up(features)


torch.manual_seed(0)
model = Segmenter()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(4):
    picture = torch.randn(1, 3, 32, 32) * (1 + step) + step
    labels = (picture.mean(1) > 0).long()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(picture), labels).backward()
    optimizer.step()
#: check
picture = torch.randn(1, 3, 32, 32) * 4 + 3
training = model.train()(picture)
assert torch.allclose(training, model.eval()(picture))
