"""Repeats shown once: `fold` merges the rounds of every run that `sightline.graph.repeats` finds.

A merged node has the id, name and arguments of its first round, and its ``repeat`` counts the nodes it stands
for; the repeats add up to the number of nodes before, and likewise for edges. An edge from one round to a
later one is a ``loop``. What each round reads of its own (its parameters) is merged, too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from sightline.graph.graph import Edge, Graph, Node, Ref, gc_paused, map_refs
from sightline.graph.repeats import NodeOrder, RepeatRun
from sightline.notation import tensor_text
from sightline.trace.data import TensorMeta

_DIGITS = re.compile(r"\d+")
_SUMMED = ("duration", "flops", "collapsed", "parameters")


def fold(graph: Graph) -> Graph:
    """The graph with repeated layers and loops shown once.

    >>> x = Node(0, "x", "x", "input")
    >>> ops = [Node(i, f"relu_{i}", "relu", "call", {"self": Ref("x")}, f"acts.{i}") for i in range(1, 5)]
    >>> edges = [Edge(i - 1, i, 0, "self") for i in range(1, 5)]
    >>> folded = fold(Graph((x, *ops), tuple(edges)))
    >>> [(node.name, node.repeat) for node in folded], [(edge.repeat, edge.loop) for edge in folded.edges]
    ([('x', 1), ('relu_1', 4)], [(1, False), (3, True)])
    """
    with gc_paused():
        return _fold(graph)


def _fold(graph: Graph) -> Graph:
    order = NodeOrder(graph)
    runs = order.runs()
    if not runs:
        return graph
    first, rounds = _merge_rounds(len(order.nodes), runs)
    into = {node.id: order.nodes[first[at]].id for at, node in enumerate(order.nodes)}
    into.update(_merge_sources(graph, order, runs))
    members: dict[int, list[Node]] = {}
    for node in graph.nodes:
        members.setdefault(into.get(node.id, node.id), []).append(node)
    name = {node.name: graph.by_id[into.get(node.id, node.id)].name for node in graph.nodes}
    edges, slots = _merge_edges(graph, order, into, members, rounds)
    loops = graph.info.get("loops", {}) | _loops(edges, order, runs, first)
    nodes = tuple(
        _merge_node(node, members[node.id], name, slots) for node in graph.topological() if node.id in members
    )
    folds = dict(graph.info.get("folds", {}))
    for run in runs:
        folds.update({one: [other, run.count] for one, other in run.modules})
    return replace(
        graph,
        nodes=nodes,
        edges=tuple(edge for edge, _ in edges),
        info={**graph.info, "folds": folds, "loops": loops},
    )


def _merge_rounds(count: int, runs: list[RepeatRun]) -> tuple[list[int], list[tuple[tuple[int, int], ...]]]:
    """Each position's counterpart in the first round, and its (run, round) pairs, outermost first."""
    first = list(range(count))
    rounds: list[tuple[tuple[int, int], ...]] = [()] * count
    for number in range(len(runs) - 1, -1, -1):  # inner runs first: the outer ones copy what they found
        run = runs[number]
        body = first[run.start : run.start + run.length]
        inner = rounds[run.start : run.start + run.length]
        for round in range(run.count):
            at = run.start + round * run.length
            first[at : at + run.length] = body
            rounds[at : at + run.length] = [((number, round), *rest) for rest in inner]
    return first, rounds


def _merge_sources(graph: Graph, order: NodeOrder, runs: list[RepeatRun]) -> dict[int, int]:
    """For parameters and inputs that play the same part in all rounds of a run, the first one's id."""
    position = {node.id: at for at, node in enumerate(graph.topological())}
    into: dict[int, int] = {}

    def root(id: int) -> int:
        while into.get(id, id) != id:
            into[id] = into.get(into[id], into[id])
            id = into[id]
        return id

    for run in runs:
        for at in range(run.start + run.length, run.start + run.length * run.count):
            for (source, _, _), (before, _, _) in zip(
                order.reads[at], order.reads[at - run.length], strict=True
            ):
                if source < 0 and before < 0 and source != before:
                    one, other = sorted((root(-1 - source), root(-1 - before)), key=position.__getitem__)
                    into[other] = one
    return {id: root(id) for id in into}


