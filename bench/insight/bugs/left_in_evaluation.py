"""Train a model of text with a look at held-out loss in between."""
#: kind evaluation-mode-in-training
import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self, vocabulary=50, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.2, batch_first=True), 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.out(self.layers(self.embed(tokens)))


def held_out_loss(reader, tokens):
    reader.eval()
    with torch.no_grad():
        logits = reader(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    #+ reader.train()
    return loss


torch.manual_seed(0)
reader = Reader()
optimizer = torch.optim.Adam(reader.parameters(), lr=1e-3)
text, held_out = torch.randint(0, 50, (24, 13)), torch.randint(0, 50, (4, 13))
for step in range(6):
    if step % 2 == 0:
        print(f"held out: {held_out_loss(reader, held_out):.3f}")
    rows = text[4 * step : 4 * step + 4]
    optimizer.zero_grad()
    logits = reader(rows[:, :-1])  #@
    nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
    optimizer.step()
#: check
assert reader.training
