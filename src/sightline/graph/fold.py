"""Repeats shown once: `NodeOrder` finds runs of rounds with the same wiring, `fold` merges their rounds.

Two nodes match if they are equal up to the layer number, or up to sizes as in two rounds of one loop.

A merged node has the id, name and arguments of its first round, and its ``repeat`` counts the nodes it stands
for; the repeats add up to the number of nodes before, and likewise for edges. An edge from one round to a
later one is a ``loop``. The parameters that each round has of its own are merged, too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from sightline.analysis.fold import Node as Folded
from sightline.analysis.fold import Repeat, first_of, length_of
from sightline.analysis.fold import fold as fold_sequence
from sightline.data.forms import Elided, Record, Symbol
from sightline.graph.graph import Edge, Graph, Node, Ref, gc_paused, map_refs
from sightline.graph.module_scopes import scope_tree
from sightline.graph.node_names import base_name
from sightline.notation import tensor_text

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
        nodes = tuple(
            _merge_node(node, members[node.id], name, slots)
            for node in graph.topological()
            if node.id in members
        )
        folds = dict(graph.info.get("folds", {}))
        for run in runs:
            folds.update({one: [other, run.count] for one, other in run.modules})
        loops: dict[str, list[int]] = {}  # the first and the last node of the round a loop edge goes around
        for edge, number in edges:
            if number >= 0:
                start = runs[number].start
                last = first[start + runs[number].length - 1]
                loops.setdefault(loop_key(edge), [order.nodes[start].id, order.nodes[last].id])
        info = {**graph.info, "folds": folds, "loops": graph.info.get("loops", {}) | loops}
        return replace(graph, nodes=nodes, edges=tuple(edge for edge, _ in edges), info=info)


def _merge_rounds(count: int, runs: list[RepeatRun]) -> tuple[list[int], list[tuple[tuple[int, int], ...]]]:
    """Each position's counterpart in the first round, and its (run, round) pairs, outermost first."""
    first = list(range(count))
    rounds: list[tuple[tuple[int, int], ...]] = [()] * count
    for number in range(len(runs) - 1, -1, -1):  # inner runs first: the outer ones copy their rounds
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
    edges = []
    for edge, repeat, last, run in merged.values():
        argument = _span(edge.argument, last)
        source, target = into.get(edge.source, edge.source), into.get(edge.target, edge.target)
        loop = edge.loop or run >= 0
        edge = replace(edge, source=source, target=target, repeat=repeat, loop=loop, argument=argument)
        edges.append((edge, run))
    return edges, slots


def loop_key(edge: Edge) -> str:
    """The key of an edge in ``info["loops"]``."""
    return f"{edge.source}>{edge.target}:{edge.slot}:{edge.argument}"


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
    varies = []  # each output whose size changes from round to round: ``f32[1, 5…9]``; "" where it does not
    for at, first in enumerate(members[0].outputs):
        shapes = [member.outputs[at].shape for member in members]
        if all(shape == first.shape for shape in shapes):
            varies.append("")
        else:
            sizes = [_range(str(min(column)), str(max(column))) for column in zip(*shapes, strict=True)]
            varies.append(tensor_text(sizes, first.dtype, first.device, first.layout))
    if any(varies):
        info["varies"] = varies
    return replace(node, args=args, repeat=sum(member.repeat for member in members), info=info)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_ATOMS: Final = frozenset({type(None), bool, str})
#: Ops that may take the round of a loop as a number: ``x[:, t]``.
_INDEXING: Final = frozenset({"getitem", "setitem", "select", "slice", "narrow"})


@lru_cache(maxsize=65536)
def mask_numbers(path: str) -> str:
    """A module path without its numbers.

    >>> mask_numbers("blocks.11.attn"), mask_numbers("fc1.weight")
    ('blocks.#.attn', 'fc1.weight')
    """
    return _NUMBER.sub("#", path)


def strict_key(node: Node) -> Hashable:
    """Equal for the same node of two layers that differ in their number only."""
    return node_keys(node)[0]


