"""Modules shown as one node each: `collapse` hides everything deeper than a given depth.

Every module call at that depth becomes a node, and above it every call of a module that calls no other, so
that a picture does not mix modules with ops of modules. Tensors that a module reads from outside become its
inputs, those that others read of it its outputs. Parameters that only this module reads are absorbed. Each
call of a module is a node of its own; a container that is never called itself (a ``ModuleList``) is one node
for each uninterrupted series of calls in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from sightline.argument_checks import argument_text
from sightline.data.forms import map_leaves
from sightline.data.trace_data import TensorMeta
from sightline.errors import UsageError
from sightline.graph.fold import loop_key, strict_key
from sightline.graph.graph import Edge, Graph, Node, Ref, replace_refs
from sightline.graph.module_scopes import ScopeTree, scope_tree
from sightline.graph.node_names import UniqueNames

_SOURCES = ("parameter", "buffer", "constant")


@dataclass(slots=True)
class _Group:
    """The nodes that one new node replaces."""

    path: str
    call: int  #: the call around it, into ``info["calls"]``; -1 for none
    own: int  #: the call it is itself; -1 for a container
    nodes: list[Node] = field(default_factory=list)
    sources: list[Node] = field(default_factory=list)  #: parameters it absorbs
    results: dict[tuple[int, int], int] = field(default_factory=dict)  #: (node, slot) inside -> its slot


def collapse(graph: Graph, depth: int) -> Graph:
    """Every call of a module at this depth as one node, and of shallower ones that call no other.

    The model itself has depth 0.

    >>> a = Node(0, "mm", "mm", module="fc", outputs=())
    >>> b = Node(1, "relu", "relu", args={"self": Ref("mm")})
    >>> g = Graph((a, b), (Edge(0, 1, 0, "self"),), modules={"": "Net", "fc": "Linear"})
    >>> [(node.name, node.op) for node in collapse(g, 1)]
    [('fc', 'Linear'), ('relu', 'relu')]
    """
    if type(depth) is not int or depth < 0:
        raise UsageError(f"depth={argument_text(depth)} must be a whole number from 0 up.")
    tree = scope_tree(graph)
    group_of = _group_nodes(graph, tree, depth)
    collapsed = _CollapsedGraph(graph, group_of)
    info = {**graph.info, "depth": depth}
    return replace(graph, nodes=tuple(collapsed.nodes.values()), edges=tuple(collapsed.edges), info=info)


def _group_nodes(graph: Graph, tree: ScopeTree, depth: int) -> dict[int, _Group]:
    """The group of each node that is hidden.

    The parameters, buffers and constants that only the calls of one module read are in its first group.
    """
    group_of: dict[int, _Group] = {}
    of_scope: dict[int, tuple[Hashable, str, int, int] | None] = {}
    last: tuple[Hashable, _Group] | None = None
    by_scope: dict[Hashable, _Group] = {}
    folds = graph.info.get("folds", {})
    leaves = set(range(len(tree.scopes))).difference(scope.parent for scope in tree.scopes)
    for node in graph.topological():
        if node.kind != "call":
            continue
        scope = tree.of_node.get(node.id, -1)
        if scope not in of_scope:
            of_scope[scope] = _hidden_by(tree, scope, depth, folds, leaves)
        hidden = of_scope[scope]
        if hidden is None:
            last = None
            continue
        key, path, around, own = hidden
        group = by_scope.get(key) if own >= 0 else last[1] if last is not None and last[0] == key else None
        if group is None:
            call = tree.scopes[own].call if own >= 0 else -1
            group = by_scope[key] = _Group(path, tree.scopes[around].call if around >= 0 else -1, call)
        last = key, group
        group.nodes.append(node)
        group_of[node.id] = group
    readers: dict[int, list[_Group | None]] = {}
    for edge in graph.edges:
        readers.setdefault(edge.source, []).append(group_of.get(edge.target))
    for node in graph.nodes:
        first, *others = readers.get(node.id) or [None]
        if node.kind not in _SOURCES or first is None:
            continue
        if all(other is not None and other.path == first.path for other in others):
            first.sources.append(node)
            group_of[node.id] = first
    return group_of


def _hidden_by(
    tree: ScopeTree, scope: int, depth: int, folds: dict[str, Any], leaves: set[int]
) -> tuple[Hashable, str, int, int] | None:
    """The call or container that hides a scope: a key, its path, the scope around it, its own scope or -1."""
    around = -1
    for each in tree.chain(scope):
        path = tree.scopes[each].path
        parts = path.split(".") if path else []
        # Of layers that are folded, the layer says more than the list around them.
        if len(parts) == depth or (len(parts) > depth and path in folds) or (path and each in leaves):
            return each, path, around, each
        if len(parts) > depth:
            prefix = ".".join(parts[:depth])
            return (around, prefix), prefix, around, -1
        around = each
    return None


class _CollapsedGraph:
    """The nodes, by id, and the edges of the new graph."""

    def __init__(self, graph: Graph, group_of: dict[int, _Group]) -> None:
        self._graph, self._group_of = graph, group_of
        self.edges: list[Edge] = []
        self.nodes: dict[int, Node] = {}
        self._args: dict[int, dict[str, Any]] = {}
        names = UniqueNames()
        for node in graph.topological():
            if node.id not in group_of:
                names.new(node.name)
        group_names: dict[int, str] = {}
        order: list[tuple[Node, _Group | None]] = []
        for node in graph.topological():
            group = group_of.get(node.id)
            if group is None:
                order.append((node, None))
            elif node is group.nodes[-1]:  # after everything that the group reads
                type = graph.modules.get(group.path, "")
                group_names[id(group)] = names.new(group.path or type or "model")
                order.append((group.nodes[0], group))
        self._connect()
        for node, group in order:
            self.nodes[node.id] = node if group is None else self._node(node, group, group_names[id(group)])

        def change(ref: Ref) -> Ref:
            source = graph.by_name[ref.node].id
            hidden = group_of.get(source)
            if hidden is None:
                return ref
            return Ref(self.nodes[hidden.nodes[0].id].name, hidden.results[source, ref.slot])

        for id_, node in self.nodes.items():
            if id_ not in self._args:
                self.nodes[id_] = replace_refs(node, change)

    def _connect(self) -> None:
        """Make the edges between the new nodes; inputs of a group are numbered as they are first read."""
        seen: set[tuple[int, int, int, bool]] = set()
        counts: dict[int, int] = {}
        loops = self._graph.info.get("loops", {})
        for edge in self._graph.edges:
            source, target = self._group_of.get(edge.source), self._group_of.get(edge.target)
            if source is not None and source is target and not _is_loop_around(edge, source, loops):
                continue
            if edge.source in self._group_of and source is not None:
                if self._graph.by_id[edge.source].kind != "call":
                    continue  # absorbed; a module that is called again reads it again
                slot = source.results.setdefault((edge.source, edge.slot), len(source.results))
                edge = replace(edge, source=source.nodes[0].id, slot=slot)
            if target is None:
                self.edges.append(edge)
                continue
            edge = replace(edge, target=target.nodes[0].id)
            key = (edge.source, edge.slot, edge.target, edge.loop)
            if key in seen:
                continue
            seen.add(key)
            number = counts[edge.target] = counts.get(edge.target, -1) + (not edge.loop)
            argument = edge.argument if edge.loop else f"input{number}" if number else "input"
            self.edges.append(replace(edge, argument=argument))
            if not edge.loop:
                self._args.setdefault(edge.target, {})[argument] = (edge.source, edge.slot)

    def _node(self, first: Node, group: _Group, name: str) -> Node:
        """The node that a group becomes; ``first`` is the first node in it."""
        graph = self._graph
        type = graph.modules.get(group.path, "")
        last = group.nodes[-1]
        results = list(group.results) or [(last.id, at) for at in range(len(last.outputs))]
        metas: list[TensorMeta] = []
        varies: list[str] = []
        for id, slot in results:
            outputs, texts = graph.by_id[id].outputs, graph.by_id[id].info.get("varies") or []
            metas += outputs[slot : slot + 1]
            varies.append(texts[slot] if slot < len(texts) else "")
        args = {}
        for argument, (source, slot) in self._args.setdefault(first.id, {}).items():
            producer = self.nodes.get(source)  # stored before its readers
            args[argument] = Ref(producer.name if producer else graph.by_id[source].name, slot)
        calls = graph.info.get("calls") or []
        line = str(calls[group.own][2]) if 0 <= group.own < len(calls) else ""
        info: dict[str, Any] = {"collapsed": sum(node.repeat for node in (*group.nodes, *group.sources))}
        if group.call >= 0:
            info["call"] = group.call
        for key in ("flops", "duration"):
            numbers = [node.info[key] for node in group.nodes if key in node.info]
            if numbers:
                info[key] = sum(numbers)
        parameters = [node for node in group.sources if node.kind == "parameter"]
        if parameters:
            counts = [meta.numel * node.repeat for node in parameters for meta in node.outputs[:1]]
            info["parameters"] = sum(counts)
        info["likeness"] = _likeness(group.nodes)
        if any(varies):
            info["varies"] = varies
        return Node(
            first.id, name, type or group.path.rpartition(".")[2], "call", args, group.path, line,
            tuple(metas), _repeat(group.nodes), first.phase, type, info,
        )  # fmt: skip


def _is_loop_around(edge: Edge, group: _Group, loops: dict[str, list[int]]) -> bool:
    """Whether an edge inside a group leads from one of its calls to the next, not around an inner loop."""
    if not edge.loop:
        return False
    first, last = loops.get(loop_key(edge), (-1, -1))
    inside = {node.id for node in group.nodes}
    if first in inside and last in inside:  # a round is the whole group, or a part of it
        return group.nodes[0].id == first and group.nodes[-1].id == last
    return _repeat(group.nodes) > 1


def _repeat(nodes: list[Node]) -> int:
    """How many calls a group stands for: nodes folded further inside it repeat a multiple of that."""
    return gcd(*(node.repeat for node in nodes))


def _likeness(nodes: list[Node]) -> str:
    """A digest that is equal for collapsed calls that hide equal nodes."""
    keys = [strict_key(node) for node in nodes]
    try:
        text = repr(keys)
    except ValueError:  # more digits than Python converts to text
        text = repr(map_leaves(keys, lambda leaf: hex(leaf) if type(leaf) is int else leaf))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
