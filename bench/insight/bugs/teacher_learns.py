"""Distil a GPT-2 into one of half its depth."""
#: kind parameters-without-optimizer
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel


def make(layers):
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=layers, n_head=4, n_positions=32,
                                      bos_token_id=0, eos_token_id=0))


torch.manual_seed(0)
teacher, student = make(4).eval(), make(2)
#+ teacher.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(3):
    tokens = torch.randint(0, 60, (4, 16))
    wanted = teacher(input_ids=tokens).logits.softmax(-1)  #@
    given = student(input_ids=tokens).logits.log_softmax(-1)
    loss = F.kl_div(given.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
#: check
assert all(p.grad is None for p in teacher.parameters())