def node_keys(node: Node) -> tuple[Hashable, Hashable]:
    """The strict key, and the loose one, which is equal for the same line of the same module."""
    columns = node.info.get("columns")
    # Without columns two reads on one line look like two rounds: ``q, k = x[0], x[1]``.
    index = columns is not None and base_name(node.op, "aten") in _INDEXING
    sizes = columns is None and "collapsed" not in node.info
    common = (node.op, node.target, node.kind, node.phase, node.source, tuple(columns or ()), node.repeat)
    exact = _hashable(node.args, numbers=not index)
    loose = exact if sizes is not index else _hashable(node.args, numbers=sizes)
    shapes = tuple([(meta.shape, meta.dtype, meta.device) for meta in node.outputs])
    ranks = tuple([(len(meta.shape), meta.dtype, meta.device) for meta in node.outputs])
    return (
        (common, mask_numbers(node.module), exact, shapes, node.info.get("likeness")),
        (common, node.module, loose, ranks),
    )


def source_key(node: Node) -> Hashable:
    """Equal for parameters, inputs and constants that play the same part in two layers."""
    name = mask_numbers(node.op) if node.kind in ("parameter", "buffer") else ""
    return node.kind, name, tuple([(meta.shape, meta.dtype, meta.device) for meta in node.outputs])


def _hashable(item: Any, *, numbers: bool) -> Hashable:
    """Arguments in a hashable form, all tensors alike: the wiring is compared elsewhere."""
    kind = type(item)
    if kind is Ref:
        return Ref
    if kind in _ATOMS:
        return item  # type: ignore[no-any-return]  # None, a bool or a string
    if kind is int:
        return (int, item if numbers else "#")  # distinct from 1.0 and True
    if kind is dict:
        return (dict, *[(key, _hashable(part, numbers=numbers)) for key, part in item.items()])
    if kind is list or kind is tuple:
        return (kind, *[_hashable(part, numbers=numbers) for part in item])
    if kind is float:
        return (float, item)
    if kind is Symbol:
        # A pruned parameter is a symbol that contains its path.
        return (Symbol, mask_numbers(item.text) if numbers else _DIGITS.sub("#", item.text))
    if kind is Record:
        return (Record, item.type, _hashable(item.fields, numbers=numbers))
    if kind is Elided:
        return (Elided, item.count)
    return (kind.__name__, repr(item))


STRICT: Final = 0
LOOSE: Final = 1


@dataclass(frozen=True, slots=True)
class RepeatRun:
    """``count`` rounds of ``length`` nodes each, from position ``start`` on."""

    start: int
    length: int
    count: int
    modules: tuple[tuple[str, str], ...]  #: paths of a round's module calls, in the first and the last round


@dataclass(slots=True)
class _Unit:
    """A node, a module call, or a run of units: positions [start, end)."""

    start: int
    end: int
    keys: tuple[int, int]  #: strict and loose
    path: str | None = None  #: of a module call
    inside: list[_Unit] | None = None
    run: RepeatRun | None = None


