"""The inverse of a fold, to check that nothing is lost in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from sightline.analysis.fold import Node, Repeat

K = TypeVar("K", bound=Hashable)


def unfold(nodes: Sequence[Node], keys: Sequence[K]) -> list[K]:
    """The sequence a fold stands for: ``unfold(fold(keys), keys) == list(keys)``."""
    sequence: list[K] = []
    for node in nodes:
        if isinstance(node, Repeat):
            sequence += unfold(node.body, keys) * node.count
        else:
            sequence.append(keys[node])
    return sequence
