"""Score answers with a network that drops a tenth of its features."""
#: kind dropout-in-evaluation
import torch
import torch.nn.functional as F
from torch import nn


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 1)

    def forward(self, answers):
        hidden = F.gelu(self.up(self.norm(answers)))
        hidden = F.dropout(hidden, 0.1)  #!
        #+ hidden = F.dropout(hidden, 0.1, training=self.training)
        return self.down(hidden).squeeze(-1)


torch.manual_seed(0)
scorer = Scorer()
optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-3)
for _ in range(3):
    answers = torch.randn(16, 24)
    loss = F.mse_loss(scorer(answers), answers.mean(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
scorer.eval()
with torch.no_grad():
    ranked = scorer(torch.randn(5, 24)).sort().indices
print(ranked.tolist())
#: check
answers = torch.randn(5, 24)
assert torch.equal(scorer(answers), scorer(answers))