class NodeOrder:
    """The nodes that run, in order, with the values each of them reads, and the runs among them."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = [node for node in graph.topological() if node.kind in ("call", "output")]
        self.position = {node.id: at for at, node in enumerate(self.nodes)}
        #: Per position (source, slot, argument); a source that does not run is ``-1 - id``.
        self.reads: list[list[tuple[int, int, str]]] = [[] for _ in self.nodes]
        for edge in graph.edges:
            if not edge.loop:
                source = self.position.get(edge.source, -1 - edge.source)
                self.reads[self.position[edge.target]].append((source, edge.slot, edge.argument))
        self._ids: dict[Hashable, int] = {}
        self.keys = [(self._id(strict), self._id(loose)) for strict, loose in map(node_keys, self.nodes)]
        self._sources = {
            -1 - node.id: self._id(source_key(node)) for node in graph.nodes if node.id not in self.position
        }
        self._units = self._build_units(graph)

    def _id(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _build_units(self, graph: Graph) -> list[_Unit]:
        tree = scope_tree(graph)
        top: list[_Unit] = []
        opened: list[tuple[int, _Unit]] = []
        for at, node in enumerate(self.nodes):
            chain = tree.chain(tree.of_node.get(node.id, -1))
            shared = 0
            while shared < len(opened) and shared < len(chain) and opened[shared][0] == chain[shared]:
                shared += 1
            self._close(opened, shared, at, graph)
            for scope in chain[shared:]:
                unit = _Unit(at, at, (-1, -1), tree.scopes[scope].path, [])
                (opened[-1][1].inside if opened else top).append(unit)  # type: ignore[union-attr]  # a call
                opened.append((scope, unit))
            leaf = _Unit(at, at + 1, self.keys[at])
            (opened[-1][1].inside if opened else top).append(leaf)  # type: ignore[union-attr]  # a call
        self._close(opened, 0, len(self.nodes), graph)
        return top

    def _close(self, opened: list[tuple[int, _Unit]], keep: int, end: int, graph: Graph) -> None:
        while len(opened) > keep:
            _, unit = opened.pop()
            assert unit.path is not None
            assert unit.inside is not None
            unit.end = end
            type = graph.modules.get(unit.path, "")
            unit.keys = (
                self._id((mask_numbers(unit.path), type, *[part.keys[STRICT] for part in unit.inside])),
                self._id((unit.path, type, *[part.keys[LOOSE] for part in unit.inside])),
            )

    def runs(self) -> list[RepeatRun]:
        """Every run, an outer one before those in its first round."""
        runs: list[RepeatRun] = []
        stack = [self._units]
        while stack:
            units = self._fold_units(self._fold_units(stack.pop(), STRICT), LOOSE)
            while units:  # of a run only the first round is searched further
                unit = units.pop()
                if unit.run is not None:
                    runs.append(unit.run)
                    units += unit.inside or []
                elif unit.inside:
                    stack.append(unit.inside)
        # An outer run starts no later and is longer than those inside it.
        return sorted(runs, key=lambda run: (run.start, -run.length * run.count))

    def _fold_units(self, units: list[_Unit], kind: int) -> list[_Unit]:
        """The units of one level, with repeats among them replaced by runs."""
        if len(units) < 2:
            return units
        return self._replace_repeats(fold_sequence([unit.keys[kind] for unit in units]), units, 0, kind)

    def _replace_repeats(
        self, nodes: Sequence[Folded], units: list[_Unit], shift: int, kind: int
    ) -> list[_Unit]:
        result: list[_Unit] = []
        for node in nodes:
            if not isinstance(node, Repeat):
                result.append(units[node + shift])
                continue
            first, width = first_of(node) + shift, sum(map(length_of, node.body))
            start, length = units[first].start, units[first + width - 1].end - units[first].start
            for begin, count in self._wired_alike(start, length, node.count, kind):
                body = self._replace_repeats(node.body, units, shift + begin * width, kind)
                if count == 1:
                    result += body
                    continue
                at = first + begin * width
                last = at + (count - 1) * width
                paths = [(units[at + i].path, units[last + i].path) for i in range(width)]
                modules = tuple((one, other) for one, other in paths if one is not None and other is not None)
                run = RepeatRun(units[at].start, length, count, modules)
                key = self._id(("run", count, *[unit.keys[LOOSE] for unit in body]))
                result.append(_Unit(run.start, run.start + length * count, (-1, key), None, body, run))
        return result

    def _wired_alike(self, start: int, length: int, count: int, kind: int) -> list[tuple[int, int]]:
        """The rounds of a proposed run in groups with the same wiring: (first round, count)."""
        groups: list[tuple[int, int]] = []
        begin = 0
        for round in range(1, count):
            if not self._same_wiring(start + begin * length, start + round * length, length, kind):
                groups.append((begin, round - begin))
                begin = round
        return [*groups, (begin, count - begin)]

    def _same_wiring(self, begin: int, start: int, length: int, kind: int) -> bool:
        """Whether the round at ``start`` is wired like the one before, in a run from ``begin`` on."""
        reads = self.reads
        for at in range(start, start + length):
            current, previous = reads[at], reads[at - length]
            if len(current) != len(previous):
                return False
            for (source, slot, name), (before, slot_before, name_before) in zip(
                current, previous, strict=True
            ):
                if name != name_before:
                    return False
                if source - length >= begin:  # from the round before: so is its counterpart
                    if before != source - length or slot != slot_before:
                        return False
                elif source >= begin:  # from the first rounds: its counterpart is from outside
                    if before >= begin:
                        return False
                elif source == before:  # shared, or each round its own output: ``x.unbind()``
                    continue
                elif before >= begin or (source < 0) != (before < 0):
                    return False
                elif source < 0 and self._sources[source] != self._sources[before]:
                    return False
                elif source >= 0 and self.keys[source][kind] != self.keys[before][kind]:
                    return False
        return True
