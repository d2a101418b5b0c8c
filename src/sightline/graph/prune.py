"""Graphs without what one does not want to see: `prune` leaves out nodes and keeps what they connected.

"views"        view, reshape, transpose, expand …: who read the view reads what it is a view of
"parameters"   parameters and buffers; the argument keeps their name and shape as text
"constants"    constants, likewise
"leaves"       results nobody uses, and what was computed only for them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from sightline.argument_checks import argument_text
from sightline.errors import UsageError
from sightline.graph.graph import Edge, Graph, Node, Ref, with_args
from sightline.graph.node_names import word
from sightline.patterns import choices_text
from sightline.trace.forms import Symbol
from sightline.trace.op_groups import WHOLE_VIEWS

PRUNABLE: Final = ("views", "parameters", "constants", "leaves")
#: Ops that only look at the same elements in another way, and the ones that hand back what they are given.
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
                f"prune={argument_text(item)} is nothing to leave out; choose from {choices_text(PRUNABLE)}."
            )
    wanted = {each for item in what for each in ((item,) if isinstance(item, str) else item)}
    unknown = sorted(map(argument_text, wanted.difference(PRUNABLE)))
    if unknown:
        raise UsageError(f"prune={unknown[0]} is nothing to leave out; choose from {choices_text(PRUNABLE)}.")
    if "views" in wanted:
        graph = _without_views(graph)
    kinds = {"parameters": ("parameter", "buffer"), "constants": ("constant",)}
    gone = [kind for name, several in kinds.items() if name in wanted for kind in several]
    if gone:
        graph = _without_kinds(graph, gone)
    return _without_leaves(graph) if "leaves" in wanted else graph


def is_view(node: Node) -> bool:
    """Whether a node only passes elements on."""
    return node.kind == "call" and word(node.op, "aten") in VIEWS and not node.info.get("mutates")


def _without_views(graph: Graph) -> Graph:
    """Each view's readers read its first tensor instead; loop edges pass through as well."""
    through: dict[int, Edge] = {}
    for node in graph.topological():
        edges = graph.incoming(node)
        # A view of a value that comes around a loop is a view of two things: it has to stay.
        if is_view(node) and len({(edge.source, edge.slot) for edge in edges}) == 1 and not edges[0].loop:
            through[node.id] = edges[0]
    if not through:
        return graph

    def origin(id: int, slot: int) -> tuple[int, int]:
        while id in through:
            id, slot = through[id].source, through[id].slot
        return id, slot

    rest: list[Edge] = []
    for edge in graph.edges:
        if edge.target not in through:
            source, slot = origin(edge.source, edge.slot)
            rest.append(edge if source == edge.source else replace(edge, source=source, slot=slot))

    def change(ref: Ref) -> Ref:
        source = graph.by_name[ref.node].id
        if source not in through:
            return ref
        id, slot = origin(source, ref.slot)
        return Ref(graph.by_id[id].name, slot)

    nodes = tuple(with_args(node, change) for node in graph.nodes if node.id not in through)
    return replace(graph, nodes=nodes, edges=tuple(rest))


def _without_kinds(graph: Graph, kinds: list[str]) -> Graph:
    gone = {node.name: node for node in graph.nodes if node.kind in kinds}
    if not gone:
        return graph
    ids = {node.id for node in gone.values()}

    def change(ref: Ref) -> Any:
        node = gone.get(ref.node)
        if node is None:
            return ref
        shape = f" {node.outputs[ref.slot]}" if ref.slot < len(node.outputs) else ""
        return Symbol(f"{node.op}{shape}")

    nodes = tuple(with_args(node, change) for node in graph.nodes if node.name not in gone)
    return replace(graph, nodes=nodes, edges=tuple(edge for edge in graph.edges if edge.source not in ids))


def _without_leaves(graph: Graph) -> Graph:
    """Only what an output was made from; the whole graph where there is no output to go by."""
    keep = {node.id for node in graph.nodes if node.kind == "output"}
    if not keep:
        return graph
    sources: dict[int, list[int]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    todo = list(keep)
    while todo:
        for source in sources.get(todo.pop(), ()):
            if source not in keep:
                keep.add(source)
                todo.append(source)
    # What raised is why many look at a graph at all.
    for node in graph.nodes:
        if node.info.get("raised"):
            keep.add(node.id)
    nodes = tuple(node for node in graph.nodes if node.id in keep)
    edges = tuple(edge for edge in graph.edges if edge.source in keep and edge.target in keep)
    return replace(graph, nodes=nodes, edges=edges)
