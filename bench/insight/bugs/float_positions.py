"""A bfloat16 encoder with sinusoidal positions."""
#: kind upcast
import math

import torch
from torch import nn


def sinusoids(length, width):
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def rms(x):
    return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.places = sinusoids(64, width)  #!~
        #+ self.places = sinusoids(64, width).bfloat16()

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.places[: tokens.shape[1]]  #@
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.down(torch.nn.functional.gelu(self.up(rms(x))))


torch.manual_seed(0)
encoder = Encoder().to(torch.bfloat16)
out = encoder(torch.randint(0, 100, (2, 20)))
#: check
assert out.dtype == torch.bfloat16
