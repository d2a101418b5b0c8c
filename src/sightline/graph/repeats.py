"""Finds where a graph repeats itself: runs of rounds, each wired like the one before.

Two nodes match if they are equal up to the layer number, or up to sizes as in two rounds of one loop.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sightline.analysis.sequence_repeats import Node as Folded
from sightline.analysis.sequence_repeats import Repeat
from sightline.analysis.sequence_repeats import fold as fold_sequence
from sightline.graph.graph import Graph, Node, Ref
from sightline.graph.module_scopes import scope_tree
from sightline.graph.node_names import base_name
from sightline.trace.forms import Elided, Record, Symbol

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_DIGITS = re.compile(r"\d+")
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
    """The nodes that run, in order, what each of them reads, and the runs among them."""

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
        return self._make_runs(fold_sequence([unit.keys[kind] for unit in units]), units, 0, kind)

    def _make_runs(self, nodes: Sequence[Folded], units: list[_Unit], shift: int, kind: int) -> list[_Unit]:
        result: list[_Unit] = []
        for node in nodes:
            if not isinstance(node, Repeat):
                result.append(units[node + shift])
                continue
            first, width = _first_index(node) + shift, _width(node.body)
            start, length = units[first].start, units[first + width - 1].end - units[first].start
            for begin, count in self._wired_alike(start, length, node.count, kind):
                body = self._make_runs(node.body, units, shift + begin * width, kind)
                if count == 1:
                    result += body
                    continue
                at = first + begin * width
                result.append(self._run_unit(units, at, width, count, body))
        return result

    def _run_unit(self, units: list[_Unit], at: int, width: int, count: int, body: list[_Unit]) -> _Unit:
        last = at + (count - 1) * width
        paths = [(units[at + i].path, units[last + i].path) for i in range(width)]
        modules = tuple((one, other) for one, other in paths if one is not None and other is not None)
        start, length = units[at].start, units[at + width - 1].end - units[at].start
        key = self._id(("run", count, *[unit.keys[LOOSE] for unit in body]))
        run = RepeatRun(start, length, count, modules)
        return _Unit(start, start + length * count, (-1, key), None, body, run)

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
                elif before >= begin or not self._same_source(source, before, kind):
                    return False
        return True

    def _same_source(self, one: int, other: int, kind: int) -> bool:
        if one < 0 or other < 0:
            return one < 0 and other < 0 and self._sources[one] == self._sources[other]
        return self.keys[one][kind] == self.keys[other][kind]


def _first_index(node: Folded) -> int:
    return _first_index(node.body[0]) if isinstance(node, Repeat) else node


def _width(nodes: Sequence[Folded]) -> int:
    return sum(node.count * _width(node.body) if isinstance(node, Repeat) else 1 for node in nodes)
