"""Embed the tags of a picture, each with a weight."""
#: kind not-deterministic
import random

import torch
from torch import nn


class Tags(nn.Module):
    def __init__(self, count=40, width=32):
        super().__init__()
        self.embed = nn.Embedding(count, width)
        self.out = nn.Linear(width, 5)

    def forward(self, tags):
        weights = [random.uniform(0.5, 1.5) for _ in range(tags.shape[1])]  #!
        #+ weights = [1.0] * tags.shape[1]
        scale = torch.tensor(weights)  #@
        return self.out((self.embed(tags) * scale[:, None]).mean(1))  #@


torch.manual_seed(0)
tags = torch.randint(0, 40, (8, 6))
model = Tags().eval()
with torch.no_grad():
    first = model(tags)
    again = model(tags)
#: check
assert torch.equal(first, again)
