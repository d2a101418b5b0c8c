"""Ops that ran under `torch.no_grad` or `autocast`, taken out of the box torch.export puts them in.

torch.export packs such a stretch into one node that calls a graph of its own: a model whose ``forward`` is
decorated with ``@torch.no_grad()`` would be a single node. Here its ops stand among the others again, each
with the modes it runs in. Branches and loops (`torch.cond`, `while_loop`) stay nodes: which of their ops run
is not known before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

Mode = Callable[[], AbstractContextManager[Any]]

#: Under these a node's meta holds the modes it runs in, and the object a ``get_attr`` means.
MODES: Final = "sightline_modes"
OBJECT: Final = "sightline_object"

#: The boxes, and how many of their arguments come before the graph.
_BOXES: Final = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def flattened(program: torch.export.ExportedProgram) -> FxGraph:
    """The graph of a program without such boxes: its own where it has none."""
    module = program.graph_module
    if not any(_is_box(node) for node in module.graph.nodes):
        own: FxGraph = module.graph
        return own
    flat = _Flat(module)
    flat.copy(module, {}, (), top=True)
    return flat.graph


def _is_box(node: FxNode) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") not in _BOXES:
        return False
    # Nothing but the pieces of a box is ever asked for; were it otherwise, it would stay a node.
    return all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)


def _mode(node: FxNode) -> Mode:
    settings: Any = node.args[: _BOXES[node.target.__name__]]  # type: ignore[union-attr]
    if len(settings) == 1:
        return partial(torch.set_grad_enabled, settings[0])
    device, dtype, enabled, cache = settings
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=cache)


class _Flat:
    """A new graph, filled from the nested ones."""

    def __init__(self, module: GraphModule) -> None:
        self.graph = FxGraph()
        self._taken = {node.name for node in module.graph.nodes if not _vanishes(node)}

    def copy(
        self, module: GraphModule, known: dict[FxNode, Any], modes: tuple[Mode, ...], *, top: bool
    ) -> tuple[Any, ...]:
        """Copy the nodes of one graph; its results. ``known``: what its nodes are in the new graph."""
        pieces: dict[FxNode, tuple[Any, ...]] = {}
        for node in module.graph.nodes:
            if _is_box(node):
                before = _BOXES[node.target.__name__]
                box = operator.attrgetter(str(node.args[before].target))(module)
                given = [known[one] if isinstance(one, FxNode) else one for one in node.args[before + 1 :]]
                inner = dict(zip(box.graph.find_nodes(op="placeholder"), given, strict=True))
                pieces[node] = self.copy(box, inner, (*modes, _mode(node)), top=False)
            elif _vanishes(node):
                if node.target is operator.getitem:
                    known[node] = pieces[node.args[0]][node.args[1]]
            elif node.op == "output" and not top:
                return tuple(map_arg(node.args[0], lambda one: known[one]))
            elif node not in known:
                known[node] = self._copied(module, node, known, modes, top)
        return ()

    def _copied(
        self, module: GraphModule, node: FxNode, known: dict[FxNode, Any], modes: tuple[Mode, ...], top: bool
    ) -> FxNode:
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: known[one])
        made = self.graph.create_node(node.op, node.target, args, kwargs)
        made.name = node.name if top else self._free(node.name)
        made.meta = {**node.meta, MODES: modes}
        if node.op == "get_attr":
            made.meta[OBJECT] = operator.attrgetter(str(node.target))(module)
        return made

    def _free(self, name: str) -> str:
        """The name, or the first numbered one that nothing at the top has."""
        free, number = name, 0
        while free in self._taken:
            number += 1
            free = f"{name}_{number}"
        self._taken.add(free)
        return free


def _vanishes(node: FxNode) -> bool:
    """Whether only a box needs it: the box, its graph, its pieces."""
    if _is_box(node):
        return True
    if node.target is operator.getitem:
        return isinstance(node.args[0], FxNode) and _is_box(node.args[0])
    return node.op == "get_attr" and bool(node.users) and all(map(_is_box, node.users))
