"""The parts of a picture of a graph in any format: nested boxes, labelled nodes, labelled arrows."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import Final

from sightline.graph.arguments import REQUIRED, signature
from sightline.graph.graph import Edge, Graph, Node, Ref
from sightline.graph.module_scopes import ScopeTree, relative_path, scope_tree
from sightline.graph.node_names import base_name
from sightline.notation import constant_text, count_text

#: Control characters, and those that reorder or hide text. XML 1.0 has no way to write most of them.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_MAX_TEXT: Final = 34  #: characters of all arguments in a label
#: Arguments with one number for each dimension, often the same one.
_SPATIAL: Final = (
    "kernel_size", "stride", "padding", "dilation", "output_padding", "output_size", "scale_factor"
)  # fmt: skip
#: Arguments that a label shows, the most important first.
_KEY_ARGUMENTS: Final = (
    *_SPATIAL, "groups", "num_groups", "equation", "dim", "dim0", "dim1", "is_causal", "alpha", "approximate",
    "split_size", "chunks", "k", "negative_slope", "diagonal", "reduction", "exponent",
)  # fmt: skip
#: Their defaults for ops that are not in the table of signatures.
_USUAL_DEFAULTS: Final = {
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "output_padding": 0,
    "groups": 1,
    "alpha": 1,
}


def printable(text: str) -> str:
    """The text without control characters; newlines and tabs stay.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def hyperparameters(node: Node) -> str:
    """The key arguments of an op that differ from their defaults: ``stride=2 padding=3``.

    >>> hyperparameters(Node(0, "c", "conv2d", args={"stride": (2, 2), "padding": (3, 3), "groups": 1}))
    'stride=2 padding=3'
    """
    defaults = _USUAL_DEFAULTS | dict(signature(base_name(node.op, "aten")))
    texts: list[str] = []
    for key in _KEY_ARGUMENTS:
        value = node.args.get(key)
        if value is None or value in ([], ()) or isinstance(value, Ref):
            continue
        if isinstance(value, list | tuple) and value and all(part == value[0] for part in value[1:]):
            value = value[0] if key in _SPATIAL else value
        if value == defaults.get(key, REQUIRED):
            continue
        text = f"{key}={constant_text(value)}"
        if len(text) + sum(map(len, texts)) <= _MAX_TEXT:
            texts.append(text)
    return " ".join(texts)


_INLINE: Final = ("parameter", "buffer", "constant")
_MAX_LINES: Final = 4  #: of inlined parameters in a label


@dataclass(slots=True)
class Box:
    """The box of a module call, or of several that are shown as one."""

    title: str
    type: str
    path: str
    repeat: int = 1
    items: list[Node | Box] = field(default_factory=list)
    times: int = 1  #: how many of them are in the box around it


