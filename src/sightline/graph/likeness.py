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
from sightline.trace.forms import Elided, Record, Symbol

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_DIGITS = re.compile(r"\d+")
_ATOMS: Final = frozenset({type(None), bool, str})
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
    return likeness(node)[0]


def likeness(node: Node) -> tuple[Hashable, Hashable]:
    """Two keys: the strict one, and the loose one: equal for the same line of the same module."""
    columns = node.info.get("columns")
    # Without columns two readings on one line look like two rounds: ``q, k = x[0], x[1]``.
    index = columns is not None and word(node.op, "aten") in _INDEXING
    sizes = columns is None and "collapsed" not in node.info
    place = (node.op, node.target, node.kind, node.phase, node.source, tuple(columns or ()), node.repeat)
    exact = _frozen(node.args, numbers=not index)
    loose = exact if sizes is not index else _frozen(node.args, numbers=sizes)
    shapes = tuple([(meta.shape, meta.dtype, meta.device) for meta in node.outputs])
    ranks = tuple([(len(meta.shape), meta.dtype, meta.device) for meta in node.outputs])
    return (
        (place, masked(node.module), exact, shapes, node.info.get("likeness")),
        (place, node.module, loose, ranks),
    )


def source_key(node: Node) -> Hashable:
    """Equal for parameters, inputs and constants that play the same part in two layers."""
    name = masked(node.op) if node.kind in ("parameter", "buffer") else ""
    return node.kind, name, tuple([(meta.shape, meta.dtype, meta.device) for meta in node.outputs])


def _frozen(item: Any, *, numbers: bool) -> Hashable:
    """Arguments as something hashable; which tensor is meant is compared by the wiring, not here."""
    kind = type(item)
    if kind is Ref:
        return Ref
    if kind in _ATOMS:
        return item  # type: ignore[no-any-return]  # None, a bool or a text
    if kind is int:
        return (int, item if numbers else "#")  # 1, 1.0 and True are told apart
    if kind is dict:
        return (dict, *[(key, _frozen(part, numbers=numbers)) for key, part in item.items()])
    if kind is list or kind is tuple:
        return (kind, *[_frozen(part, numbers=numbers) for part in item])
    if kind is float:
        return (float, item)
    if kind is Symbol:
        # A parameter that was pruned is a text with its path in it.
        return (Symbol, masked(item.text) if numbers else _DIGITS.sub("#", item.text))
    if kind is Record:
        return (Record, item.type, _frozen(item.fields, numbers=numbers))
    if kind is Elided:
        return (Elided, item.count)
    return (kind.__name__, repr(item))
