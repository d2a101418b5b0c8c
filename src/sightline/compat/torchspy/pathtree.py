"""A call trace as a tree of names: ``layers.0`` and ``layers.1`` are one ``layers`` with two indices.

The numbers in a path are absorbed by the name before them. Children stand in the order they were first seen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class Node:
    """One name in the tree, and how often it was met.

    >>> Node("layers", indices={0, 1}).indices
    {0, 1}
    """

    name: str
    children: dict[str, Node] = field(default_factory=dict)
    count: int = 0  #: how many lines of the trace went through it
    first_seen: int = 0  #: the first of those lines
    parents: list[Node] = field(default_factory=list, repr=False)
    indices: set[int] = field(default_factory=set)

    def child(self, name: str, first_seen: int) -> Node:
        """The child of a name, made where there is none."""
        if name not in self.children:
            self.children[name] = Node(name, first_seen=first_seen, parents=[self])
        return self.children[name]

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
    (3, [0, 1], ['fc'])
    """
    root = Node("root")
    for line, path in enumerate(paths):
        root.count += 1
        node = root
        for segment in [] if path == "root" else path.split("."):
            if _is_index(segment) and node is not root:
                node.indices.add(int(segment))
            else:
                node = node.child(segment, line)
                node.count += 1
    return root


def _is_index(segment: str) -> bool:
    return segment.isascii() and segment.isdigit()


def squash_numeric_indices(tree: Node) -> Node:
    """A tree in which names that are numbers are absorbed too; those at the top stay names.

    >>> layers = Node("layers", {"0": Node("0", {"fc": Node("fc")}), "1": Node("1", {"fc": Node("fc")})})
    >>> squashed = squash_numeric_indices(Node("root", {"layers": layers})).children["layers"]
    >>> sorted(squashed.indices), list(squashed.children)
    ([0, 1], ['fc'])
    """
    root = Node(tree.name, count=tree.count, first_seen=tree.first_seen, indices=set(tree.indices))
    stack = [(tree, root)]
    while stack:
        old, new = stack.pop()
        inside = []
        for child in old.children.values():
            if _is_index(child.name) and new is not root:
                new.indices.add(int(child.name))
                inside.append((child, new))
            else:
                inside.append((child, _merged(child, new)))
        stack += reversed(inside)
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
        kept = [child for child in old.children.values() if child.children or new is root]
        stack += reversed([(child, _merged(child, new)) for child in kept])
    return root


def _merged(old: Node, parent: Node) -> Node:
    """What an old node becomes below a new parent."""
    new = parent.child(old.name, old.first_seen)
    new.count += old.count
    new.first_seen = min(new.first_seen, old.first_seen)
    new.indices |= old.indices
    return new


def save_tree_json(tree: Node, json_path: str | os.PathLike[str]) -> None:
    """Write the tree as ``{name, count, indices, children}``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tree_json(build_tree(["a.10", "a.9"]), Path(folder, "tree.json"))
    ...     json.loads(Path(folder, "tree.json").read_text())["children"]
    [{'name': 'a', 'count': 2, 'indices': [9, 10], 'children': []}]
    """
    plain: dict[int, dict[str, Any]] = {}
    for node, _ in tree.walk():
        plain[id(node)] = {
            "name": node.name, "count": node.count, "indices": sorted(node.indices), "children": [],
        }  # fmt: skip
    for node, _ in tree.walk():
        plain[id(node)]["children"] = [plain[id(child)] for child in node.children.values()]
    Path(json_path).write_text(json.dumps(plain[id(tree)], indent=2), "utf-8")
