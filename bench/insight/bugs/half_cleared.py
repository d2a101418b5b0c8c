"""Match pictures and captions with two towers."""
#: kind gradients-not-cleared
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
pictures = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
captions = nn.Sequential(nn.Embedding(90, 24), nn.Flatten(), nn.Linear(24 * 6, 16))
optimizer = torch.optim.SGD([*pictures.parameters(), *captions.parameters()], lr=1e-2)


def clear():
    captions.zero_grad()  #!~
    #+ optimizer.zero_grad()


for step in range(5):
    image, words = torch.randn(12, 48), torch.randint(0, 90, (12, 6))
    clear()
    one, other = (F.normalize(part, dim=-1) for part in (pictures(image), captions(words)))
    F.cross_entropy(one @ other.T / 0.1, torch.arange(12)).backward()
    optimizer.step()  #@
#: check
clear()
assert pictures[0].weight.grad is None
