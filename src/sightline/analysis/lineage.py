"""`Lineage`: the chain of ops, lines and modules a value came from, as plain data.

The ops before a value form a graph, listed along its trunk: an op that everything later went through comes
after the branches in between, so that a residual stream reads straight down and each value appears once.
Nothing here recurses: a chain may be as long as the run.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sightline.analysis.producers import NO_PRODUCER, Producers
from sightline.analysis.select import model_part
from sightline.analysis.size_origins import makes_size, size_path
from sightline.argument_checks import argument_text
from sightline.data.index import Index
from sightline.data.trace_data import KINDS, LEVELS, PHASES
from sightline.errors import NothingMatched, UsageError
from sightline.hints import Hint
from sightline.notation import dtype_name
from sightline.patterns import choices_text
from sightline.text_encoding import printable

DEPTH: Final = 8  #: default for how many ops back from the value
MOST: Final = 24  #: default for how many in all: a screen


@printable
@dataclass(frozen=True, slots=True)
class LineageStep:
    """One step: an op, an API call, the backward pass of one, or a module call, and its results."""

    values: tuple[int, ...]  #: results that the lineage reaches; the target is first in the first step
    name: str  #: as the user wrote it: ``F.linear``; empty for a view
    op: int  #: the op that gives name and line, of a backward pass the forward op; -1 without
    call: int  #: the module call, if its ops were not recorded; else -1
    phase: str
    file: str
    line: int  #: 0 where no line is known
    function: str
    code: str
    module: str  #: label of the module
    sources: tuple[int, ...]  #: inputs that a further step produced
    leaves: tuple[int, ...]  #: inputs without a recorded producer: parameters, inputs of the model
    saved: tuple[int, ...]  #: values of the forward pass that a backward op read; not followed
    cut: tuple[int, ...]  #: inputs that are not followed, since they are too far back
    before: int  #: how many ops came before the cut ones
    children: tuple[int, ...]  #: positions of the branches below it, the trunk last


@printable
@dataclass(frozen=True, slots=True)
class OriginStep:
    """Where something about a value began: ``size 61`` at ``Tensor.unfold``, with the shortest path to it."""

    trait: str
    path: tuple[int, ...]  #: from the value back to the first one that has it
    name: str  #: of the op that made the last one; empty for a leaf
    file: str
    line: int
    sources: tuple[int, ...]


@printable
@dataclass(frozen=True)
class Lineage:
    """The steps to a value, the most recent first. ``nodes`` and ``edges`` are the same as a small graph."""

    index: Index = field(repr=False)
    value: int
    level: str
    steps: tuple[LineageStep, ...]  #: empty for a value without a recorded producer
    origins: tuple[OriginStep, ...] = ()  #: where it has its NaN, its dtype and its sizes from

    @property
    def excluded(self) -> int:
        """How many of its leaves were produced by ops that are left out: those that build the model."""
        producer = self.index.raw.values.producer
        return sum(producer[leaf] >= 0 for leaf in {leaf for step in self.steps for leaf in step.leaves})

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """Every value in it, as plain data that JSON can hold; leaves have no ``op``."""
        step_of = {value: step for step in self.steps for value in step.values}
        ids = [self.value, *step_of]
        for step in self.steps:
            ids += [*step.leaves, *step.saved, *step.cut]
        nodes = []
        for id in dict.fromkeys(ids):
            value, producer = self.index.values[id], step_of.get(id)
            node: dict[str, Any] = {
                "id": id, "shape": list(value.shape), "dtype": value.dtype, "device": value.device,
                "kind": value.kind, "name": value.name,
                "stats": value.stats._asdict() if value.stats else None,
            }  # fmt: skip
            if producer is not None:
                keys = ("phase", "file", "line", "function", "code", "module", "before")
                node |= {"op": producer.name, **{key: getattr(producer, key) for key in keys}}
            nodes.append(node)
        return nodes

    @property
    def edges(self) -> list[dict[str, Any]]:
        """From each value to those computed from it: ``{"source": 3, "target": 12, "saved": False}``."""
        return [
            {"source": source, "target": target, "saved": saved}
            for step in self.steps
            for target in step.values
            for sources, saved in ((step.sources + step.leaves + step.cut, False), (step.saved, True))
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


def lineage_of(
    index: Index, value: int, *, depth: int | None = None, level: str | None = None, most: int | None = None,
    everything: bool = True,
) -> Lineage:  # fmt: skip
    """The lineage of a value, at most ``depth`` ops back and at most ``most`` ops in all.

    ``level`` is "api" (where recorded) or "aten". ``everything=False`` stops at ops that build the model and
    at those that installed packages run around it, unless one of these produced the value itself.
    """
    if depth is not None and (type(depth) is not int or depth < 1):
        raise UsageError(f"depth={argument_text(depth)} must be a whole number from 1 up.")
    level = lineage_level(index, level)
    excluded = None if everything else model_part(index).excluded
    op = int(index.raw.values.producer[value])
    if excluded is not None and op >= 0 and excluded[op]:
        excluded = None
    producers = Producers(index, level, excluded, None if everything else value)
    if producers.of(value) == NO_PRODUCER:
        return Lineage(index, value, level, ())
    builder = _LineageBuilder(index, producers, value, depth, most)
    return Lineage(index, value, level, tuple(builder.steps()), tuple(builder.origins()))


def lineage_level(index: Index, level: str | None) -> str:
    """The level of a lineage: ``level`` if given, else "api" where it was recorded, else "aten"."""
    levels = index.raw.ops.level
    recorded = [name for number, name in enumerate(LEVELS) if (levels == number).any()]
    if level is None:
        return recorded[0] if recorded else LEVELS[0]
    if level not in LEVELS:
        raise UsageError(f"{Hint.option('level', level)} is no level; choose {choices_text(LEVELS)}.")
    if recorded and level not in recorded:
        raise NothingMatched(
            f"{Hint.option('level', level)}: this trace has no {level} ops; it has {recorded[0]} ops, "
            f"{Hint.option('level', recorded[0])}."
        )
    return level


class _LineageBuilder:
    """Builds the steps of one lineage."""

    def __init__(
        self, index: Index, producers: Producers, value: int, depth: int | None, most: int | None
    ) -> None:
        self._index = index
        self._producers = producers
        self._value = value
        self._source_cache: dict[int, tuple[list[int], list[int]]] = {}
        root = producers.of(value)
        self._shown = self._ordered(root, depth)[:most]
        self._positions = {producer: at for at, producer in enumerate(self._shown)}

    def steps(self) -> list[LineageStep]:
        """The steps, the most recent first."""
        reached: dict[int, list[int]] = {producer: [] for producer in self._shown}
        reached[self._shown[0]].append(self._value)
        for producer in self._shown:
            for source in self._sources(producer)[0]:
                values = reached.get(self._producers.of(source))
                if values is not None and source not in values:
                    values.append(source)
        before = self._before()
        producers, steps = self._producers, []
        for producer, children in zip(self._shown, self._children(), strict=True):
            op, call = producers.head(producer), producers.call(producer)
            followed, saved = self._sources(producer)
            cut = self._cut(producer)
            produced = [value for value in followed if producers.of(value) != NO_PRODUCER]
            values = sorted(reached[producer], key=lambda value: (value != self._value, value))
            name, phase, module = self._labels(producer, op, call)
            step = LineageStep(
                tuple(values), name, op, call, phase, *self._line(op, call), module,
                sources=tuple(value for value in produced if value not in set(cut)),
                leaves=tuple(value for value in followed if producers.of(value) == NO_PRODUCER),
                saved=tuple(saved), cut=tuple(cut), before=before.get(producer, 0), children=children,
            )  # fmt: skip
            steps.append(step)
        return steps

    def origins(self) -> Iterator[OriginStep]:
        """Where the value has its NaN, its dtype and its sizes from."""
        for each in lineage_origins(self._index, self._producers, self._value):
            producer = each.producer
            if producer == NO_PRODUCER:
                yield OriginStep(each.trait, each.path, "", "", 0, ())
                continue
            op, call = self._producers.head(producer), self._producers.call(producer)
            name, _, _ = self._labels(producer, op, call)
            file, line, _, _ = self._line(op, call)
            yield OriginStep(each.trait, each.path, name, file, line, each.sources)

    def _sources(self, producer: int) -> tuple[list[int], list[int]]:
        """The values to follow, and those that a backward op only read from the forward pass."""
        sources = self._source_cache.get(producer)
        if sources is None:
            producers = self._producers
            followed, saved = producers.sources(producer), []
            if producers.in_backward(producer):
                forward = [
                    value
                    for value in followed
                    if producers.of(value) != NO_PRODUCER and not producers.in_backward(producers.of(value))
                ]
                saved = list(dict.fromkeys(producers.visible_base(value) for value in forward))
                followed = [value for value in followed if value not in set(forward)]
            sources = self._source_cache[producer] = followed, saved
        return sources

    def _ordered(self, root: int, depth: int | None) -> list[int]:
        """The producers at most ``depth`` steps back, each after all its users.

        Among those that may come next, the most recent comes first.
        """
        near = {root}
        queue = deque([(root, 1)])
        waiting: Counter[int] = Counter()
        while queue:
            producer, distance = queue.popleft()
            if depth is not None and distance >= depth:
                continue
            for each in self._producers.predecessors(producer):
                if each not in near:
                    near.add(each)
                    queue.append((each, distance + 1))
        for producer in near:
            waiting.update(each for each in self._producers.predecessors(producer) if each in near)
        ready = [(-self._producers.recency(root), root)]
        done: list[int] = []
        seen = {root}
        while ready:
            _, producer = heapq.heappop(ready)
            done.append(producer)
            for each in self._producers.predecessors(producer):
                if each in near:
                    waiting[each] -= 1
                    if waiting[each] <= 0 and each not in seen:
                        seen.add(each)
                        heapq.heappush(ready, (-self._producers.recency(each), each))
        return done

    def _children(self) -> list[tuple[int, ...]]:
        """The dominator tree: for each producer its children, which are only reached through it, in order."""
        parents = [-1] * len(self._shown)
        depths = [0] * len(self._shown)
        children: list[list[int]] = [[] for _ in self._shown]
        for at, producer in enumerate(self._shown):
            if at:
                depths[at] = depths[parents[at]] + 1
                children[parents[at]].append(at)
            for each in self._producers.predecessors(producer):
                child = self._positions.get(each)
                if child is not None:
                    known = parents[child]
                    parents[child] = at if known < 0 else _common_ancestor(parents, depths, known, at)
        return [tuple(each) for each in children]

    def _before(self) -> dict[int, int]:
        """For each producer with inputs that are not followed: how many producers those came from.

        One pass over all that came before: a bit mask per producer says behind which cuts it is.
        """
        cuts = [producer for producer in self._shown if self._cut(producer)]
        masks: dict[int, int] = {}
        for number, producer in enumerate(cuts):
            for each in {self._producers.of(value) for value in self._cut(producer)}:
                masks[each] = masks.get(each, 0) | 1 << number
        often: Counter[int] = Counter()
        for producer in self._latest_first(list(masks)):
            mask = masks[producer]
            for each in self._producers.predecessors(producer):
                if each not in self._positions:
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
        """All producers behind the starts that are not shown, each after its users."""
        done: list[int] = []
        seen = set(self._positions)
        for start in starts:
            stack: list[tuple[int, list[int]]] = []
            if start not in seen:
                seen.add(start)
                stack.append((start, self._producers.predecessors(start)))
            while stack:
                producer, left = stack[-1]
                if not left:
                    done.append(producer)
                    stack.pop()
                    continue
                each = left.pop()
                if each not in seen:
                    seen.add(each)
                    stack.append((each, self._producers.predecessors(each)))
        return done[::-1]

    def _cut(self, producer: int) -> list[int]:
        """The inputs of a producer that are not followed: theirs is not among those shown."""
        pairs = ((value, self._producers.of(value)) for value in self._sources(producer)[0])
        return [value for value, of in pairs if of != NO_PRODUCER and of not in self._positions]

    def _labels(self, producer: int, op: int, call: int) -> tuple[str, str, str]:
        """Name, phase and module of a producer."""
        if call >= 0:
            row = self._index.module_calls[call]
            return row.module.label, row.phase, row.module.label
        if op < 0:
            return "", PHASES[0], ""
        head = self._index.ops[op]
        module = head.module.label if head.module is not None else ""
        if self._producers.is_backward(producer):
            return f"{head.name} backward", "backward", module
        return head.name, head.phase, module

    def _line(self, op: int, call: int) -> tuple[str, int, str, str]:
        """The innermost line that is not torch's own: file, line, function and text."""
        index = self._index
        shown = index.raw.calls.frame[call] if call >= 0 else index.op_frames[op] if op >= 0 else -1
        frame = int(index.user_frames[shown])
        if frame < 0:
            return "", 0, "", ""
        row = index.frames[frame]
        return row.file, row.line, row.function, row.code


