"""A part of a graph as a graph: what comes in from outside becomes inputs, what goes out becomes outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from sightline.graph.graph import Edge, Graph, Node, Ref
from sightline.graph.naming import Names
from sightline.graph.rewiring import with_args
from sightline.graph.routes import modules_meant
from sightline.trace.data import TensorMeta

_SOURCES = ("parameter", "buffer", "constant", "input")


def subgraph(graph: Graph, module: str) -> Graph:
    """What ran in the modules that a glob means.

    >>> x, y = Node(0, "x", "x", "input"), Node(1, "mm", "mm", args={"self": Ref("x")}, module="fc")
    >>> z = Node(2, "relu", "relu", args={"self": Ref("mm")})
    >>> edges = (Edge(0, 1, 0, "self"), Edge(1, 2, 0, "self"))
    >>> g = Graph((x, y, z), edges, modules={"": "Net", "fc": "Linear"})
    >>> [(node.name, node.kind) for node in subgraph(g, "fc")]
    [('x', 'input'), ('mm', 'call'), ('output', 'output')]
    """
    meant = modules_meant(graph, module)
    inside = {node.id for node in graph.nodes if node.kind == "call" and node.module in meant}
    read = {edge.source for edge in graph.edges if edge.target in inside}
    keep = inside | {node.id for node in graph.nodes if node.id in read and node.kind in _SOURCES}
    names = Names()
    for node in graph.nodes:
        if node.id in keep:
            names.new(node.name)
    ids = count(max(graph.by_id, default=0) + 1)
    entering, leaving = _Borders(graph, names, ids), _Borders(graph, names, ids)
    edges: list[Edge] = []
    for edge in graph.edges:
        if edge.target in inside:
            source = edge.source if edge.source in keep else entering.node(edge)
            edges.append(edge if source == edge.source else replace(edge, source=source, slot=0))
        elif edge.source in inside:
            leaving.node(edge)
    ends = tuple(_output(graph, key, id, names) for key, id in leaving.ids.items())
    edges += [
        Edge(key[0], id, key[1], "result", _meta(graph, *key), graph.by_id[key[0]].repeat)
        for key, id in leaving.ids.items()
    ]

    def change(ref: Ref) -> Ref:
        key = (graph.by_name[ref.node].id, ref.slot)
        return Ref(entering.names[key]) if key in entering.ids else ref

    kept = (with_args(node, change) for node in graph.topological() if node.id in keep)
    modules = {path: type for path, type in graph.modules.items() if path in meant}
    nodes = (*entering.inputs(), *kept, *ends)
    return replace(graph, nodes=nodes, edges=tuple(edges), modules=modules)


class _Borders:
    """New nodes at the border, one for each tensor that crosses it."""

    def __init__(self, graph: Graph, names: Names, ids: Iterator[int]) -> None:
        self._graph, self._names, self._new_ids = graph, names, ids
        self.ids: dict[tuple[int, int], int] = {}
        self.names: dict[tuple[int, int], str] = {}

    def node(self, edge: Edge) -> int:
        """The id of what stands for a tensor on the other side."""
        key = (edge.source, edge.slot)
        if key not in self.ids:
            self.ids[key] = next(self._new_ids)
            self.names[key] = self._names.new(self._graph.by_id[key[0]].name)
        return self.ids[key]

    def inputs(self) -> list[Node]:
        made = []
        for key, id in self.ids.items():
            outside, meta = self._graph.by_id[key[0]], _meta(self._graph, *key)
            made.append(
                Node(id, self.names[key], outside.op, "input", module=outside.module, source=outside.source,
                     outputs=(meta,) if meta else (), repeat=outside.repeat, phase=outside.phase)
            )  # fmt: skip
        return made


def _output(graph: Graph, key: tuple[int, int], id: int, names: Names) -> Node:
    inside = graph.by_id[key[0]]
    args = {"result": Ref(inside.name, key[1])}
    return Node(id, names.new("output"), "output", "output", args, repeat=inside.repeat, phase=inside.phase)


def _meta(graph: Graph, id: int, slot: int) -> TensorMeta | None:
    outputs = graph.by_id[id].outputs
    return outputs[slot] if slot < len(outputs) else None
