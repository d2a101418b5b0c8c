"""Train a recurrent network, whose gradients are known to jump."""
#: kind clipped-after-step
import torch
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(4, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(-1)


torch.manual_seed(0)
counter = Counter()
optimizer = torch.optim.SGD(counter.parameters(), lr=0.5)
moved = []
for step in range(5):
    x = torch.randn(16, 30, 4) * 8
    loss = nn.functional.mse_loss(counter(x), x.sum((1, 2)))
    optimizer.zero_grad()
    loss.backward()
    before = [p.detach().clone() for p in counter.parameters()]
    #+ torch.nn.utils.clip_grad_norm_(counter.parameters(), 1.0)
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(counter.parameters(), 1.0)  #!
    moved.append(sum((p - q).square().sum() for p, q in zip(before, counter.parameters())).sqrt().item())
#: check
assert max(moved) <= 0.5 * 1.01