def _common_ancestor(parents: Sequence[int], depths: Sequence[int], one: int, other: int) -> int:
    """The nearest common ancestor of two positions, in the tree so far."""
    while one != other:
        if depths[one] >= depths[other]:
            one = parents[one]
        else:
            other = parents[other]
    return one


_FARTHEST: Final = 2_000  #: values that are looked at on the way back
_MAX_SIZES: Final = 2
_WEIGHTS: Final = ("parameter", "buffer", "state")
_FLOATING: Final = ("float", "bfloat")


@printable
@dataclass(frozen=True, slots=True)
class LineageOrigin:
    """One thing about a value, and the shortest path back to where it began."""

    trait: str  #: ``NaN``, ``f32`` or ``size 61``
    path: tuple[int, ...]  #: the value, those in between, and the first one for which it holds
    producer: int  #: of the last one
    sources: tuple[int, ...]  #: the inputs of that one's producer


def lineage_origins(index: Index, producers: Producers, value: int) -> tuple[LineageOrigin, ...]:
    """The origins of a value's NaN, dtype and sizes, except those its own producer made or a leaf brought."""

    def holds_nonfinite(one: int) -> bool:
        """Whether a tensor, or the one it is a view of, holds a NaN or an infinity."""
        stats, base = index.numbers(one), int(index.raw.values.base[one])
        stats = index.numbers(base) if stats is None and base >= 0 else stats
        return stats is not None and not stats.finite

    origins: list[LineageOrigin | None] = []
    stats = index.numbers(value)
    if stats is not None and not stats.finite:
        origins.append(_origin(producers, value, "NaN" if stats.nans else "Inf", holds_nonfinite))
    if not producers.in_backward(producers.of(value)):  # a gradient has dtype and sizes of its tensor
        origins.append(_dtype_origin(index, producers, value))
        origins += _size_origins(index, producers, value)
    return tuple(one for one in origins if one is not None and len(one.path) > 1)


