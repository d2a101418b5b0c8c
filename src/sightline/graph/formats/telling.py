"""The few arguments of an op that a picture has room for: what it was told and would not do anyway."""

from __future__ import annotations

from typing import Final

from sightline.graph.graph import Node, Ref
from sightline.graph.naming import word
from sightline.graph.signatures import REQUIRED, signature
from sightline.notation import constant_text

_MOST_TEXT: Final = 34  #: characters
#: One number for each dimension, and often the same one.
_SPATIAL: Final = (
    "kernel_size", "stride", "padding", "dilation", "output_padding", "output_size", "scale_factor"
)  # fmt: skip
#: Arguments one looks for in a picture, the most telling first.
_TELLING: Final = (
    *_SPATIAL, "groups", "num_groups", "equation", "dim", "dim0", "dim1", "is_causal", "alpha", "approximate",
    "split_size", "chunks", "k", "negative_slope", "diagonal", "reduction", "exponent",
)  # fmt: skip
#: What they mostly are, where the op is not in the table of signatures.
_USUAL: Final = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1, "alpha": 1}


def hyperparameters(node: Node) -> str:
    """What an op was told, where it is not what it does anyway: ``stride=2 padding=3``.

    >>> hyperparameters(Node(0, "c", "conv2d", args={"stride": (2, 2), "padding": (3, 3), "groups": 1}))
    'stride=2 padding=3'
    """
    known = _USUAL | dict(signature(word(node.op, "aten")))
    texts: list[str] = []
    for key in _TELLING:
        value = node.args.get(key)
        if value is None or value in ([], ()) or isinstance(value, Ref):
            continue
        if isinstance(value, list | tuple) and value and all(part == value[0] for part in value[1:]):
            value = value[0] if key in _SPATIAL else value
        if value == known.get(key, REQUIRED):
            continue
        text = f"{key}={constant_text(value)}"
        if len(text) + sum(map(len, texts)) <= _MOST_TEXT:
            texts.append(text)
    return " ".join(texts)
