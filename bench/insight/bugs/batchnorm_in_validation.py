"""A residual network on small images, with a score after every epoch."""
#: kind training-mode-in-evaluation
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

torch.manual_seed(0)
config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
net = ResNetForImageClassification(config)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(12, 3, 32, 32), torch.randint(0, 3, (12,))
held_out = torch.randn(6, 3, 32, 32)


def score(batch):
    #+ net.eval()
    with torch.inference_mode():
        return net(pixel_values=batch).logits  #@


net.train()
for epoch in range(2):
    for start in range(0, 12, 4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(pixel_values=images[start : start + 4]).logits, labels[start : start + 4])
        loss.backward()
        optimizer.step()
    print(epoch, score(held_out).argmax(-1).tolist())
    #+ net.train()
#: check
state = {k: v.clone() for k, v in net.state_dict().items()}
score(held_out)
assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
