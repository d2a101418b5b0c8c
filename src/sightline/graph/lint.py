"""Checks that a graph is consistent: unique names, edges between nodes that exist, no unmarked cycle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sightline.errors import InvalidGraph
from sightline.graph.graph import NODE_KINDS, Graph, Ref, map_refs


def lint(graph: Graph) -> None:
    """Raise `InvalidGraph` for the first contradiction, in one sentence.

    >>> from sightline.graph.graph import Edge, Node
    >>> lint(Graph((Node(0, "x", "x", "input"),), (Edge(0, 7),)))
    Traceback (most recent call last):
    ...
    sightline.errors.InvalidGraph: An edge goes from 'x' to node 7, which does not exist.
    """
    checks = (_node_faults, _edge_faults, _reference_faults)
    fault = next((fault for check in checks for fault in check(graph)), None)
    if fault is not None:
        raise InvalidGraph(fault)


def _node_faults(graph: Graph) -> Iterator[str]:
    names: set[str] = set()
    ids: dict[int, str] = {}
    for node in graph.nodes:
        if node.name in names:
            yield f"Two nodes are named {node.name!r}."
        if node.id in ids:
            yield f"{ids[node.id]!r} and {node.name!r} have the same id, {node.id}."
        if node.kind not in NODE_KINDS:
            yield f"{node.name!r} is of the unknown kind {node.kind!r}."
        if node.repeat < 1:
            yield f"{node.name!r} stands for {node.repeat} nodes."
        names.add(node.name)
        ids[node.id] = node.name


def _edge_faults(graph: Graph) -> Iterator[str]:
    for edge in graph.edges:
        source, target = graph.by_id.get(edge.source), graph.by_id.get(edge.target)
        if source is None or target is None:
            ends = [repr(node.name) if node else f"node {id}, which does not exist"
                    for node, id in ((source, edge.source), (target, edge.target))]  # fmt: skip
            yield f"An edge goes from {ends[0]} to {ends[1]}."
            return
        if target.kind not in ("call", "output"):
            yield f"An edge goes from {source.name!r} into the {target.kind} {target.name!r}."
        if source.kind == "output":
            yield f"An edge goes out of the output {source.name!r}, to {target.name!r}."
        if edge.slot < 0 or (source.outputs and edge.slot >= len(source.outputs)):
            count = f"{len(source.outputs)} output{'s' * (len(source.outputs) != 1)}"
            yield f"{target.name!r} reads output {edge.slot} of {source.name!r}, which has {count}."
    position = {node.id: at for at, node in enumerate(graph.nodes)}
    wrong = [e for e in graph.edges if not e.loop and position[e.source] >= position[e.target]]
    if wrong:
        import networkx as nx

        try:
            cycle = nx.find_cycle(nx.DiGraph([(e.source, e.target) for e in graph.edges if not e.loop]))
        except nx.NetworkXNoCycle:
            source, target = graph.by_id[wrong[0].source], graph.by_id[wrong[0].target]
            yield f"{target.name!r} comes before {source.name!r}, which it reads."
        else:
            names = [graph.by_id[id].name for id, _ in cycle]
            yield f"There is a cycle that is not marked as a loop: {' → '.join([*names, names[0]])}."


def _reference_faults(graph: Graph) -> Iterator[str]:
    edges = {(edge.source, edge.target, edge.slot) for edge in graph.edges}
    for node in graph.nodes:
        for ref in references(node.args):
            source = graph.by_name.get(ref.node)
            if source is None:
                yield f"{node.name!r} has the argument {ref!r}, and no node is named {ref.node!r}."
            elif (source.id, node.id, ref.slot) not in edges:
                yield f"{node.name!r} has the argument {ref!r}, and no edge brings it."


def references(args: dict[str, Any]) -> list[Ref]:
    """Every `Ref` in the arguments of a node, however nested."""
    refs: list[Ref] = []
    map_refs(args, refs.append)
    return refs
