"""Fine-tune a small GPT-2 on text with a token added for padding."""
#: kind failure
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def encode(lines, vocabulary):
    """Bytes as tokens, padded on the right."""
    longest = max(map(len, lines))
    pad = vocabulary  #!
    #+ pad = vocabulary - 1
    rows = [list(line.encode()) + [pad] * (longest - len(line)) for line in lines]
    return torch.tensor(rows)  #@


torch.manual_seed(0)
config = GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
tokens = encode(["the quick brown fox", "jumps over", "the lazy dog"], config.vocab_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
#: check
