"""New graphs out of old ones: what every operation on a graph does to the arguments of the nodes it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sightline.graph.graph import Node, Ref
from sightline.trace.forms import Record


def rewired(args: dict[str, Any], change: Callable[[Ref], Any]) -> dict[str, Any]:
    """The arguments with every `Ref` replaced by what ``change`` makes of it.

    >>> rewired({"tensors": [Ref("a"), Ref("b", 1)], "dim": 0}, lambda ref: ref.node)
    {'tensors': ['a', 'b'], 'dim': 0}
    """
    return {key: _changed(item, change) for key, item in args.items()}


def with_args(node: Node, change: Callable[[Ref], Any]) -> Node:
    """The node with its tensor arguments changed; itself where nothing is different."""
    args = rewired(node.args, change)
    return node if args == node.args else replace(node, args=args)


def _changed(item: Any, change: Callable[[Ref], Any]) -> Any:
    if isinstance(item, Ref):
        return change(item)
    if isinstance(item, dict):
        return {key: _changed(part, change) for key, part in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_changed(part, change) for part in item)
    if isinstance(item, Record):
        return Record(item.type, {key: _changed(part, change) for key, part in item.fields.items()})
    return item
