"""Average the predictions of several passes."""
#: kind uninitialised
import torch
from torch import nn


class Ensemble(nn.Module):
    def __init__(self, members=4):
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(6, 3) for _ in range(members))

    def forward(self, x):
        total = torch.empty(x.shape[0], 3)  #!
        #+ total = torch.zeros(x.shape[0], 3)
        for member in self.members:
            total = total + member(x).softmax(-1)  #@
        return total / len(self.members)


torch.manual_seed(0)
ensemble = Ensemble()
with torch.no_grad():
    for _ in range(3):
        print(ensemble(torch.randn(5, 6)).argmax(-1).tolist())
#: check
keep = torch.empty
torch.empty = lambda *size: keep(*size).fill_(7.0)
assert torch.allclose(ensemble(torch.randn(5, 6)).sum(-1), torch.ones(5))
