"""Learn to add two numbers."""
#: kind step-without-gradients
import torch
from torch import nn

torch.manual_seed(0)
adder = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(adder.parameters(), lr=1e-2)
start = adder[0].weight.detach().clone()
for step in range(5):
    pairs = torch.rand(128, 2)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(adder(pairs), pairs.sum(1, keepdim=True))
    optimizer.step()  #!
    loss.backward()
    #+ optimizer.step()
#: check
assert not torch.equal(start, adder[0].weight)
