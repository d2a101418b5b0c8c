"""Predict the next note of a melody."""
#: kind logits-as-log-probabilities
import torch
import torch.nn.functional as F
from torch import nn


class Melody(nn.Module):
    def __init__(self, notes=30):
        super().__init__()
        self.embed = nn.Embedding(notes, 24)
        self.rnn = nn.LSTM(24, 32, batch_first=True)
        self.out = nn.Linear(32, notes)

    def forward(self, notes):
        states, _ = self.rnn(self.embed(notes))
        return self.out(states)  #!
        #+ return F.log_softmax(self.out(states), dim=-1)


torch.manual_seed(0)
melody = Melody()
optimizer = torch.optim.RMSprop(melody.parameters(), lr=1e-3)
tune = torch.randint(0, 30, (8, 17))
for _ in range(4):
    scores = melody(tune[:, :-1])
    loss = F.nll_loss(scores.flatten(0, 1), tune[:, 1:].flatten())  #@
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
#: check
assert loss.item() > 0.5
