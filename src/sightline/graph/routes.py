"""Ways through a graph: what a node was made from, what was made from it, the shortest way between two.

The algorithms are networkx'; here is only what translates to it and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sightline.analysis.select import listed, nearest
from sightline.errors import InvalidGraph, NothingMatched, UsageError
from sightline.graph.graph import NODE_KINDS, Graph, Node
from sightline.patterns import PathPattern, op_matches, segments_of

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
            raise UsageError(f"kind={kind!r} is no kind of node; choose {listed(NODE_KINDS)}.")
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
        raise NothingMatched(f"op={op!r} matches no node of this graph{nearest(op, known)}")
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
        raise NothingMatched(f"module={pattern!r} matches no module of this graph{nearest(pattern, paths)}")
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
