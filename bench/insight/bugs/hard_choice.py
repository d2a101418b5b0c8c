"""Route each row to one of three experts."""
#: kind no-gradient
import torch
from torch import nn


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.Parameter(torch.randn(3, 8, 4) * 0.3)

    def forward(self, x):
        scores = self.router(x)  #@
        chosen = nn.functional.one_hot(scores.argmax(-1), 3).float()  #!~
        #+ chosen = scores.softmax(-1)
        return torch.einsum("bi,eio,be->bo", x, self.experts, chosen)


torch.manual_seed(0)
routed = Routed()
optimizer = torch.optim.Adam(routed.parameters(), lr=1e-2)
for _ in range(3):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    nn.functional.mse_loss(routed(x), x[:, :4]).backward()
    optimizer.step()
#: check
assert routed.router.weight.grad is not None
