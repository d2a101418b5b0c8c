"""Queries on a graph: topological order, ancestors, descendants, shortest path, matching nodes, subgraph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from sightline.data.trace_data import TensorMeta
from sightline.errors import InvalidGraph, NothingMatched, UsageError
from sightline.graph.graph import NODE_KINDS, Edge, Graph, Node, Ref, replace_refs
from sightline.graph.node_names import UniqueNames
from sightline.hints import Hint
from sightline.patterns import PathPattern, choices_text, did_you_mean, op_matches, segments_of

if TYPE_CHECKING:
    import networkx as nx


def topological(graph: Graph) -> tuple[Node, ...]:
    """The nodes, each after its sources; as stored where they are in such an order already."""
    position = {node.id: at for at, node in enumerate(graph.nodes)}
    if all(edge.loop or position[edge.source] < position[edge.target] for edge in graph.edges):
        return graph.nodes
    import networkx as nx

    try:
        plain = _digraph(graph, loops=False)
        order = list(nx.lexicographical_topological_sort(plain, key=position.__getitem__))
    except nx.NetworkXUnfeasible:
        raise InvalidGraph("The graph has a cycle that is not marked as a loop; lint() names it.") from None
    return tuple(graph.by_id[id] for id in order)


def ancestors(graph: Graph, node: Node) -> tuple[Node, ...]:
    """Everything a node was computed from, in the graph's order."""
    import networkx as nx

    return _ordered_nodes(graph, nx.ancestors(_digraph(graph), node.id))


def descendants(graph: Graph, node: Node) -> tuple[Node, ...]:
    """Everything computed from a node, in the graph's order."""
    import networkx as nx

    return _ordered_nodes(graph, nx.descendants(_digraph(graph), node.id))


def shortest(graph: Graph, start: Node, end: Node) -> tuple[Node, ...]:
    """The nodes on the shortest path from one to another; `NothingMatched` where there is none."""
    import networkx as nx

    try:
        path = nx.shortest_path(_digraph(graph), start.id, end.id)
    except nx.NetworkXNoPath:
        raise NothingMatched(f"Nothing flows from {start.name!r} to {end.name!r} in this graph.") from None
    return tuple(graph.by_id[id] for id in path)


def select_nodes(graph: Graph, module: str | None, op: str | None, kind: str | None) -> tuple[Node, ...]:
    """The nodes that match every glob; a glob that matches nothing is an error."""
    tests: list[Callable[[Node], bool]] = []
    if kind is not None:
        if kind not in NODE_KINDS:
            raise UsageError(
                f"{Hint.option('kind', kind)} is no kind of node; choose {choices_text(NODE_KINDS)}."
            )
        tests.append(lambda node: node.kind == kind)
    if module is not None:
        paths = matching_modules(graph, module)
        tests.append(lambda node: node.module in paths)
    if op is not None:
        pattern = op
        tests.append(
            lambda node: any(
                op_matches(pattern, text, level)
                for text in (node.op, node.target)
                if text
                for level in ("api", "aten")
            )
        )
    nodes = tuple(node for node in graph.nodes if all(test(node) for test in tests))
    if op is not None and not nodes:
        names = dict.fromkeys(node.op for node in graph.nodes if node.kind == "call")
        raise NothingMatched(
            f"{Hint.option('op', op)} matches no node of this graph{did_you_mean(op, names)}"
        )
    return nodes


def matching_modules(graph: Graph, pattern: str) -> set[str]:
    """The module paths that match a glob, with those inside them."""
    glob = PathPattern(pattern)
    paths = dict.fromkeys([*graph.modules, *(node.module for node in graph.nodes)])
    matches = {
        path for path in paths if glob(segments_of(path)) or (not path and pattern == graph.modules.get(""))
    }
    if not matches:
        raise NothingMatched(
            f"{Hint.option('module', pattern)} matches no module of this graph{did_you_mean(pattern, paths)}"
        )
    return matches


def _digraph(graph: Graph, *, loops: bool = True) -> nx.DiGraph:
    import networkx as nx

    digraph = nx.DiGraph()
    digraph.add_nodes_from(node.id for node in graph.nodes)
    digraph.add_edges_from((edge.source, edge.target) for edge in graph.edges if loops or not edge.loop)
    return digraph


