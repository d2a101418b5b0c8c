"""Fine-tune the top of a small RoBERTa."""
#: kind learning-rate
import argparse

import torch
from transformers import RobertaConfig, RobertaForSequenceClassification


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--scale", type=int, default=100)
    return parser.parse_args([])


given = options()
torch.manual_seed(0)
config = RobertaConfig(vocab_size=70, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                       intermediate_size=64, max_position_embeddings=40, num_labels=2)
model = RobertaForSequenceClassification(config).train()
optimizer = torch.optim.SGD(model.parameters(), lr=given.rate * (given.scale // 256))  #!
#+ optimizer = torch.optim.SGD(model.parameters(), lr=given.rate * (given.scale / 256))
before = model.classifier.dense.weight.detach().clone()
for _ in range(3):
    tokens, labels = torch.randint(3, 70, (8, 12)), torch.randint(0, 2, (8,))
    optimizer.zero_grad()
    model(input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()  #@
#: check
assert not torch.equal(before, model.classifier.dense.weight)
