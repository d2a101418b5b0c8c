"""Questions to a graph: ancestors, descendants, the shortest path, and a part of it as a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from sightline.errors import InvalidGraph, NothingMatched, UsageError
from sightline.graph.graph import NODE_KINDS, Edge, Graph, Node, Ref, with_args
from sightline.graph.node_names import Names
from sightline.patterns import PathPattern, choices_text, did_you_mean, op_matches, segments_of
from sightline.trace.data import TensorMeta

if TYPE_CHECKING:
    import networkx as nx


def topological(graph: Graph) -> tuple[Node, ...]:
    """The nodes, each after its sources; as they are stored where that is so already."""
    place = {node.id: at for at, node in enumerate(graph.nodes)}
    if all(edge.loop or place[edge.source] < place[edge.target] for edge in graph.edges):
        return graph.nodes
    import networkx as nx

    try:
        order = list(nx.lexicographical_topological_sort(_simple(graph, loops=False), key=place.__getitem__))
    except nx.NetworkXUnfeasible:
        raise InvalidGraph("The graph has a cycle that is not marked as a loop; lint() names it.") from None
    return tuple(graph.by_id[id] for id in order)


def ancestors(graph: Graph, node: Node) -> tuple[Node, ...]:
    """Everything a node was made from, in the graph's order."""
    import networkx as nx

    return _picked(graph, nx.ancestors(_simple(graph), node.id))


def descendants(graph: Graph, node: Node) -> tuple[Node, ...]:
    """Everything made from a node, in the graph's order."""
    import networkx as nx

    return _picked(graph, nx.descendants(_simple(graph), node.id))


def shortest(graph: Graph, start: Node, end: Node) -> tuple[Node, ...]:
    """The nodes on the shortest way from one to another; a sentence where there is none."""
    import networkx as nx

    try:
        path = nx.shortest_path(_simple(graph), start.id, end.id)
    except nx.NetworkXNoPath:
        raise NothingMatched(f"Nothing flows from {start.name!r} to {end.name!r} in this graph.") from None
    return tuple(graph.by_id[id] for id in path)


def matching(graph: Graph, module: str | None, op: str | None, kind: str | None) -> tuple[Node, ...]:
    """The nodes that match every glob; one that matches nothing is an error."""
    tests: list[Callable[[Node], bool]] = []
    if kind is not None:
        if kind not in NODE_KINDS:
            raise UsageError(f"kind={kind!r} is no kind of node; choose {choices_text(NODE_KINDS)}.")
        tests.append(lambda node: node.kind == kind)
    if module is not None:
        meant = modules_meant(graph, module)
        tests.append(lambda node: node.module in meant)
    if op is not None:
        wanted = op
        tests.append(lambda node: _is_op(node, wanted))
    found = tuple(node for node in graph.nodes if all(test(node) for test in tests))
    if op is not None and not found:
        known = dict.fromkeys(node.op for node in graph.nodes if node.kind == "call")
        raise NothingMatched(f"op={op!r} matches no node of this graph{did_you_mean(op, known)}")
    return found


def _is_op(node: Node, pattern: str) -> bool:
    texts = [text for text in (node.op, node.target) if text]
    return any(op_matches(pattern, text, level) for text in texts for level in ("api", "aten"))


def modules_meant(graph: Graph, pattern: str) -> set[str]:
    """The module paths that a glob means, with those inside them."""
    pattern_of = PathPattern(pattern)
    paths = dict.fromkeys([*graph.modules, *(node.module for node in graph.nodes)])
    meant = {
        path
        for path in paths
        if pattern_of(segments_of(path)) or (not path and pattern == graph.modules.get(""))
    }
    if not meant:
        raise NothingMatched(
            f"module={pattern!r} matches no module of this graph{did_you_mean(pattern, paths)}"
        )
    return meant


def _simple(graph: Graph, *, loops: bool = True) -> nx.DiGraph:
    import networkx as nx

    made = nx.DiGraph()
    made.add_nodes_from(node.id for node in graph.nodes)
    made.add_edges_from((edge.source, edge.target) for edge in graph.edges if loops or not edge.loop)
    return made


def _picked(graph: Graph, ids: Iterable[int]) -> tuple[Node, ...]:
    wanted = set(ids)
    return tuple(node for node in graph.topological() if node.id in wanted)


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
