"""`Lineage`: the chain of ops, lines and modules a value came from, as plain data.

The ops before a value form a graph. It is told along its trunk: what everything later went through comes
after all that branched off in between, so that a residual stream reads straight down and each value is told
once. Nothing here recurses: a chain may be as long as the run.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sightline.analysis.model_part import model_part
from sightline.analysis.producers import NOBODY, Producers
from sightline.argument_checks import argument_text
from sightline.errors import NothingMatched, UsageError
from sightline.patterns import choices_text
from sightline.trace.data import LEVELS, PHASES
from sightline.trace.index import Index

DEPTH: Final = 8  #: ops back from the value, unless asked for otherwise
MOST: Final = 24  #: and no more than so many in all: a screen


@dataclass(frozen=True, slots=True)
class Making:
    """One step: an op, an API call, the backward pass of one, or a module call, and what it made."""

    values: tuple[int, ...]  #: those that the lineage reaches, in order; the value asked for is of the first
    name: str  #: as the user wrote it: ``F.linear``; empty for a mere view
    op: int  #: the op that gives name and line, of a backward pass the forward one; -1 if none
    call: int  #: the module call it is, if no op is known; else -1
    phase: str
    file: str
    line: int  #: 0 where no line is known
    function: str
    code: str
    module: str  #: label of the module
    sources: tuple[int, ...]  #: the values it was made from that are told on
    leaves: tuple[int, ...]  #: those that nothing recorded made: parameters, inputs
    saved: tuple[int, ...]  #: those of the forward pass a backward op read; not told on
    cut: tuple[int, ...]  #: those that are not told on, since they are too far back
    before: int  #: how many ops came before the cut ones
    children: tuple[int, ...]  #: positions of the branches below it, the last one being the trunk


@dataclass(frozen=True)
class Lineage:
    """The steps to a value, the most recent first. ``nodes`` and ``edges`` are the same as a small graph."""

    index: Index = field(repr=False)
    value: int
    level: str
    makings: tuple[Making, ...]  #: empty if nothing recorded made the value

    @property
    def left_out(self) -> int:
        """How many of its leaves were made in the recording, by what is not told of."""
        producer = self.index.raw.values.producer
        return sum(producer[leaf] >= 0 for leaf in {leaf for each in self.makings for leaf in each.leaves})

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """Every value told of, as plain data that JSON can hold; leaves have no ``op``."""
        made = {value: making for making in self.makings for value in making.values}
        told = [self.value, *made]
        for making in self.makings:
            told += [*making.leaves, *making.saved, *making.cut]
        return [_node(self.index, value, made.get(value)) for value in dict.fromkeys(told)]

    @property
    def edges(self) -> list[dict[str, Any]]:
        """From each value to those made from it: ``{"source": 3, "target": 12, "saved": False}``."""
        return [
            {"source": source, "target": target, "saved": saved}
            for making in self.makings
            for target in making.values
            for sources, saved in ((making.sources + making.leaves + making.cut, False), (making.saved, True))
            for source in sources
            if source != target
        ]

    def to_networkx(self) -> Any:
        """A ``networkx.DiGraph`` of value ids, with the attributes of ``nodes`` and ``edges``."""
        import networkx as nx

        graph = nx.DiGraph()
        for node in self.nodes:
            graph.add_node(node["id"], **{key: item for key, item in node.items() if key != "id"})
        for edge in self.edges:
            graph.add_edge(edge["source"], edge["target"], saved=edge["saved"])
        return graph


def _node(index: Index, id: int, making: Making | None) -> dict[str, Any]:
    value = index.values[id]
    stats = value.stats
    node: dict[str, Any] = {
        "id": id, "shape": list(value.shape), "dtype": value.dtype, "device": value.device,
        "kind": value.kind, "name": value.name, "stats": stats._asdict() if stats else None,
    }  # fmt: skip
    if making is not None:
        told = ("phase", "file", "line", "function", "code", "module", "before")
        node |= {"op": making.name, **{key: getattr(making, key) for key in told}}
    return node


def lineage_of(
    index: Index, value: int, *, depth: int | None = None, ops: str | None = None, most: int | None = None,
    everything: bool = True,
) -> Lineage:  # fmt: skip
    """What a value came from, at most ``depth`` ops back and at most ``most`` ops in all.

    ``ops`` is "api" (where recorded) or "aten". ``everything=False`` stops at what builds the model and at
    what installed packages run around it, unless the value itself is of these.
    """
    if depth is not None and (type(depth) is not int or depth < 1):
        raise UsageError(f"depth={argument_text(depth)} must be a whole number from 1 up.")
    level = lineage_level(index, ops)
    left_out = None if everything else model_part(index).left_out
    producer = int(index.raw.values.producer[value])
    if left_out is not None and producer >= 0 and left_out[producer]:
        left_out = None
    makers = Producers(index, level, left_out, None if everything else value)
    if makers.of(value) == NOBODY:
        return Lineage(index, value, level, ())
    return Lineage(index, value, level, tuple(_Telling(index, makers, value, depth, most).makings()))


def lineage_level(index: Index, ops: str | None) -> str:
    """The level a lineage is told at: the one asked for, else "api" where it was recorded, else "aten"."""
    levels = index.raw.ops.level
    there = [name for number, name in enumerate(LEVELS) if (levels == number).any()]
    if ops is None:
        return there[0] if there else LEVELS[0]
    if ops not in LEVELS:
        raise UsageError(f"ops={ops!r} is no level; choose {choices_text(LEVELS)}.")
    if there and ops not in there:
        raise NothingMatched(
            f"ops={ops!r}: this trace has no {ops} ops; it has {there[0]} ops, ops={there[0]!r}."
        )
    return ops


class _Telling:
    """One lineage while it is worked out."""

    def __init__(
        self, index: Index, makers: Producers, value: int, depth: int | None, most: int | None
    ) -> None:
        self._index = index
        self._makers = makers
        self._value = value
        self._given: dict[int, tuple[list[int], list[int]]] = {}
        root = makers.of(value)
        near = self._near(root, depth)
        self._shown = self._ordered(root, near)[:most]
        self._places = {maker: at for at, maker in enumerate(self._shown)}

    def makings(self) -> list[Making]:
        reached: dict[int, list[int]] = {maker: [] for maker in self._shown}
        reached[self._shown[0]].append(self._value)
        for maker in self._shown:
            for source in self._sources(maker)[0]:
                found = reached.get(self._makers.of(source))
                if found is not None and source not in found:
                    found.append(source)
        before = self._before()
        children = self._children()
        return [
            self._making(maker, sorted(reached[maker]), before.get(maker, 0), children[at])
            for at, maker in enumerate(self._shown)
        ]

    def _sources(self, maker: int) -> tuple[list[int], list[int]]:
        """The values to follow, and those that a backward op only read from the forward pass."""
        known = self._given.get(maker)
        if known is None:
            makers = self._makers
            followed, saved = makers.sources(maker), []
            if makers.in_backward(maker):
                forward = [
                    value
                    for value in followed
                    if makers.of(value) != NOBODY and not makers.in_backward(makers.of(value))
                ]
                saved = list(dict.fromkeys(makers.settled(value) for value in forward))
                followed = [value for value in followed if value not in set(forward)]
            known = self._given[maker] = followed, saved
        return known

    def _near(self, root: int, depth: int | None) -> set[int]:
        """The makers at most ``depth`` steps back."""
        near = {root}
        edge = deque([(root, 1)])
        while edge:
            maker, distance = edge.popleft()
            if depth is not None and distance >= depth:
                continue
            for each in self._makers.earlier(maker):
                if each not in near:
                    near.add(each)
                    edge.append((each, distance + 1))
        return near

    def _ordered(self, root: int, near: set[int]) -> list[int]:
        """Each maker after all that used it; among those that may come next, the most recent."""
        waiting = dict.fromkeys(near, 0)
        for maker in near:
            for each in self._makers.earlier(maker):
                if each in near:
                    waiting[each] += 1
        ready = [(-self._makers.recency(root), root)]
        done: list[int] = []
        seen = {root}
        while ready:
            _, maker = heapq.heappop(ready)
            done.append(maker)
            for each in self._makers.earlier(maker):
                if each in near:
                    waiting[each] -= 1
                    if waiting[each] <= 0 and each not in seen:
                        seen.add(each)
                        heapq.heappush(ready, (-self._makers.recency(each), each))
        return done

    def _children(self) -> list[tuple[int, ...]]:
        """For each maker those that all ways to lead through it (its dominator tree), in order."""
        parents = [-1] * len(self._shown)
        depths = [0] * len(self._shown)
        children: list[list[int]] = [[] for _ in self._shown]
        for at, maker in enumerate(self._shown):
            if at:
                depths[at] = depths[parents[at]] + 1
                children[parents[at]].append(at)
            for each in self._makers.earlier(maker):
                place = self._places.get(each)
                if place is not None:
                    parents[place] = (
                        at if parents[place] < 0 else _meeting(parents, depths, parents[place], at)
                    )
        return [tuple(each) for each in children]

    def _before(self) -> dict[int, int]:
        """For each maker with sources that are not told on: how many makers those came from.

        One pass over all that came before: each maker knows, as a bit mask, which cuts it is behind.
        """
        cuts = [maker for maker in self._shown if self._cut(maker)]
        masks: dict[int, int] = {}
        for number, maker in enumerate(cuts):
            for each in {self._makers.of(value) for value in self._cut(maker)}:
                masks[each] = masks.get(each, 0) | 1 << number
        often: Counter[int] = Counter()
        for maker in self._latest_first(list(masks)):
            mask = masks[maker]
            for each in self._makers.earlier(maker):
                if each not in self._places:
                    masks[each] = masks.get(each, 0) | mask
            often[mask] += 1
        counts = dict.fromkeys(cuts, 0)
        for mask, count in often.items():
            while mask:
                lowest = mask & -mask
                counts[cuts[lowest.bit_length() - 1]] += count
                mask ^= lowest
        return counts

    def _latest_first(self, starts: Sequence[int]) -> list[int]:
        """All makers behind the starts that are not told of, each after those that used it."""
        done: list[int] = []
        seen = set(self._places)
        for start in starts:
            stack: list[tuple[int, list[int]]] = []
            if start not in seen:
                seen.add(start)
                stack.append((start, self._makers.earlier(start)))
            while stack:
                maker, left = stack[-1]
                if not left:
                    done.append(maker)
                    stack.pop()
                    continue
                each = left.pop()
                if each not in seen:
                    seen.add(each)
                    stack.append((each, self._makers.earlier(each)))
        return done[::-1]

    def _cut(self, maker: int) -> list[int]:
        made = ((value, self._makers.of(value)) for value in self._sources(maker)[0])
        return [value for value, by in made if by != NOBODY and by not in self._places]

    def _making(self, maker: int, values: list[int], before: int, children: tuple[int, ...]) -> Making:
        makers = self._makers
        op, call = makers.head(maker), makers.call(maker)
        followed, saved = self._sources(maker)
        cut = self._cut(maker)
        further = set(cut)
        made = [value for value in followed if makers.of(value) != NOBODY]
        if self._value in values:  # the value asked for comes first
            values = [self._value, *(value for value in values if value != self._value)]
        name, phase, module = self._words(maker, op, call)
        file, line, function, code = self._line(op, call)
        return Making(
            tuple(values), name, op, call, phase, file, line, function, code, module,
            sources=tuple(value for value in made if value not in further),
            leaves=tuple(value for value in followed if makers.of(value) == NOBODY),
            saved=tuple(saved), cut=tuple(cut), before=before, children=children,
        )  # fmt: skip

    def _words(self, maker: int, op: int, call: int) -> tuple[str, str, str]:
        """Name, phase and module of a maker."""
        if call >= 0:
            row = self._index.module_calls[call]
            return row.module.label, row.phase, row.module.label
        if op < 0:
            return "", PHASES[0], ""
        made = self._index.ops[op]
        module = made.module.label if made.module is not None else ""
        if self._makers.is_backward(maker):
            return f"{made.name} backward", "backward", module
        return made.name, made.phase, module

    def _line(self, op: int, call: int) -> tuple[str, int, str, str]:
        """The innermost line that is not torch's own: file, line, function and text."""
        index = self._index
        shown = index.raw.calls.frame[call] if call >= 0 else index.op_frames[op] if op >= 0 else -1
        frame = int(index.user_frames[shown])
        if frame < 0:
            return "", 0, "", ""
        row = index.frames[frame]
        return row.file, row.line, row.function, row.code


def _meeting(parents: Sequence[int], depths: Sequence[int], one: int, other: int) -> int:
    """The nearest maker that both are below, in the tree so far."""
    while one != other:
        if depths[one] >= depths[other]:
            one = parents[one]
        else:
            other = parents[other]
    return one
