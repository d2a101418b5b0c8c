"""Train a small DistilBERT and validate after every epoch."""
#: kind training-mode-in-evaluation
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification


def validate(model, tokens, labels):
    """How many of the labels are right."""
    #+ model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits  #!
        #+ logits = model(input_ids=tokens).logits
    return (logits.argmax(-1) == labels).float().mean().item(), logits


def train(model, tokens, labels, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        model.train()
        for rows in torch.arange(len(tokens)).split(8):
            optimizer.zero_grad()
            model(input_ids=tokens[rows], labels=labels[rows]).loss.backward()
            optimizer.step()
        accuracy, _ = validate(model, tokens, labels)
        print(f"epoch {epoch}: {accuracy:.2f}")


torch.manual_seed(0)
config = DistilBertConfig(vocab_size=90, dim=32, hidden_dim=64, n_layers=2, n_heads=4,
                          max_position_embeddings=32, num_labels=3)
model = DistilBertForSequenceClassification(config)
tokens, labels = torch.randint(0, 90, (16, 10)), torch.randint(0, 3, (16,))
train(model, tokens, labels)
#: check
assert torch.equal(validate(model, tokens, labels)[1], validate(model, tokens, labels)[1])
