"""An encoder with PyTorch's own attention and a mask of the padding."""
#: kind non-finite
import torch
from torch import nn


class Sentences(nn.Module):
    def __init__(self, vocabulary=60, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 2)

    def forward(self, tokens):
        there = tokens != 0
        x = self.embed(tokens)
        x, _ = self.attend(x, x, x, key_padding_mask=there)  #!
        #+ x, _ = self.attend(x, x, x, key_padding_mask=~there)
        return self.out(x[:, 0])


torch.manual_seed(0)
model = Sentences()
tokens = torch.randint(1, 60, (6, 9))
tokens[:3, 6:] = 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens), torch.randint(0, 2, (6,)))
    loss.backward()
    optimizer.step()
#: check
assert torch.isfinite(loss)
