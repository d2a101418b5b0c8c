"""Trace a small transformer forward and backward, and look at the recording from several sides.

    python examples/tiny_transformer.py

The model is in ``sightline/cli/demo_model.py``; ``sightline demo --source`` prints it.
"""

import torch

import sightline as sl
from sightline.cli.demo_model import TinyTransformer, next_token_loss, sample


def main() -> None:
    torch.manual_seed(0)
    model = TinyTransformer()
    tokens, targets = sample()

    with sl.trace(model) as t:
        loss = next_token_loss(model, tokens, targets)
        loss.backward()

    print(t)  # one screen: what was recorded

    # The ops of the first attention under the lines that ran them, the backward ones included.
    t.code(module="blocks.0.attn").print()

    # The tables behind the views are there to compute with.
    largest = max(t.values, key=lambda value: value.meta.nbytes)
    print(f"largest tensor: {largest} made by {largest.producer!r}")
    backward = t.ops.where(level="aten", phase="backward")
    print(f"{len(backward)} backward ops, {sum(op.forward is not None for op in backward)} with a forward op")


if __name__ == "__main__":
    main()
