"""An encoder of four layers."""
#: kind shared-layers
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attend(y, y, y, need_weights=False)[0]


class Encoder(nn.Module):
    def __init__(self, width=32, depth=4):
        super().__init__()
        self.layers = nn.ModuleList([Layer(width)] * depth)  #!
        #+ self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])
        self.pool = nn.Linear(width, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)  #@
        return self.pool(x.mean(1))


torch.manual_seed(0)
encoder = Encoder()
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.cross_entropy(encoder(torch.randn(6, 9, 32)), torch.randint(0, 2, (6,))).backward()
    optimizer.step()
#: check
assert encoder.layers[0].norm.weight is not encoder.layers[1].norm.weight
