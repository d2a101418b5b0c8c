"""The tree of a call trace as a picture.

`Digraph` has what people use of the class of this name in the ``graphviz`` package, which is not needed; the
program ``dot`` is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sightline.compat.torchspy.pathtree import Node, prune_leaves
from sightline.errors import UsageError
from sightline.graph.formats.dot import quoted
from sightline.graph.formats.files import drawn


class Digraph:
    """A graph in graphviz' language.

    >>> dot = Digraph()
    >>> dot.attr(rankdir="TB")
    >>> dot.node("n0", "encoder x 2")
    >>> print(dot.source, end="")
    digraph {
        graph [rankdir="TB"]
        n0 [label="encoder x 2"]
    }
    """

    def __init__(self, format: str = "png") -> None:
        self.format = format
        self.graph_attr: dict[str, str] = {}
        self.body: list[str] = []

    def attr(self, **attributes: Any) -> None:
        """Set attributes of the graph."""
        self.graph_attr.update({name: str(value) for name, value in attributes.items()})

    def node(self, name: str, label: str | None = None) -> None:
        """Add a node."""
        self.body.append(f"    {name} [label={quoted(name if label is None else label)}]\n")

    def edge(self, tail_name: str, head_name: str) -> None:
        """Add an edge."""
        self.body.append(f"    {tail_name} -> {head_name}\n")

    @property
    def source(self) -> str:
        """The text that ``dot`` reads."""
        pairs = " ".join(f"{name}={quoted(value)}" for name, value in self.graph_attr.items())
        return "".join(["digraph {\n", f"    graph [{pairs}]\n" if pairs else "", *self.body, "}\n"])

    def pipe(self, format: str | None = None) -> bytes:
        """The picture itself."""
        return drawn(self.source, _known(format or self.format), len(self.body))

    def render(
        self, filename: str | os.PathLike[str], cleanup: bool = False, format: str | None = None
    ) -> str:
        """Write the picture and, without ``cleanup``, its text; returns the picture's file.

        The end of the name is added only where it is not there: ``g`` and ``g.png`` both write ``g.png``.
        """
        kind = _known(format or self.format)
        given = Path(filename)
        ends = given.suffix.lower() == f".{kind}"
        picture = given if ends else given.with_name(f"{given.name}.{kind}")
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(self.pipe(kind))
        if not cleanup:
            (given.with_suffix(".gv") if ends else given).write_text(self.source, "utf-8")
        return str(picture)


def _known(format: str) -> str:
    if format not in ("png", "svg", "pdf"):
        raise UsageError(f"{format!r} is no format of a picture here; choose png, svg or pdf.")
    return format


def construct_graph(
    tree: Node, show_repetition: bool = True, prune_leaves_flag: bool = True, squash_name: bool = False
) -> Digraph:
    """The graph of a tree, top down; a name that has several indices says how many.

    >>> from sightline.compat.torchspy.pathtree import build_tree
    >>> tree = build_tree(["encoder.layers.0.fc", "encoder.layers.1.fc"])
    >>> "layers x 2" in construct_graph(tree).source
    True

    ``squash_name`` draws equal names once, wherever they stand.
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
    >>> dot.graph_attr
    {'dpi': '150', 'size': '6,4!', 'ratio': 'fill'}
    """
    dot.attr(dpi=str(dpi))
    if figwidth is not None and figheight is not None:
        dot.attr(size=f"{figwidth},{figheight}!", ratio="fill")
    elif figwidth is not None or figheight is not None:
        dot.attr(size=f"{figheight if figwidth is None else figwidth}!")
