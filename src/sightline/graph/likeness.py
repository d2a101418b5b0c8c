"""When two nodes look alike: equal up to layer number, or equal up to sizes as in two rounds of one loop.

``strict``: the same op on the same line with the same arguments and the same shapes, in modules whose paths
differ in numbers only. ``loose``: in one and the same module, where sizes and other whole numbers may differ
(a cache that grows). Keys are plain values to compare, never hashes, so nothing is merged by accident.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, Final

from sightline.graph.graph import Node, Ref
from sightline.graph.naming import word
from sightline.trace.data import TensorMeta
from sightline.trace.forms import Elided, Record, Symbol

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_DIGITS = re.compile(r"\d+")
#: They are given the round of a loop as a number: ``x[:, t]``.
_INDEXING: Final = frozenset({"getitem", "setitem", "select", "slice", "narrow"})


@lru_cache(maxsize=65536)
def masked(path: str) -> str:
    """A module path without its numbers.

    >>> masked("blocks.11.attn"), masked("fc1.weight")
    ('blocks.#.attn', 'fc1.weight')
    """
    return _NUMBER.sub("#", path)


def strict(node: Node) -> Hashable:
    """Equal for nodes of layers that differ in their number only."""
    columns = node.info.get("columns")
    # Without columns two readings on one line look like two rounds: ``q, k = x[0], x[1]``.
    index = columns is not None and word(node.op, "aten") in _INDEXING
    return (
        node.op, node.target, node.kind, node.phase, node.source, tuple(columns or ()), masked(node.module),
        _frozen(node.args, numbers=not index), tuple([_shape(meta) for meta in node.outputs]),
        node.info.get("likeness"), node.repeat,
    )  # fmt: skip


def loose(node: Node) -> Hashable:
    """Equal for nodes that are the same line of the same module, whatever the sizes."""
    columns = node.info.get("columns")
    return (
        node.op, node.target, node.kind, node.phase, node.source, tuple(columns or ()), node.module,
        _frozen(node.args, numbers=columns is None and "collapsed" not in node.info),
        tuple([_rank(meta) for meta in node.outputs]), node.repeat,
    )  # fmt: skip


def source_key(node: Node) -> Hashable:
    """Equal for parameters, inputs and constants that play the same part in two layers."""
    name = masked(node.op) if node.kind in ("parameter", "buffer") else ""
    return node.kind, name, tuple([_shape(meta) for meta in node.outputs])


def _shape(meta: TensorMeta) -> Hashable:
    return meta.shape, meta.dtype, meta.device


def _rank(meta: TensorMeta) -> Hashable:
    return len(meta.shape), meta.dtype, meta.device


def _frozen(item: Any, *, numbers: bool) -> Hashable:
    """Arguments as something hashable; which tensor is meant is compared by the wiring, not here."""
    if item is None or isinstance(item, bool | str):
        return item
    if isinstance(item, Ref):
        return Ref
    if isinstance(item, int | float):
        return (type(item), item if numbers or isinstance(item, float) else "#")
    if isinstance(item, dict):
        return (dict, *[(key, _frozen(part, numbers=numbers)) for key, part in item.items()])
    if isinstance(item, list | tuple):
        return (type(item), *[_frozen(part, numbers=numbers) for part in item])
    if isinstance(item, Symbol):
        # A parameter that was pruned is a text with its path in it.
        return (Symbol, masked(item.text) if numbers else _DIGITS.sub("#", item.text))
    if isinstance(item, Record):
        return (Record, item.type, _frozen(item.fields, numbers=numbers))
    if isinstance(item, Elided):
        return (Elided, item.count)
    return (type(item).__name__, repr(item))