def _merge_edges(
    graph: Graph, order: NodeOrder, into: dict[int, int], members: dict[int, list[Node]],
    rounds: list[tuple[tuple[int, int], ...]],
) -> tuple[list[tuple[Edge, int]], dict[tuple[str, str, int], int]]:  # fmt: skip
    """The merged edges, each with the run it is a loop of (or -1), and the slots that were merged.

    These go from (reader, source, slot) to the slot that stands for it.
    """
    merged: dict[Hashable, list[Any]] = {}
    slots: dict[tuple[str, str, int], int] = {}
    for edge in graph.edges:
        source, target = into.get(edge.source, edge.source), into.get(edge.target, edge.target)
        run = _run_between(rounds, order.position.get(edge.source), order.position.get(edge.target))
        several, readers = len(members[source]) > 1, len(members[target]) > 1
        # One reader may take the results of all rounds, as in ``stack([h0, h1, …])``; and each round may
        # read another output of one source, as in ``x.unbind()``.
        argument = _DIGITS.sub("#", edge.argument) if several and not readers else edge.argument
        slot = -1 if readers and not several else edge.slot
        entry = merged.setdefault((source, target, slot, argument, edge.loop, run), [edge, 0, "", run])
        entry[1] += edge.repeat
        entry[2] = edge.argument
        if entry[0].slot != edge.slot:
            key = (graph.by_id[target].name, graph.by_id[source].name, edge.slot)
            slots[key] = entry[0].slot
    edges = [
        (
            replace(
                edge, source=into.get(edge.source, edge.source), target=into.get(edge.target, edge.target),
                repeat=repeat, loop=edge.loop or run >= 0, argument=_span(edge.argument, last),
            ),
            run,
        )
        for edge, repeat, last, run in merged.values()
    ]  # fmt: skip
    return edges, slots


def loop_key(edge: Edge) -> str:
    """The key of an edge in ``info["loops"]``."""
    return f"{edge.source}>{edge.target}:{edge.slot}:{edge.argument}"


def _loops(
    edges: list[tuple[Edge, int]], order: NodeOrder, runs: list[RepeatRun], first: list[int]
) -> dict[str, list[int]]:
    """The first and the last node of the round that each loop edge goes around."""
    loops: dict[str, list[int]] = {}
    for edge, number in edges:
        if number >= 0:
            run = runs[number]
            last = first[run.start + run.length - 1]
            loops.setdefault(loop_key(edge), [order.nodes[run.start].id, order.nodes[last].id])
    return loops


def _run_between(rounds: list[tuple[tuple[int, int], ...]], source: int | None, target: int | None) -> int:
    """The run in which an edge goes from one round to another; -1 for an edge within a round, or outside."""
    if source is None or target is None:
        return -1
    for (run, round), (other_run, other_round) in zip(rounds[source], rounds[target], strict=False):
        if run != other_run:
            return -1
        if round != other_round:
            return run
    return -1


def _span(first: str, last: str) -> str:
    """``tensors[0]`` and ``tensors[11]`` as ``tensors[0…11]``."""
    if first == last:
        return first
    numbers = iter(_DIGITS.findall(last))
    return _DIGITS.sub(lambda match: _range(match[0], next(numbers, match[0])), first)


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first}…{last}"


def _merge_node(
    node: Node, members: list[Node], name: dict[str, str], slots: dict[tuple[str, str, int], int]
) -> Node:
    args = node.args
    if args:

        def change(ref: Ref) -> Ref:
            source = name.get(ref.node, ref.node)
            slot = slots.get((node.name, source, ref.slot), ref.slot)
            return ref if source == ref.node and slot == ref.slot else Ref(source, slot)

        args = map_refs(args, change)
    if len(members) == 1:
        return replace(node, args=args)
    info = dict(node.info)
    for key in _SUMMED:
        if key in info:
            info[key] = sum(member.info.get(key, 0) for member in members)
    varies = [_varying_size([m.outputs[at] for m in members]) for at in range(len(node.outputs))]
    if any(varies):
        info["varies"] = varies
    return replace(node, args=args, repeat=sum(member.repeat for member in members), info=info)


def _varying_size(metas: list[TensorMeta]) -> str:
    """A tensor whose size changes from round to round: ``f32[1, 5…9]``; "" where it does not."""
    first = metas[0]
    if all(meta.shape == first.shape for meta in metas):
        return ""
    columns = list(zip(*(meta.shape for meta in metas), strict=True))
    sizes = [_range(str(min(column)), str(max(column))) for column in columns]
    return tensor_text(sizes, first.dtype, first.device, first.layout)
