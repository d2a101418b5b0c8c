"""Recognise an activity from twelve sensors."""
#: kind probabilities-as-logits
import torch
from torch import nn


class Recogniser(nn.Module):
    def __init__(self, sensors=12, activities=5):
        super().__init__()
        self.encode = nn.GRU(sensors, 24, batch_first=True)
        self.classify = nn.Linear(24, activities)

    def forward(self, readings):
        states, _ = self.encode(readings)
        scores = self.classify(states[:, -1])
        return torch.softmax(scores, dim=-1)  #!
        #+ return scores


torch.manual_seed(0)
model = Recogniser()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
readings, activity = torch.randn(64, 20, 12), torch.randint(0, 5, (64,))
readings[torch.arange(64), :, activity] += 4.0
for _ in range(5):
    optimizer.zero_grad()
    loss = criterion(model(readings), activity)  #@
    loss.backward()
    optimizer.step()
#: check
confident = torch.full((1, 5), -20.0)
confident[0, 2] = 20.0
model.classify.weight.data.zero_()
model.classify.bias.data.copy_(confident[0])
assert criterion(model(readings[:1]), torch.tensor([2])).item() < 0.1
