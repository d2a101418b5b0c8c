"""A network for bytes of an image, with smooth units."""
#: kind saturated-activation
import torch
from torch import nn


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(49, 48)
        self.outer = nn.Linear(48, 10)
        nn.init.uniform_(self.inner.weight, 0.5, 1.0)

    def forward(self, pixels):
        flat = pixels.flatten(1)  #!~
        #+ flat = pixels.flatten(1) / 255 - 0.5
        return self.outer(torch.tanh(self.inner(flat)))  #@


torch.manual_seed(0)
smooth = Smooth()
optimizer = torch.optim.SGD(smooth.parameters(), lr=0.1)
for _ in range(3):
    pixels = torch.randint(20, 256, (16, 7, 7)).float()
    optimizer.zero_grad()
    nn.functional.cross_entropy(smooth(pixels), torch.randint(0, 10, (16,))).backward()
    optimizer.step()
#: check
assert smooth.inner.weight.grad.abs().max() > 0
