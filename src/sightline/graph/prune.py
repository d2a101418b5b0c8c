"""`prune` leaves out nodes and connects their neighbours with each other.

"views"        view, reshape, transpose, expand …: readers of the view read its base instead
"parameters"   parameters and buffers; the argument keeps their name and shape as text
"constants"    constants, likewise
"leaves"       unused results, and the nodes computed only for them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from sightline.argument_checks import argument_text
from sightline.data.forms import Symbol
from sightline.data.op_groups import WHOLE_VIEWS
from sightline.errors import UsageError
from sightline.graph.graph import Edge, Graph, Node, Ref, replace_refs
from sightline.graph.node_names import base_name
from sightline.patterns import choices_text

PRUNABLE: Final = ("views", "parameters", "constants", "leaves")
#: Ops that return the same elements in another shape, type or order.
VIEWS: Final = WHOLE_VIEWS | frozenset(
    """view_as reshape_as swapaxes swapdims moveaxis expand_as broadcast_to flatten unflatten T mT H adjoint
    ravel contiguous clone to as_strided lift_fresh _to_copy type_as view_as_real view_as_complex""".split()
)


def prune(graph: Graph, what: Iterable[str | Iterable[str]]) -> Graph:
    """The graph without these kinds of nodes.

    >>> x, v = Node(0, "x", "x", "input"), Node(1, "view", "view", args={"self": Ref("x")})
    >>> y = Node(2, "relu", "relu", args={"self": Ref("view")})
    >>> pruned = prune(Graph((x, v, y), (Edge(0, 1, 0, "self"), Edge(1, 2, 0, "self"))), ["views"])
    >>> [(node.name, node.args) for node in pruned]
    [('x', {}), ('relu', {'self': x})]
    """
    for item in what:
        if not isinstance(item, str | list | tuple | set | frozenset):
            raise UsageError(
                f"prune={argument_text(item)} cannot be left out; choose from {choices_text(PRUNABLE)}."
            )
    kinds = {each for item in what for each in ((item,) if isinstance(item, str) else item)}
    unknown = sorted(map(argument_text, kinds.difference(PRUNABLE)))
    if unknown:
        raise UsageError(f"prune={unknown[0]} cannot be left out; choose from {choices_text(PRUNABLE)}.")
    if "views" in kinds:
        graph = _without_views(graph)
    node_kinds = {"parameters": ("parameter", "buffer"), "constants": ("constant",)}
    removed = [kind for name in node_kinds if name in kinds for kind in node_kinds[name]]
    if removed:
        graph = _without_sources(graph, removed)
    return _without_leaves(graph) if "leaves" in kinds else graph


def is_view(node: Node) -> bool:
    """Whether a node only returns the elements of its input."""
    return node.kind == "call" and base_name(node.op, "aten") in VIEWS and not node.info.get("mutates")


def _without_views(graph: Graph) -> Graph:
    """The readers of each view read its input instead, through loop edges as well."""
    views: dict[int, Edge] = {}
    for node in graph.topological():
        edges = graph.incoming(node)
        # A view of a value that comes around a loop has two inputs, so it stays.
        if is_view(node) and len({(edge.source, edge.slot) for edge in edges}) == 1 and not edges[0].loop:
            views[node.id] = edges[0]
    if not views:
        return graph

    def base_of(id: int, slot: int) -> tuple[int, int]:
        while id in views:
            id, slot = views[id].source, views[id].slot
        return id, slot

    edges_left: list[Edge] = []
    for edge in graph.edges:
        if edge.target not in views:
            source, slot = base_of(edge.source, edge.slot)
            edges_left.append(edge if source == edge.source else replace(edge, source=source, slot=slot))

    def change(ref: Ref) -> Ref:
        source = graph.by_name[ref.node].id
        if source not in views:
            return ref
        id, slot = base_of(source, ref.slot)
        return Ref(graph.by_id[id].name, slot)

    nodes = tuple(replace_refs(node, change) for node in graph.nodes if node.id not in views)
    return replace(graph, nodes=nodes, edges=tuple(edges_left))


def _without_sources(graph: Graph, kinds: list[str]) -> Graph:
    """Readers of a parameter or constant have its name and shape as text instead."""
    removed = {node.name: node for node in graph.nodes if node.kind in kinds}
    if not removed:
        return graph
    ids = {node.id for node in removed.values()}

    def change(ref: Ref) -> Any:
        node = removed.get(ref.node)
        if node is None:
            return ref
        shape = f" {node.outputs[ref.slot]}" if ref.slot < len(node.outputs) else ""
        return Symbol(f"{node.op}{shape}")

    nodes = tuple(replace_refs(node, change) for node in graph.nodes if node.name not in removed)
    return replace(graph, nodes=nodes, edges=tuple(edge for edge in graph.edges if edge.source not in ids))


def _without_leaves(graph: Graph) -> Graph:
    """The nodes that an output was computed from; the whole graph where there is no output."""
    keep = {node.id for node in graph.nodes if node.kind == "output"}
    if not keep:
        return graph
    sources: dict[int, list[int]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    pending = list(keep)
    while pending:
        for source in sources.get(pending.pop(), ()):
            if source not in keep:
                keep.add(source)
                pending.append(source)
    # The node that raised is often why someone looks at the graph.
    for node in graph.nodes:
        if node.info.get("raised"):
            keep.add(node.id)
    nodes = tuple(node for node in graph.nodes if node.id in keep)
    edges = tuple(edge for edge in graph.edges if edge.source in keep and edge.target in keep)
    return replace(graph, nodes=nodes, edges=edges)
