"""Tune a language model on a handful of sentences."""
#: kind step-without-gradients
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
model = LlamaForCausalLM(config)
before = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
sentences = torch.randint(0, 64, (4, 12))


def train_step(tokens):
    #+ optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.zero_grad()  #!~
    optimizer.step()  #@
    return loss.item()


for step in range(3):
    print(f"step {step}: {train_step(sentences):.3f}")
#: check
assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
