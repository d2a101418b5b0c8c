"""Where a graph repeats itself: stretches of its order in which every round is wired like the one before.

Two nodes look alike if they are equal up to the layer number, or up to sizes as in two rounds of one loop.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sightline.analysis.fold import Node as Folded
from sightline.analysis.fold import Repeat
from sightline.analysis.fold import fold as fold_sequence
from sightline.graph.graph import Graph, Node, Ref
from sightline.graph.module_scopes import nesting
from sightline.graph.node_names import word
from sightline.trace.forms import Elided, Record, Symbol

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_DIGITS = re.compile(r"\d+")
_ATOMS: Final = frozenset({type(None), bool, str})
#: They are given the round of a loop as a number: ``x[:, t]``.
_INDEXING: Final = frozenset({"getitem", "setitem", "select", "slice", "narrow"})


@lru_cache(maxsize=65536)
def masked(path: str) -> str:
    """A module path without its numbers.

    >>> masked("blocks.11.attn"), masked("fc1.weight")
    ('blocks.#.attn', 'fc1.weight')
    """
    return _NUMBER.sub("#", path)


def strict(node: Node) -> Hashable:
    """Equal for nodes of layers that differ in their number only."""
    return likeness(node)[0]


def likeness(node: Node) -> tuple[Hashable, Hashable]:
    """Two keys: the strict one, and the loose one: equal for the same line of the same module."""
    columns = node.info.get("columns")
    # Without columns two readings on one line look like two rounds: ``q, k = x[0], x[1]``.
    index = columns is not None and word(node.op, "aten") in _INDEXING
    sizes = columns is None and "collapsed" not in node.info
    place = (node.op, node.target, node.kind, node.phase, node.source, tuple(columns or ()), node.repeat)
    exact = _frozen(node.args, numbers=not index)
    loose = exact if sizes is not index else _frozen(node.args, numbers=sizes)
    shapes = tuple([(meta.shape, meta.dtype, meta.device) for meta in node.outputs])
    ranks = tuple([(len(meta.shape), meta.dtype, meta.device) for meta in node.outputs])
    return (
        (place, masked(node.module), exact, shapes, node.info.get("likeness")),
        (place, node.module, loose, ranks),
    )


def source_key(node: Node) -> Hashable:
    """Equal for parameters, inputs and constants that play the same part in two layers."""
    name = masked(node.op) if node.kind in ("parameter", "buffer") else ""
    return node.kind, name, tuple([(meta.shape, meta.dtype, meta.device) for meta in node.outputs])


def _frozen(item: Any, *, numbers: bool) -> Hashable:
    """Arguments as something hashable; which tensor is meant is compared by the wiring, not here."""
    kind = type(item)
    if kind is Ref:
        return Ref
    if kind in _ATOMS:
        return item  # type: ignore[no-any-return]  # None, a bool or a text
    if kind is int:
        return (int, item if numbers else "#")  # 1, 1.0 and True are told apart
    if kind is dict:
        return (dict, *[(key, _frozen(part, numbers=numbers)) for key, part in item.items()])
    if kind is list or kind is tuple:
        return (kind, *[_frozen(part, numbers=numbers) for part in item])
    if kind is float:
        return (float, item)
    if kind is Symbol:
        # A parameter that was pruned is a text with its path in it.
        return (Symbol, masked(item.text) if numbers else _DIGITS.sub("#", item.text))
    if kind is Record:
        return (Record, item.type, _frozen(item.fields, numbers=numbers))
    if kind is Elided:
        return (Elided, item.count)
    return (kind.__name__, repr(item))


STRICT: Final = 0
LOOSE: Final = 1


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` rounds of ``length`` nodes each, from position ``start`` on."""

    start: int
    length: int
    count: int
    modules: tuple[
        tuple[str, str], ...
    ]  #: the module calls of a round: their paths in the first and the last


@dataclass(slots=True)
class _Unit:
    """A node, a module call, or a run of them: positions [start, end)."""

    start: int
    end: int
    keys: tuple[int, int]  #: strict and loose
    path: str | None = None  #: of a module call
    inside: list[_Unit] | None = None
    run: Run | None = None