def _dtype_origin(index: Index, producers: Producers, value: int) -> LineageOrigin | None:
    """The op that made a floating-point dtype out of another one."""
    metas, values = index.raw.metas, index.raw.values
    wanted = metas[int(values.meta[value])].dtype

    def converts(sources: list[int]) -> bool:
        dtypes = {metas[int(values.meta[one])].dtype for one in sources}
        return any(dtype != wanted and dtype.startswith(_FLOATING) for dtype in dtypes)

    def holds(one: int) -> bool:
        return metas[int(values.meta[one])].dtype == wanted and KINDS[values.kind[one]] not in _WEIGHTS

    origin = _origin(producers, value, dtype_name(wanted), holds, converts)
    converted = origin is not None and wanted.startswith(_FLOATING) and converts(list(origin.sources))
    return origin if converted else None


def _size_origins(index: Index, producers: Producers, value: int) -> list[LineageOrigin]:
    """The ops that made the sizes of a value, except those that a leaf brought along."""
    shape = index.raw.metas[int(index.raw.values.meta[value])].shape
    origins = []
    for dimension, size in enumerate(shape):
        if size > 1 and shape.count(size) == 1:
            path, _, maker = size_path(index.values[value], dimension)
            producer = producers.of(path[-1].id) if maker is not None else NO_PRODUCER
            sources = producers.sources(producer) if producer != NO_PRODUCER else []
            if sources and maker is not None and makes_size(maker, size):
                ids = tuple(each.id for each in path)
                origins.append(LineageOrigin(f"size {size}", ids, producer, tuple(sources)))
    return origins[:_MAX_SIZES]


def _origin(
    producers: Producers,
    value: int,
    trait: str,
    holds: Callable[[int], bool],
    begins: Callable[[list[int]], bool] = lambda _: False,
) -> LineageOrigin | None:
    """The nearest value for which ``holds`` is true and was not before; None if it is too far back.

    ``begins`` is true of the sources of an op that makes it anew.
    """
    came_from: dict[int, int] = {value: -1}
    queue = deque([value])
    while queue and len(came_from) < _FARTHEST:
        one = queue.popleft()
        producer = producers.of(one)
        sources = producers.sources(producer) if producer != NO_PRODUCER else []
        before = [source for source in sources if holds(source) and source != one]
        if not before or begins(sources):
            path = [one]
            while came_from[path[-1]] >= 0:
                path.append(came_from[path[-1]])
            return LineageOrigin(trait, tuple(reversed(path)), producer, tuple(sources))
        for source in before:
            if source not in came_from:
                came_from[source] = one
                queue.append(source)
    return None
