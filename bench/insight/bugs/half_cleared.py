"""Match pictures and captions with two towers."""
#: kind gradients-not-cleared
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
pictures = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
captions = nn.Sequential(nn.Embedding(90, 24), nn.Flatten(), nn.Linear(24 * 6, 16))
optimizer = torch.optim.SGD([*pictures.parameters(), *captions.parameters()], lr=1e-2)
for step in range(5):
    image, words = torch.randn(12, 48), torch.randint(0, 90, (12, 6))
    captions.zero_grad()  #!~
    #+ optimizer.zero_grad()
    one, other = (F.normalize(part, dim=-1) for part in (pictures(image), captions(words)))
    F.cross_entropy(one @ other.T / 0.1, torch.arange(12)).backward()
    optimizer.step()  #@
#: check
kept = pictures[0].weight.grad.clone()
optimizer.zero_grad()
one, other = (F.normalize(part, dim=-1) for part in (pictures(image), captions(words)))
F.cross_entropy(one @ other.T / 0.1, torch.arange(12)).backward()
assert kept.norm() < 1.5 * pictures[0].weight.grad.norm()
