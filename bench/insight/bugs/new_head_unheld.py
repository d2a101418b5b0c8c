"""Give a small BERT a head of its own and train it on two classes."""
#: kind parameters-without-optimizer
import torch
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
config = BertConfig(vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    intermediate_size=64, max_position_embeddings=32, num_labels=2)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.classifier = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 2))
#+ optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = model.classifier[0].weight.detach().clone()
tokens, labels = torch.randint(0, 80, (8, 12)), torch.randint(0, 2, (8,))
model.train()
for step in range(3):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    optimizer.step()  #@
#: check
assert not torch.equal(first, model.classifier[0].weight)
