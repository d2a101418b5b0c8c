"""Which of twelve genres a song has."""
#: kind logits-as-probabilities
import torch
from torch import nn


class Genres(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.GRU(20, 32, batch_first=True)
        self.score = nn.Linear(32, 12)

    def forward(self, song):
        _, last = self.body(song)
        return self.score(last[-1]).clamp(1e-6, 1 - 1e-6)  #!
        #+ return self.score(last[-1]).sigmoid()


torch.manual_seed(0)
model, loss_function = Genres(), nn.BCELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    song, genres = torch.randn(8, 15, 20), torch.randint(0, 2, (8, 12)).float()
    loss = loss_function(model(song), genres)  #@
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
#: check
out = model(torch.randn(8, 15, 20))
assert ((out > 1e-5) & (out < 1 - 1e-5)).all()
