"""What recording, checking and measuring cost on a GPU: a Llama of one billion parameters in bf16.

    PYTHONPATH=src python bench/gpu/llama.py [--rounds N] [--engine native|python|all] [--tiny]

A pass of a block covers the pass alone, the first or a later one, as when text is generated; everywhere else
starting and stopping the trace is inside the clock, building it is not. The last table counts the CUDA calls
that make the host wait. ``--tiny`` runs a small model on whatever there is, to try the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from side_by_side import (
    EmptyDispatch,
    Engine,
    Place,
    Variant,
    add_option,
    available,
    compare,
    count_waits,
    place,
    tokens_title,
)
from transformers import LlamaConfig, LlamaForCausalLM

import sightline as sl

Level = Literal["none", "api", "aten", "both"]

LEVELS: Final[tuple[Level, ...]] = ("none", "api", "aten", "both")
LONG, SHORT = (8, 4096), (1, 1)
#: The most a forward pass may take under the native engine at both levels, × plain.
TARGETS: Final = {tokens_title(LONG): 1.01, tokens_title(SHORT): 1.7}
VOCABULARY: Final = 32_000


def llama(tiny: bool, where: Place) -> Any:
    """The shape of Llama 3.2 1B, or a small one, with random weights."""
    sizes = (64, 128, 4, 4, 2) if tiny else (2048, 8192, 16, 32, 8)
    width, inner, layers, heads, key_heads = sizes
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=8192,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(where.device, where.dtype).eval()


def variants(model: Any, engines: tuple[Engine, ...], most: dict[str, float]) -> list[Variant]:
    """How the model is run; ``most`` is what the native engine may take at both levels."""

    def traced(name: str, targets: dict[str, float] | None = None, **options: Any) -> Variant:
        return Variant(name, lambda: sl.trace(model, **options), "block", targets=targets or {})

    levels = [
        traced(
            f'ops="{level}" ({engine})',
            most if (level, engine) == ("both", "native") else None,
            ops=level,
            engine=engine,
        )
        for engine in engines
        for level in LEVELS
    ]

    def running() -> Any:
        return sl.trace(model, engine="native")

    passes = [Variant("a later pass of a block (native)", running, warm=1, targets=most)]
    return [
        Variant("plain", clock="block"),
        Variant("empty dispatch mode", EmptyDispatch, "block"),
        *(passes if "native" in engines else []),
        *levels,
        traced('check="nonfinite"', check="nonfinite"),
        traced("stats without fingerprints", stats=sl.Stats(fingerprint=False)),
        traced("stats without parameters", stats=sl.Stats(fingerprint=False, parameters=False)),
        traced("stats=True", stats=True),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="a small model, also on a CPU")
    add_option(parser)
    options = parser.parse_args()
    where = place(options.tiny)
    model = llama(options.tiny, where)
    found = variants(model, available(options.engine), {} if options.tiny else TARGETS)
    print(f"torch {torch.__version__}, {where.name}; sightline {sl.__version__}")

    def forward(shape: tuple[int, int]) -> Callable[[], Any]:
        tokens = torch.randint(0, VOCABULARY, shape, device=where.device)
        return lambda: model(tokens)

    with torch.no_grad():
        long = (2, 16) if options.tiny else LONG
        compare(tokens_title(long), found, forward(long), options.rounds)
        compare(tokens_title(SHORT), found, forward(SHORT), 4 * options.rounds)
        count_waits("one forward of 1 × 128 tokens", found, forward((1, 128)))


if __name__ == "__main__":
    main()