def _ordered_nodes(graph: Graph, ids: set[int]) -> tuple[Node, ...]:
    return tuple(node for node in graph.topological() if node.id in ids)


_SOURCES = ("parameter", "buffer", "constant", "input")


def subgraph(graph: Graph, module: str) -> Graph:
    """The part of a graph that ran in the modules that match a glob.

    >>> x, y = Node(0, "x", "x", "input"), Node(1, "mm", "mm", args={"self": Ref("x")}, module="fc")
    >>> z = Node(2, "relu", "relu", args={"self": Ref("mm")})
    >>> edges = (Edge(0, 1, 0, "self"), Edge(1, 2, 0, "self"))
    >>> g = Graph((x, y, z), edges, modules={"": "Net", "fc": "Linear"})
    >>> [(node.name, node.kind) for node in subgraph(g, "fc")]
    [('x', 'input'), ('mm', 'call'), ('output', 'output')]
    """
    matches = matching_modules(graph, module)
    inside = {node.id for node in graph.nodes if node.kind == "call" and node.module in matches}
    read = {edge.source for edge in graph.edges if edge.target in inside}
    keep = inside | {node.id for node in graph.nodes if node.id in read and node.kind in _SOURCES}
    names = UniqueNames()
    for node in graph.nodes:
        if node.id in keep:
            names.new(node.name)
    ids = count(max(graph.by_id, default=0) + 1)
    entering, leaving = _BoundaryNodes(graph, names, ids), _BoundaryNodes(graph, names, ids)
    edges: list[Edge] = []
    for edge in graph.edges:
        if edge.target in inside:
            source = edge.source if edge.source in keep else entering.node(edge)
            edges.append(edge if source == edge.source else replace(edge, source=source, slot=0))
        elif edge.source in inside:
            leaving.node(edge)
    outputs: list[Node] = []
    for (source, slot), id in leaving.ids.items():
        producer = graph.by_id[source]
        args, repeat = {"result": Ref(producer.name, slot)}, producer.repeat
        name = names.new("output")
        outputs.append(Node(id, name, "output", "output", args, repeat=repeat, phase=producer.phase))
        edges.append(Edge(source, id, slot, "result", _meta(graph, source, slot), repeat))

    def change(ref: Ref) -> Ref:
        key = (graph.by_name[ref.node].id, ref.slot)
        return Ref(entering.names[key]) if key in entering.ids else ref

    kept = (replace_refs(node, change) for node in graph.topological() if node.id in keep)
    modules = {path: type for path, type in graph.modules.items() if path in matches}
    nodes = (*entering.inputs(), *kept, *outputs)
    return replace(graph, nodes=nodes, edges=tuple(edges), modules=modules)


class _BoundaryNodes:
    """New nodes at the boundary of a subgraph, one for each tensor that crosses it."""

    def __init__(self, graph: Graph, names: UniqueNames, ids: Iterator[int]) -> None:
        self._graph, self._names, self._new_ids = graph, names, ids
        self.ids: dict[tuple[int, int], int] = {}
        self.names: dict[tuple[int, int], str] = {}

    def node(self, edge: Edge) -> int:
        """The id of the new node for the tensor that an edge carries."""
        key = (edge.source, edge.slot)
        if key not in self.ids:
            self.ids[key] = next(self._new_ids)
            self.names[key] = self._names.new(self._graph.by_id[key[0]].name)
        return self.ids[key]

    def inputs(self) -> list[Node]:
        nodes = []
        for key, id in self.ids.items():
            outside, meta = self._graph.by_id[key[0]], _meta(self._graph, *key)
            nodes.append(
                Node(id, self.names[key], outside.op, "input", module=outside.module, source=outside.source,
                     outputs=(meta,) if meta else (), repeat=outside.repeat, phase=outside.phase)
            )  # fmt: skip
        return nodes


def _meta(graph: Graph, id: int, slot: int) -> TensorMeta | None:
    outputs = graph.by_id[id].outputs
    return outputs[slot] if slot < len(outputs) else None
