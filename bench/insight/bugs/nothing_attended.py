"""A decoder block that attends to the frames of a clip."""
#: kind masks-everything
import torch
import torch.nn.functional as F
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.both, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, text, frames, padding):
        query = self.split(self.query(text))
        key, value = map(self.split, self.both(frames).chunk(2, -1))
        mask = padding[:, None, None, :].expand(-1, 1, text.shape[1], -1)  #!
        #+ mask = ~padding[:, None, None, :].expand(-1, 1, text.shape[1], -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)  #@
        return self.out(mixed.transpose(1, 2).flatten(2))


torch.manual_seed(0)
block = CrossAttention()
optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
for _ in range(3):
    text, frames = torch.randn(4, 7, 32), torch.randn(4, 20, 32)
    padding = torch.zeros(4, 20, dtype=torch.bool)
    loss = F.mse_loss(block(text, frames, padding), text)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
#: check
padding = torch.zeros(4, 20, dtype=torch.bool)
assert not torch.allclose(block(text, frames, padding), block(text, frames.flip(-1) * 3, padding))
