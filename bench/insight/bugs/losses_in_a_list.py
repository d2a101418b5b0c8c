"""Keep the curve of the loss of a small OPT."""
#: kind graph-kept
import torch
from transformers import OPTConfig, OPTForCausalLM

torch.manual_seed(0)
model = OPTForCausalLM(OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=1,
                                 num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
curve = []
for step in range(6):
    tokens = torch.randint(4, 64, (4, 10))
    output = model(input_ids=tokens, labels=tokens)  #@
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    curve.append(output.loss)  #!
    #+ curve.append(output.loss.item())
print(len(curve))
#: check
assert not any(getattr(one, "grad_fn", None) for one in curve)
