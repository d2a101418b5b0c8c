"""Report the mean loss of an epoch."""
#: kind graph-grows
import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv1d(1, 8, 5, padding=2)
        self.decode = nn.Conv1d(8, 1, 5, padding=2)

    def forward(self, x):
        return self.decode(torch.relu(self.encode(x)))


def epoch(model, optimizer, batches):
    total = 0.0
    for clean in batches:
        noisy = clean + 0.1 * torch.randn_like(clean)
        loss = nn.functional.l1_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss  #!
        #+ total += loss.item()
    return total / len(batches)


torch.manual_seed(0)
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters())
mean = epoch(model, optimizer, torch.randn(6, 4, 1, 64).unbind())
#: check
assert not getattr(mean, "requires_grad", False)
