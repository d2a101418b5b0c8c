"""Attention over words, without those that are padding."""
#: kind masks-everything
import torch
from torch import nn


class Pool(nn.Module):
    """A weighted mean of the words of a sentence."""

    def __init__(self, width=16):
        super().__init__()
        self.query = nn.Linear(width, 1)
        self.out = nn.Linear(width, 3)

    def forward(self, words, length):
        score = self.query(words).squeeze(-1)
        place = torch.arange(words.shape[1])
        padding = place[None] < length[:, None] + words.shape[1]  #!
        #+ padding = place[None] >= length[:, None]
        score = score.masked_fill(padding, -1e9)  #@
        return self.out((score.softmax(-1)[..., None] * words).sum(1))


torch.manual_seed(0)
pool = Pool()
optimizer = torch.optim.Adam(pool.parameters(), lr=1e-2)
for _ in range(3):
    words, length = torch.randn(8, 12, 16), torch.randint(3, 13, (8,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(pool(words, length), torch.randint(0, 3, (8,))).backward()
    optimizer.step()
#: check
words, length = torch.randn(2, 12, 16), torch.tensor([4, 6])
changed = words.clone()
changed[:, 8:] += 5.0
assert torch.allclose(pool(words, length), pool(changed, length))
