"""Segment cells from the background."""
#: kind targets-out-of-range
import torch
from torch import nn


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 1, 2, stride=2)

    def forward(self, images):
        return self.up(torch.relu(self.down(images)))


def load(count):
    """Images, and masks as painted: black is background, white is a cell."""
    painted = (torch.rand(count, 1, 24, 24) > 0.7).byte() * 255
    return torch.randn(count, 1, 24, 24), painted.float()  #!
    #+ return torch.randn(count, 1, 24, 24), painted.float() / 255


torch.manual_seed(0)
segmenter = Segmenter()
optimizer = torch.optim.Adam(segmenter.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
for _ in range(3):
    images, masks = load(4)
    optimizer.zero_grad()
    loss = criterion(segmenter(images), masks)  #@
    loss.backward()
    optimizer.step()
#: check
assert criterion(torch.full_like(masks, 30.0) * (2 * masks.clamp(max=1) - 1), masks).item() >= -1e-3