class Order:
    """The nodes that run, in order, and what each of them reads."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = [node for node in graph.topological() if node.kind in ("call", "output")]
        self.place = {node.id: at for at, node in enumerate(self.nodes)}
        #: Per position (source, slot, argument); a source that does not run is ``-1 - id``.
        self.reads: list[list[tuple[int, int, str]]] = [[] for _ in self.nodes]
        for edge in graph.edges:
            if not edge.loop:
                source = self.place.get(edge.source, -1 - edge.source)
                self.reads[self.place[edge.target]].append((source, edge.slot, edge.argument))
        self._ids: dict[Hashable, int] = {}
        self.keys = [(self._id(strict), self._id(loose)) for strict, loose in map(likeness, self.nodes)]
        self._sources = {
            -1 - node.id: self._id(source_key(node)) for node in graph.nodes if node.id not in self.place
        }
        self._tree = self._build(graph)

    def _id(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _build(self, graph: Graph) -> list[_Unit]:
        tree = nesting(graph)
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
                self._id((masked(unit.path), type, *[part.keys[STRICT] for part in unit.inside])),
                self._id((unit.path, type, *[part.keys[LOOSE] for part in unit.inside])),
            )

    def runs(self) -> list[Run]:
        """Every run, an outer one before those in its first round."""
        found: list[Run] = []
        stack = [self._tree]
        while stack:
            units = self._folded(self._folded(stack.pop(), STRICT), LOOSE)
            while units:  # runs in runs first: what is inside the first round of a run
                unit = units.pop()
                if unit.run is not None:
                    found.append(unit.run)
                    units += unit.inside or []
                elif unit.inside:
                    stack.append(unit.inside)
        # An outer run starts no later and is longer than what it holds.
        return sorted(found, key=lambda run: (run.start, -run.length * run.count))

    def _folded(self, units: list[_Unit], kind: int) -> list[_Unit]:
        """The units of one level with the repeats among them as runs."""
        if len(units) < 2:
            return units
        return self._chosen(fold_sequence([unit.keys[kind] for unit in units]), units, 0, kind)

    def _chosen(self, nodes: Sequence[Folded], units: list[_Unit], shift: int, kind: int) -> list[_Unit]:
        made: list[_Unit] = []
        for node in nodes:
            if not isinstance(node, Repeat):
                made.append(units[node + shift])
                continue
            first, width = _first(node) + shift, _width(node.body)
            start, length = units[first].start, units[first + width - 1].end - units[first].start
            for begin, count in self._agreeing(start, length, node.count, kind):
                body = self._chosen(node.body, units, shift + begin * width, kind)
                if count == 1:
                    made += body
                    continue
                at = first + begin * width
                made.append(self._run_unit(units, at, width, count, body))
        return made

    def _run_unit(self, units: list[_Unit], at: int, width: int, count: int, body: list[_Unit]) -> _Unit:
        last = at + (count - 1) * width
        paths = [(units[at + i].path, units[last + i].path) for i in range(width)]
        modules = tuple((one, other) for one, other in paths if one is not None and other is not None)
        start, length = units[at].start, units[at + width - 1].end - units[at].start
        key = self._id(("run", count, *[unit.keys[LOOSE] for unit in body]))
        run = Run(start, length, count, modules)
        return _Unit(start, start + length * count, (-1, key), None, body, run)

    def _agreeing(self, start: int, length: int, count: int, kind: int) -> list[tuple[int, int]]:
        """The rounds of a proposed run in groups that are wired alike: (first round, how many)."""
        groups: list[tuple[int, int]] = []
        begin = 0
        for round in range(1, count):
            if not self._agrees(start + begin * length, start + round * length, length, kind):
                groups.append((begin, round - begin))
                begin = round
        return [*groups, (begin, count - begin)]

    def _agrees(self, begin: int, here: int, length: int, kind: int) -> bool:
        """Whether the round that starts ``here`` is wired like the one before, in a run from ``begin`` on."""
        reads = self.reads
        for at in range(here, here + length):
            mine, theirs = reads[at], reads[at - length]
            if len(mine) != len(theirs):
                return False
            for (source, slot, name), (before, slot_before, name_before) in zip(mine, theirs, strict=True):
                if name != name_before:
                    return False
                if source - length >= begin:  # of this run: as far back as in the round before
                    if before != source - length or slot != slot_before:
                        return False
                elif source >= begin:  # of its first rounds: what stood in for it before came from outside
                    if before >= begin:
                        return False
                elif source == before:  # the same for all, or each round its own part: ``x.unbind()``
                    continue
                elif before >= begin or not self._alike(source, before, kind):
                    return False
        return True

    def _alike(self, one: int, other: int, kind: int) -> bool:
        if one < 0 or other < 0:
            return one < 0 and other < 0 and self._sources[one] == self._sources[other]
        return self.keys[one][kind] == self.keys[other][kind]


def _first(node: Folded) -> int:
    return _first(node.body[0]) if isinstance(node, Repeat) else node


def _width(nodes: Sequence[Folded]) -> int:
    return sum(node.count * _width(node.body) if isinstance(node, Repeat) else 1 for node in nodes)
