"""A language model whose head shares the embedding."""
#: kind untied-weights
import torch
from torch import nn


class Writer(nn.Module):
    def __init__(self, vocabulary=40, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = nn.Parameter(self.embed.weight.clone())  #!
        #+ self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens))[0])  #@


torch.manual_seed(0)
writer = Writer()
optimizer = torch.optim.AdamW(writer.parameters(), lr=1e-2)
tokens = torch.randint(0, 40, (8, 11))
for _ in range(4):
    optimizer.zero_grad()
    logits = writer(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
#: check
assert torch.equal(writer.head.weight, writer.embed.weight)
