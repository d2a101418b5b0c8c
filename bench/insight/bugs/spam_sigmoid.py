"""Tell spam by the words in a message."""
#: kind probabilities-as-logits
import torch
import torch.nn.functional as F
from torch import nn


class Filter(nn.Module):
    def __init__(self, words=200):
        super().__init__()
        self.words = nn.EmbeddingBag(words, 16)
        self.score = nn.Linear(16, 1)

    def forward(self, message):
        return torch.sigmoid(self.score(self.words(message))).squeeze(-1)  #!
        #+ return self.score(self.words(message)).squeeze(-1)


torch.manual_seed(0)
spam = Filter()
optimizer = torch.optim.Adagrad(spam.parameters(), lr=0.1)
messages = torch.randint(0, 200, (32, 10))
flags = (messages < 20).any(1).float()
for epoch in range(4):
    predicted = spam(messages)
    loss = F.binary_cross_entropy_with_logits(predicted, flags)  #@
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
#: check
spam.score.weight.data.zero_(), spam.score.bias.data.fill_(-30.0)
assert F.binary_cross_entropy_with_logits(spam(messages), torch.zeros(32)).item() < 0.1