@dataclass(frozen=True, slots=True)
class Label:
    """The text on a node."""

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
    near: bool = False  #: within one box, where it should be straight
    alone: bool = False  #: with room beside it for its label


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
        self._roots = sum(scope.parent < 0 for scope in self._tree.scopes)
        scope_of = dict(self._tree.of_node)
        for edge in graph.edges:  # a node that does not run is drawn in the scope around its readers
            if graph.by_id[edge.source].kind in _INLINE and edge.target not in self._hidden:
                self._tree.widen(scope_of, edge.source, edge.target)
        for node in graph.topological():
            if node.id not in self._hidden:
                box = self._box_of[node.id] = self._box(scope_of.get(node.id, -1))
                box.items.append(node)

    # -- boxes -----------------------------------------------------------------------------------

    def _box_repeats(self) -> list[int]:
        """How many calls of its module each scope stands for; a loop inside a call repeats nodes only."""
        repeats = [0] * len(self._tree.scopes)
        self._counts = [0] * len(self._tree.scopes)
        for id, scope in self._tree.of_node.items():
            repeats[scope] = gcd(repeats[scope], self.graph.by_id[id].repeat)
            self._counts[scope] += 1
        for scope in range(len(repeats) - 1, -1, -1):
            parent = self._tree.scopes[scope].parent
            if parent >= 0:
                repeats[parent] = gcd(repeats[parent], repeats[scope])
                self._counts[parent] += self._counts[scope]
        calls: list[int] = []
        for number, each in enumerate(self._tree.scopes):
            merged = int(self.graph.info.get("folds", {}).get(each.path, [each.path, 1])[1])
            calls.append(merged * (calls[each.parent] if each.parent >= 0 else 1))
            repeats[number] = gcd(repeats[number], calls[number])
        return repeats

    def _box(self, scope: int) -> Box:
        """The box of a scope, made with those around it on first use."""
        missing = []  # no recursion: modules may be nested deeper than Python allows
        while scope >= 0 and scope not in self._boxes:
            missing.append(scope)
            scope = self._tree.scopes[scope].parent
        box = self._boxes[scope] if scope >= 0 else self.top
        for inner in reversed(missing):
            outermost = self._tree.scopes[inner].parent < 0
            if self._counts[inner] >= 2 and not (outermost and self._roots < 2):
                path, around, repeat = self._tree.scopes[inner].path, box, self._repeats[inner] or 1
                title, type = self.path_text(path, around.path), self.graph.modules.get(path, "")
                box = Box(title, type, path, repeat, [], max(1, repeat // around.repeat))
                around.items.append(box)
            self._boxes[inner] = box
        return box

    def walk(self) -> Iterator[tuple[Node | Box | None, Box, int]]:
        """Every node and box in order, with the box around it and its depth; None where that box ends."""
        boxes = [(self.top, iter(self.top.items))]
        while boxes:
            box, items = boxes[-1]
            item = next(items, None)
            yield item, box, len(boxes)
            if item is None:
                boxes.pop()
            elif isinstance(item, Box):
                boxes.append((item, iter(item.items)))

    def path_text(self, path: str, around: str) -> str:
        """A path relative to the one around it: ``attn``; of folded layers ``h.0 … h.11``."""
        short = relative_path(path, around)
        last = self.graph.info.get("folds", {}).get(path, [path])[0]
        return short if last == path else f"{short} … {relative_path(str(last), around)}"

    # -- nodes -----------------------------------------------------------------------------------

    def _inline(self) -> None:
        """Hide parameters, buffers and constants that are written on their readers."""
        readers: dict[int, dict[int, Edge]] = {}
        for edge in self.graph.edges:
            source = self.graph.by_id[edge.source]
            if source.kind in _INLINE:
                readers.setdefault(source.id, {}).setdefault(edge.target, edge)
        if readers:  # a buffer that nothing reads, like ``num_batches_tracked``, is not drawn
            self._hidden.update(
                node.id for node in self.graph.nodes if node.kind in _INLINE and node.id not in readers
            )
        for id, edges in readers.items():
            source = self.graph.by_id[id]
            targets = [self.graph.by_id[target] for target in edges]
            # A module's own parameters are written on each of its calls: arrows to all of them add nothing.
            own = source.kind in ("parameter", "buffer") and all(
                each.module == source.module for each in targets
            )
            if (own or len(targets) == 1) and all(each.kind == "call" for each in targets):
                self._hidden.add(id)
                for target, edge in edges.items():
                    self.inlined.setdefault(target, []).append((edge.argument, source))

    def label(self, node: Node, box: Box) -> Label:
        """The text on a node that is drawn in a box."""
        times = max(1, node.repeat // box.repeat) if node.kind in ("call", "output") else 1
        if node.kind != "call":
            shapes = tuple(self.shape(node, slot) for slot in range(len(node.outputs[:1])))
            title = relative_path(node.op, box.path) if node.kind in _INLINE else node.op
            return Label(title, times, "", shapes)
        collapsed = "collapsed" in node.info
        # The module is written on the node where the box does not show it.
        shown = not node.module or node.module == box.path
        module = node.module if collapsed or not shown else ""
        arguments = hyperparameters(node)
        lines = [arguments] if arguments else []
        if node.info.get("parameters"):
            # A box that stands for several layers describes one of them.
            lines.append(f"{count_text(node.info['parameters'] // box.repeat)} parameters")
        inlined = self.inlined.get(node.id, [])
        for argument, source in inlined[:_MAX_LINES]:
            # The name in its module says more than the argument of ``addmm``.
            own = source.op.rpartition(".")[2] if source.kind in ("parameter", "buffer") else argument
            lines.append(f"{own} {source.outputs[0] if source.outputs else ''}")
        if len(inlined) > _MAX_LINES:
            lines[-1] = f"… {len(inlined) - _MAX_LINES + 1} more"
        return Label(node.op, times, self.path_text(module, box.path) if module else "", tuple(lines))

    def shape(self, node: Node, slot: int) -> str:
        """The shape of an output; ``f32[1, 5…9]`` where it changed from round to round."""
        varies = node.info.get("varies") or []
        if slot < len(varies) and varies[slot]:
            return str(varies[slot])
        return str(node.outputs[slot]) if slot < len(node.outputs) else ""

    def tip(self, node: Node) -> str:
        """The tooltip of a node: its name, arguments, module and source line."""
        texts = {key: constant_text(item) for key, item in node.args.items()}
        args = ", ".join(
            f"{key}={text if len(text) <= 60 else f'{text[:57]}…'}" for key, text in texts.items()
        )
        parts = [f"{node.name} = {node.target or node.op}({args})", node.module, node.source]
        return "\n".join(part for part in parts if part)

    # -- edges -----------------------------------------------------------------------------------

    def arrows(self) -> list[Arrow]:
        """One arrow for all edges from one node to another."""
        groups: dict[tuple[int, int, bool], list[Edge]] = {}
        for edge in self.graph.edges:
            if edge.source not in self._hidden:
                groups.setdefault((edge.source, edge.target, edge.loop), []).append(edge)
        density = _ArrowDensity(groups, self._box_of)
        return [self._arrow(edges, density.is_alone(*key[:2])) for key, edges in groups.items()]

    def _arrow(self, edges: list[Edge], alone: bool) -> Arrow:
        """The arrow for several edges between the same two nodes."""
        source, target = self.graph.by_id[edges[0].source], self.graph.by_id[edges[0].target]
        texts: dict[str, int] = {}
        slots: set[tuple[int, str]] = set()
        for edge in edges:
            text = ""  # a source that does not run has its shape on it
            if source.kind in ("call", "output"):
                text = self.shape(source, edge.slot) or (str(edge.meta) if edge.meta else "")
            if edge.repeat > 1 and (edge.loop or not source.repeat == target.repeat == edge.repeat):
                text = f"{text} ×{edge.repeat}".strip()
            if (edge.slot, text) not in slots:  # one tensor for several arguments is listed once
                texts[text] = texts.get(text, 0) + 1
            slots.add((edge.slot, text))
        lines = [f"{count} × {text}" if count > 1 and text else text for text, count in texts.items()]
        names = ", ".join(edge.argument for edge in edges if edge.argument)
        tip = f"{source.name} → {target.name}: {names}"
        near = self._box_of[source.id] is self._box_of[target.id]
        text = "\n".join(filter(None, lines))
        return Arrow(source.id, target.id, text, edges[0].loop, tip, near, alone)


class _ArrowDensity:
    """How many arrows pass beside one in the box it leads into: two labels side by side need room."""

    def __init__(self, arrows: Iterable[tuple[int, int, bool]], box_of: dict[int, Box]) -> None:
        self._box_of = box_of
        self._position = {id: at for at, id in enumerate(box_of)}
        self._leaving, self._entering = Counter[int](), Counter[int]()
        self._starts: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        for source, target, _ in arrows:
            self._leaving[source] += 1
            self._entering[target] += 1
            span = sorted((self._position[source], self._position[target]))
            for positions, at in zip((self._starts, self._ends), span, strict=True):
                positions.setdefault(id(box_of[target]), []).append(at)
        for each in (*self._starts.values(), *self._ends.values()):
            each.sort()

    def is_alone(self, source: int, target: int) -> bool:
        """Whether it is the only arrow of its ends, and at most one other passes beside it."""
        box, at = id(self._box_of[target]), self._position[source]
        passing = bisect_right(self._starts[box], at) - bisect_right(self._ends[box], at)
        return self._leaving[source] == self._entering[target] == 1 and passing <= 2  # itself and another
