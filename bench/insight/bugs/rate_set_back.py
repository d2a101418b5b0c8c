"""Warm restarts, with a rate for each group of parameters."""
#: kind learning-rate-unchanged
import torch
from torch import nn

torch.manual_seed(0)
RATES = {"body": 1e-3, "head": 1e-2}
model = nn.ModuleDict({"body": nn.Linear(12, 24), "head": nn.Linear(24, 3)})
optimizer = torch.optim.AdamW([{"params": model[name].parameters(), "lr": rate} for name, rate in RATES.items()])
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)  #@


def set_rates():
    for group, rate in zip(optimizer.param_groups, RATES.values(), strict=True):
        group["lr"] = rate


#+ set_rates()
used = set()
for step in range(8):
    set_rates()  #!~
    x, y = torch.randn(16, 12), torch.randint(0, 3, (16,))
    loss = nn.functional.cross_entropy(model["head"](model["body"](x).relu()), y)
    optimizer.zero_grad()
    loss.backward()
    used.add(optimizer.param_groups[0]["lr"])
    optimizer.step()
    scheduler.step()
#: check
assert len(used) > 1
