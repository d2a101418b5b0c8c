"""A small transformer written out by hand, traced forward and backward, and looked at from all sides.

    python tiny_transformer.py                  all views
    python tiny_transformer.py code summary     some of them

This is also what ``sightline demo`` runs.
"""

from __future__ import annotations

import sys
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl


class Attention(nn.Module):
    """Causal self-attention, step by step, so that every line shows up in a trace."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return cast(Tensor, self.out(mixed))


class Block(nn.Module):
    """Attention, then a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        h = F.gelu(self.up(self.norm2(x)))
        return cast(Tensor, x + self.down(h))


class TinyTransformer(nn.Module):
    """A language model of a few thousand parameters; its head shares the embedding's weights."""

    def __init__(
        self, vocabulary: int = 32, length: int = 8, width: int = 16, heads: int = 2, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            h = block(h)
        return cast(Tensor, self.head(self.norm(h)))


def sample(batch: int = 2, length: int = 6, vocabulary: int = 32) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them; the same ones every time."""
    tokens = torch.arange(batch * (length + 1)).mul(7).remainder(vocabulary).view(batch, length + 1)
    return tokens[:, :-1], tokens[:, 1:]


def record() -> sl.Trace:
    """Run the model once, forward and backward, inside a trace."""
    torch.manual_seed(0)
    model = TinyTransformer()
    tokens, targets = sample()

    with sl.trace(model, name="tiny transformer") as t:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    return t


#: Every view, and how it is asked for.
VIEWS = {
    "overview": "print(t)",
    "call_order": "t.call_order().print()",
    "log": "t.log().print()",
    "code": "t.code(fold=True).print()",
    "source": "t.source().print()",
    "summary": "t.summary().print()",
}


def show(t: sl.Trace, view: str) -> None:
    """Print one view under a headline that says how to get it."""
    print(f"\n── {VIEWS[view]} ".ljust(100, "─"), flush=True)
    if view == "overview":
        print(t)
    elif view == "code":
        t.code(fold=True).print()
    else:
        getattr(t, view)().print()


if __name__ == "__main__":
    trace = record()
    for name in sys.argv[1:] or VIEWS:
        show(trace, name)
