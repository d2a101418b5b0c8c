"""What a picture of a graph shows, whatever draws it: boxes in boxes, labelled nodes, labelled edges."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Any, Final

from sightline.graph.arguments import REQUIRED, signature
from sightline.graph.graph import Edge, Graph, Node, Ref
from sightline.graph.module_scopes import ScopeTree, scope_tree
from sightline.graph.node_names import base_name
from sightline.notation import constant_text, count_text
from sightline.trace.data import TensorMeta

_MOST_TEXT: Final = 34  #: characters
#: One number for each dimension, and often the same one.
_SPATIAL: Final = (
    "kernel_size", "stride", "padding", "dilation", "output_padding", "output_size", "scale_factor"
)  # fmt: skip
#: Arguments one looks for in a picture, the most telling first.
_TELLING: Final = (
    *_SPATIAL, "groups", "num_groups", "equation", "dim", "dim0", "dim1", "is_causal", "alpha", "approximate",
    "split_size", "chunks", "k", "negative_slope", "diagonal", "reduction", "exponent",
)  # fmt: skip
#: What they mostly are, where the op is not in the table of signatures.
_USUAL: Final = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1, "alpha": 1}


def hyperparameters(node: Node) -> str:
    """What an op was told, where it is not what it does anyway: ``stride=2 padding=3``.

    >>> hyperparameters(Node(0, "c", "conv2d", args={"stride": (2, 2), "padding": (3, 3), "groups": 1}))
    'stride=2 padding=3'
    """
    known = _USUAL | dict(signature(base_name(node.op, "aten")))
    texts: list[str] = []
    for key in _TELLING:
        value = node.args.get(key)
        if value is None or value in ([], ()) or isinstance(value, Ref):
            continue
        if isinstance(value, list | tuple) and value and all(part == value[0] for part in value[1:]):
            value = value[0] if key in _SPATIAL else value
        if value == known.get(key, REQUIRED):
            continue
        text = f"{key}={constant_text(value)}"
        if len(text) + sum(map(len, texts)) <= _MOST_TEXT:
            texts.append(text)
    return " ".join(texts)


_INLINE = ("parameter", "buffer", "constant")
_MOST_LINES = 4


@dataclass(slots=True)
class Box:
    """A module call, or several that are shown as one."""

    title: str
    type: str
    path: str
    repeat: int = 1
    items: list[Node | Box] = field(default_factory=list)
    times: int = 1  #: how many of it there are in the box around it


@dataclass(frozen=True, slots=True)
class Label:
    """What is written on a node."""

    title: str
    times: int
    module: str = ""
    lines: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return f"{self.title} ×{self.times}" if self.times > 1 else self.title


@dataclass(frozen=True, slots=True)
class Arrow:
    """An edge as drawn."""

    source: int
    target: int
    text: str
    loop: bool
    tip: str
    near: bool = False  #: within one box: worth keeping straight
    alone: bool = False  #: with hardly anything beside it: there is room for its label


class Drawing:
    """The parts of a picture of one graph."""

    def __init__(self, graph: Graph, *, inline: bool = True) -> None:
        self.graph = graph
        self._tree: ScopeTree = scope_tree(graph)
        self._boxes: dict[int, Box] = {}
        self._box_of: dict[int, Box] = {}
        self._repeats = self._box_repeats()
        self.inlined: dict[int, list[tuple[str, Node]]] = {}
        self._hidden: set[int] = set()
        if inline:
            self._inline()
        self.top = Box("", "", "")
        self._fill()

    # -- boxes -----------------------------------------------------------------------------------

    def _box_repeats(self) -> list[int]:
        """For how many calls of its module each scope stands; a loop inside a call repeats nodes only."""
        found = [0] * len(self._tree.scopes)
        self._counts = [0] * len(self._tree.scopes)
        for id, scope in self._tree.of_node.items():
            found[scope] = gcd(found[scope], self.graph.by_id[id].repeat)
            self._counts[scope] += 1
        for scope in range(len(found) - 1, -1, -1):
            parent = self._tree.scopes[scope].parent
            if parent >= 0:
                found[parent] = gcd(found[parent], found[scope])
                self._counts[parent] += self._counts[scope]
        calls: list[int] = []
        for number, each in enumerate(self._tree.scopes):
            merged = int(self.graph.info.get("folds", {}).get(each.path, [each.path, 1])[1])
            calls.append(merged * (calls[each.parent] if each.parent >= 0 else 1))
            found[number] = gcd(found[number], calls[number])
        return found

    def _fill(self) -> None:
        homes = self._homes()
        for node in self.graph.topological():
            if node.id not in self._hidden:
                box = self._box_of[node.id] = self._box(homes.get(node.id, -1))
                box.items.append(node)

    def _homes(self) -> dict[int, int]:
        """The scope each node is drawn in: of what does not run, the one that all its readers are in."""
        homes = dict(self._tree.of_node)
        for edge in self.graph.edges:
            source = self.graph.by_id[edge.source]
            if source.kind in _INLINE and edge.target not in self._hidden:
                home = self._tree.of_node.get(edge.target, -1)
                known = homes.get(edge.source)
                homes[edge.source] = home if known is None else self._tree.common(known, home)
        return homes

    def _box(self, scope: int) -> Box:
        missing = []  # a loop: modules may be nested deeper than Python's calls
        while scope >= 0 and scope not in self._boxes:
            missing.append(scope)
            scope = self._tree.scopes[scope].parent
        box = self._boxes[scope] if scope >= 0 else self.top
        for inner in reversed(missing):
            outermost = self._tree.scopes[inner].parent < 0
            if self._counts[inner] >= 2 and not (outermost and self._roots < 2):
                around, box = box, self._new_box(inner, box)
                around.items.append(box)
            self._boxes[inner] = box
        return box

    def walk(self) -> Iterator[tuple[Node | Box | None, Box, int]]:
        """Every node and box with the box it is in and how deep, in order; None where that box ends."""
        boxes = [(self.top, iter(self.top.items))]
        while boxes:
            box, items = boxes[-1]
            item = next(items, None)
            yield item, box, len(boxes)
            if item is None:
                boxes.pop()
            elif isinstance(item, Box):
                boxes.append((item, iter(item.items)))

    @cached_property
    def _roots(self) -> int:
        return sum(scope.parent < 0 for scope in self._tree.scopes)

    def _new_box(self, scope: int, around: Box) -> Box:
        path = self._tree.scopes[scope].path
        repeat = self._repeats[scope] or 1
        type = self.graph.modules.get(path, "")
        return Box(self.path_text(path, around.path), type, path, repeat, [], max(1, repeat // around.repeat))

    def path_text(self, path: str, around: str) -> str:
        """A path as said inside another: ``attn``; of layers shown once ``h.0 … h.11``."""
        short = _within(path, around)
        last = self.graph.info.get("folds", {}).get(path, [path])[0]
        return short if last == path else f"{short} … {_within(str(last), around)}"

    # -- nodes -----------------------------------------------------------------------------------

    def _inline(self) -> None:
        readers: dict[int, dict[int, Edge]] = {}
        for edge in self.graph.edges:
            source = self.graph.by_id[edge.source]
            if source.kind in _INLINE:
                readers.setdefault(source.id, {}).setdefault(edge.target, edge)
        if readers:  # a buffer that nothing reads (``num_batches_tracked``) would only float about
            self._hidden.update(
                node.id for node in self.graph.nodes if node.kind in _INLINE and node.id not in readers
            )
        for id, edges in readers.items():
            source = self.graph.by_id[id]
            targets = [self.graph.by_id[target] for target in edges]
            # The calls of one module each have its parameters: arrows to all of them would say nothing.
            own = source.kind in ("parameter", "buffer") and all(
                each.module == source.module for each in targets
            )
            if (own or len(targets) == 1) and all(each.kind == "call" for each in targets):
                self._hidden.add(id)
                for target, edge in edges.items():
                    self.inlined.setdefault(target, []).append((edge.argument, source))

    def label(self, node: Node, box: Box) -> Label:
        """What is written on a node that is drawn in a box."""
        times = max(1, node.repeat // box.repeat) if node.kind in ("call", "output") else 1
        if node.kind != "call":
            shapes = tuple(self.shape(node, slot) for slot in range(len(node.outputs[:1])))
            title = _within(node.op, box.path) if node.kind in _INLINE else node.op
            return Label(title, times, "", shapes)
        collapsed = "collapsed" in node.info
        # The module of a node says something where no box does.
        module = node.module if collapsed or not self._boxed(node, box) else ""
        told = hyperparameters(node)
        lines = [told] if told else []
        if node.info.get("parameters"):
            # In a box that stands for several layers, what is said is true of one of them.
            lines.append(f"{count_text(node.info['parameters'] // box.repeat)} parameters")
        held = self.inlined.get(node.id, [])
        lines += [
            f"{_part(name, source)} {_metas(source.outputs[:1])}" for name, source in held[:_MOST_LINES]
        ]
        if len(held) > _MOST_LINES:
            lines[-1] = f"… {len(held) - _MOST_LINES + 1} more"
        title = node.op
        return Label(title, times, self.path_text(module, box.path) if module else "", tuple(lines))

    def _boxed(self, node: Node, box: Box) -> bool:
        return node.module == box.path or not node.module

    def shape(self, node: Node, slot: int) -> str:
        """The shape of an output; ``f32[1, 5…9]`` where it changed from round to round."""
        varies = node.info.get("varies") or []
        if slot < len(varies) and varies[slot]:
            return str(varies[slot])
        return str(node.outputs[slot]) if slot < len(node.outputs) else ""

    def tip(self, node: Node) -> str:
        """More about a node, for where there is room: its name, arguments, and place."""
        args = ", ".join(f"{key}={_short(item)}" for key, item in node.args.items())
        parts = [f"{node.name} = {node.target or node.op}({args})", node.module, node.source]
        return "\n".join(part for part in parts if part)

    # -- edges -----------------------------------------------------------------------------------

    def arrows(self) -> list[Arrow]:
        """The edges; what goes from one node to another is one arrow, however many tensors it is."""
        found: dict[tuple[int, int, bool], list[Edge]] = {}
        for edge in self.graph.edges:
            if edge.source in self._hidden:
                continue
            found.setdefault((edge.source, edge.target, edge.loop), []).append(edge)
        beside = _Beside(found, self._box_of)
        return [self._arrow(edges, beside.little(*key[:2])) for key, edges in found.items()]

    def _arrow(self, edges: list[Edge], alone: bool) -> Arrow:
        source, target = self.graph.by_id[edges[0].source], self.graph.by_id[edges[0].target]
        texts: dict[str, int] = {}
        slots: set[tuple[int, str]] = set()
        for edge in edges:
            text = self._edge_text(edge, source, target)
            if (edge.slot, text) not in slots:  # one tensor for several arguments is told once
                texts[text] = texts.get(text, 0) + 1
            slots.add((edge.slot, text))
        lines = [f"{count} × {text}" if count > 1 and text else text for text, count in texts.items()]
        names = ", ".join(edge.argument for edge in edges if edge.argument)
        tip = f"{source.name} → {target.name}: {names}"
        near = self._box_of[source.id] is self._box_of[target.id]
        text = "\n".join(filter(None, lines))
        return Arrow(source.id, target.id, text, edges[0].loop, tip, near, alone)

    def _edge_text(self, edge: Edge, source: Node, target: Node) -> str:
        text = self.shape(source, edge.slot) or (str(edge.meta) if edge.meta else "")
        if source.kind not in ("call", "output"):
            text = ""  # it is written on the node
        if edge.repeat > 1 and (edge.loop or source.repeat != target.repeat or edge.repeat != source.repeat):
            text = f"{text} ×{edge.repeat}".strip()
        return text


class _Beside:
    """How much runs beside an arrow in the box it leads into: two labels side by side need room."""

    def __init__(self, arrows: Iterable[tuple[int, int, bool]], box_of: dict[int, Box]) -> None:
        self._box_of = box_of
        self._place = {id: at for at, id in enumerate(box_of)}
        self._leaving, self._entering = Counter[int](), Counter[int]()
        self._starts: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        for source, target, _ in arrows:
            self._leaving[source] += 1
            self._entering[target] += 1
            span = sorted((self._place[source], self._place[target]))
            for places, at in zip((self._starts, self._ends), span, strict=True):
                places.setdefault(id(box_of[target]), []).append(at)
        for each in (*self._starts.values(), *self._ends.values()):
            each.sort()

    def little(self, source: int, target: int) -> bool:
        """Whether it is all that its ends have, and at most one other arrow passes by."""
        box, at = id(self._box_of[target]), self._place[source]
        passing = bisect_right(self._starts[box], at) - bisect_right(self._ends[box], at)
        return self._leaving[source] == self._entering[target] == 1 and passing <= 2  # itself and another


def _within(path: str, around: str) -> str:
    return path[len(around) + 1 :] if around and path.startswith(f"{around}.") else path


def _part(argument: str, source: Node) -> str:
    """What a parameter is called in its module, which says more than the argument of ``addmm``."""
    return source.op.rpartition(".")[2] if source.kind in ("parameter", "buffer") else argument


def _metas(metas: tuple[TensorMeta, ...]) -> str:
    return ", ".join(map(str, metas))


def _short(item: Any) -> str:
    text = constant_text(item)
    return text if len(text) <= 60 else f"{text[:57]}…"
