"""Distil a classifier into a smaller one."""
#: kind logits-as-log-probabilities
import torch
import torch.nn.functional as F
from torch import nn


def soft_loss(student, teacher, temperature=2.0):
    """How far the student's distribution is from the teacher's."""
    wanted = F.softmax(teacher / temperature, dim=-1)
    given = F.softmax(student / temperature, dim=-1)  #!
    #+ given = F.log_softmax(student / temperature, dim=-1)
    return F.kl_div(given, wanted, reduction="batchmean") * temperature**2  #@


torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)
student = nn.Linear(16, 8)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(32, 16)
    loss = soft_loss(student(x), teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
#: check
assert abs(soft_loss(torch.ones(2, 8), torch.ones(2, 8)).item()) < 1e-4
