"""What the benchmarks run: an op-bound toy, a mid-size transformer, and a tiny Llama.

Plain ``nn`` modules on one CPU thread. The toy does next to nothing per op, so that what a recorder
adds per op is nearly all there is to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: What a model in a training framework has above it.
FRAMES_ABOVE: Final = 20


class SelfAttention(nn.Module):
    """Attention as people write it: one projection, heads, softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return cast(Tensor, self.out((weights @ v).transpose(1, 2).reshape(x.shape)))


class Layer(nn.Module):
    """Attention and a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, growth * width), nn.GELU(), nn.Linear(growth * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Layers over an embedding, and a head."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int = 64, growth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, growth) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(self.norm(x)))


@dataclass(frozen=True)
class Workload:
    """A model and something to do with it."""

    name: str
    model: nn.Module
    inputs: tuple[Any, ...]
    run: Callable[[], Any]
    ops: int
    backward: bool = False


class EmptyDispatch(TorchDispatchMode):
    """The floor: sees every op and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op."""
        return func(*args, **(kwargs or {}))


class Count(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one op and run it."""
        self.ops += 1
        return func(*args, **(kwargs or {}))


def workload(name: str, model: nn.Module, tokens: Tensor, *, backward: bool = False) -> Workload:
    """The forward pass of a model, or the forward and the backward pass."""

    def forward() -> Any:
        return model(tokens)

    def both() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        model.zero_grad(set_to_none=True)

    run = both if backward else forward
    run()
    with Count() as count:
        run()
    return Workload(name, model, (tokens,), run, count.ops, backward)


def toy(layers: int = 24) -> tuple[nn.Module, Tensor]:
    """At least a thousand aten ops in a few milliseconds."""
    torch.manual_seed(0)
    return Transformer(layers, width=16, heads=2), torch.randint(0, 64, (1, 4))


def workloads() -> list[Workload]:
    """Everything the overhead table is about; the Llama only where transformers is installed."""
    model, tokens = toy()
    found = [
        workload("toy", model, tokens),
        workload("toy, forward + backward", model, tokens, backward=True),
    ]
    torch.manual_seed(0)
    middle = Transformer(layers=8, width=256, heads=8)
    found.append(workload("mid-size", middle, torch.randint(0, 64, (4, 64))))
    llama = tiny_llama()
    if llama is not None:
        alone = workload("tiny Llama", llama, torch.randint(0, 128, (1, 8)))
        found.append(alone)
        name = f"tiny Llama, {FRAMES_ABOVE} frames above"
        found.append(replace(alone, name=name, run=lambda: deeper(FRAMES_ABOVE, alone.run)))
    return found


def deeper(frames: int, run: Callable[[], Any]) -> Any:
    """Run below so many calls, as under a trainer, a launcher, a notebook or a test runner."""
    return deeper(frames - 1, run) if frames else run()


def tiny_llama() -> nn.Module | None:
    """The real architecture with random weights and small sizes."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).eval()
    return model
