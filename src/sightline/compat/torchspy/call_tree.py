"""A call trace as a tree of names, and that tree as a picture.

``layers.0`` and ``layers.1`` become one ``layers`` with two indices. Its command: ``sightline trace-graph``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sightline.compat.torchspy.digraph import Digraph


@dataclass(eq=False)
class Node:
    """One name in the tree, with the indices that followed it.

    >>> layers = build_tree(["layers.0.fc", "layers.1.fc"]).children["layers"]
    >>> layers.count, sorted(layers.indices)
    (2, ['0', '1'])
    """

    name: str
    children: dict[str, Node] = field(default_factory=dict)
    count: int = 1  #: how many indices it has, at least 1
    first_seen: int = 0  #: the first line of the trace that has it
    parents: list[Node] = field(default_factory=list, repr=False)
    indices: set[str] = field(default_factory=set)

    def child(self, name: str, first_seen: int) -> Node:
        """The child of a name, added if it does not exist."""
        if name not in self.children:
            self.children[name] = Node(name, first_seen=first_seen, parents=[self])
        return self.children[name]

    def add_indices(self, indices: Iterable[str]) -> None:
        """Add indices, and count them."""
        self.indices.update(indices)
        self.count = max(self.count, len(self.indices))

    def walk(self) -> Iterator[tuple[Node, int]]:
        """All nodes with their depths, parents first, without recursion."""
        stack = [(self, 0)]
        while stack:
            node, depth = stack.pop()
            yield node, depth
            stack += [(child, depth + 1) for child in reversed(list(node.children.values()))]


def parse_trace(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a file that ``CallTracer.save_trace`` wrote, without empty ones.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "trace.txt")
    ...     written = file.write_text("a.b\\n\\na")
    ...     parse_trace(file)
    ['a.b', 'a']
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"trace file not found: {file}")
    paths = [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    if not paths:
        raise ValueError("trace file is empty")
    return paths


def build_tree(paths: Iterable[str]) -> Node:
    """The tree of paths; the root's own line, ``root``, is the root itself.

    >>> layers = build_tree(["layers.0.fc", "layers.1.fc", "layers.1", "root"]).children["layers"]
    >>> layers.count, sorted(layers.indices), list(layers.children)
    (2, ['0', '1'], ['fc'])
    """
    root = Node("root")
    for line, path in enumerate(paths):
        node = root
        for segment in [] if path == "root" else path.split("."):
            if _is_index(segment) and node is not root:
                node.add_indices([segment])
            else:
                node = node.child(segment, line)
    return root


def _is_index(segment: str) -> bool:
    return segment.isascii() and segment.isdigit()


def squash_numeric_indices(tree: Node) -> Node:
    """A tree in which names that are numbers become indices; those at the top stay names.

    >>> layers = Node("layers", {"0": Node("0", {"fc": Node("fc")}), "1": Node("1", {"fc": Node("fc")})})
    >>> squashed = squash_numeric_indices(Node("root", {"layers": layers})).children["layers"]
    >>> sorted(squashed.indices), list(squashed.children)
    (['0', '1'], ['fc'])
    """
    root = Node(tree.name, count=tree.count, first_seen=tree.first_seen, indices=set(tree.indices))
    stack = [(tree, root)]
    while stack:
        old, new = stack.pop()
        children = []
        for child in old.children.values():
            if _is_index(child.name) and new is not root:
                new.add_indices([child.name])
                children.append((child, new))
            else:
                children.append((child, _merge_into(child, new)))
        stack += reversed(children)
    return root


def prune_leaves(tree: Node) -> Node:
    """A tree without its last names; a name alone at the top stays.

    >>> pruned = prune_leaves(build_tree(["a.b.c", "a.b.d", "single"]))
    >>> list(pruned.children), list(pruned.children["a"].children["b"].children)
    (['a', 'single'], [])
    """
    root = Node(tree.name, count=tree.count, first_seen=tree.first_seen, indices=set(tree.indices))
    stack = [(tree, root)]
    while stack:
        old, new = stack.pop()
        remaining = [child for child in old.children.values() if child.children or new is root]
        stack += reversed([(child, _merge_into(child, new)) for child in remaining])
    return root


def _merge_into(old: Node, parent: Node) -> Node:
    """Add a node of the old tree below a new parent."""
    new = parent.child(old.name, old.first_seen)
    new.count = max(new.count, old.count)
    new.first_seen = min(new.first_seen, old.first_seen)
    new.add_indices(old.indices)
    return new


def save_tree_json(tree: Node, json_path: str | os.PathLike[str]) -> None:
    """Write the tree as ``{name, count, indices, children}``; the count is that of the indices.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tree_json(build_tree(["a.10", "a.9"]), Path(folder, "tree.json"))
    ...     json.loads(Path(folder, "tree.json").read_text())["children"]
    [{'name': 'a', 'count': 2, 'indices': ['9', '10'], 'children': []}]
    """
    plain: dict[int, dict[str, Any]] = {}
    for node, _ in tree.walk():
        plain[id(node)] = {
            "name": node.name, "count": len(node.indices), "indices": sorted(node.indices, key=int),
            "children": [],
        }  # fmt: skip
    for node, _ in tree.walk():
        plain[id(node)]["children"] = [plain[id(child)] for child in node.children.values()]
    Path(json_path).write_text(json.dumps(plain[id(tree)], indent=2), "utf-8")


def construct_graph(
    tree: Node, show_repetition: bool = True, prune_leaves_flag: bool = True, squash_name: bool = False
) -> Digraph:
    """The graph of a tree, top down; a name with several indices shows their number.

    >>> tree = build_tree(["encoder.layers.0.fc", "encoder.layers.1.fc"])
    >>> "layers x 2" in construct_graph(tree).source
    True

    ``squash_name`` draws equal names once, wherever they are.
    """
    if prune_leaves_flag:
        tree = prune_leaves(tree)
    groups: dict[Any, list[Node]] = {}
    for node, depth in tree.walk():
        if depth:
            groups.setdefault(node.name if squash_name else id(node), []).append(node)
    ordered = sorted(groups.values(), key=lambda group: min(node.first_seen for node in group))
    dot = Digraph()
    dot.attr(rankdir="TB")
    ids: dict[int, str] = {}
    for number, group in enumerate(ordered):
        repeats = sum(len(node.indices) for node in group)
        name = group[0].name
        dot.node(f"n{number}", f"{name} x {repeats}" if show_repetition and repeats > 1 else name)
        ids |= {id(node): f"n{number}" for node in group}
    edges = ((ids[id(node)], ids[id(child)]) for group in ordered for node in group
             for child in node.children.values())  # fmt: skip
    for tail, head in dict.fromkeys(edges):
        dot.edge(tail, head)
    return dot


def apply_graph_render_options(
    dot: Any, dpi: int = 150, figwidth: float | None = None, figheight: float | None = None
) -> None:
    """Set the resolution, and the size in inches; with both sides given the picture fills them.

    >>> dot = Digraph()
    >>> apply_graph_render_options(dot, figwidth=6, figheight=4)
    >>> print(dot.source.expandtabs(4), end="")
    digraph {
        dpi=150
        ratio=fill size="6,4!"
    }
    """
    dot.attr(dpi=dpi)
    if figwidth is not None and figheight is not None:
        dot.attr(size=f"{figwidth},{figheight}!", ratio="fill")
    elif figwidth is not None or figheight is not None:
        dot.attr(size=f"{figheight if figwidth is None else figwidth}!")


def render_graph(
    tree: Node, show_repetition: bool = True, prune_leaves_flag: bool = True, squash_name: bool = False,
    dpi: int = 150, figwidth: float | None = None, figheight: float | None = None,
) -> Digraph:  # fmt: skip
    """The graph of a tree with its resolution and size: `construct_graph` and `apply_graph_render_options`.

    >>> print(render_graph(build_tree(["fc"]), dpi=72).source.expandtabs(4), end="")
    digraph {
        rankdir=TB
        n0 [label=fc]
        dpi=72
    }
    """
    dot = construct_graph(tree, show_repetition, prune_leaves_flag, squash_name)
    apply_graph_render_options(dot, dpi, figwidth, figheight)
    return dot
