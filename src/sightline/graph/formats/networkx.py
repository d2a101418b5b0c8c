"""A graph for networkx: keyed by node name, with attributes that any of its writers can write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sightline.graph.formats.json import encode
from sightline.graph.graph import Graph

if TYPE_CHECKING:
    import networkx as nx


def to_networkx(graph: Graph) -> nx.MultiDiGraph:
    """The graph as a `networkx.MultiDiGraph`.

    >>> from sightline.graph.graph import Node
    >>> converted = to_networkx(Graph((Node(0, "x", "x", "input"),), (), "net"))
    >>> converted.nodes["x"]["kind"], converted.graph["name"]
    ('input', 'net')
    """
    import networkx as nx

    converted = nx.MultiDiGraph(name=graph.name, modules=dict(graph.modules))
    for node in graph.topological():
        converted.add_node(
            node.name, id=node.id, op=node.op, kind=node.kind, args=encode(node.args), module=node.module,
            source=node.source, outputs=[str(meta) for meta in node.outputs], repeat=node.repeat,
            phase=node.phase, target=node.target, info=encode(node.info),
        )  # fmt: skip
    names = {node.id: node.name for node in graph.nodes}
    for edge in graph.edges:
        converted.add_edge(
            names[edge.source], names[edge.target], slot=edge.slot, argument=edge.argument,
            shape=str(edge.meta) if edge.meta is not None else "", repeat=edge.repeat, loop=edge.loop,
        )  # fmt: skip
    return converted
