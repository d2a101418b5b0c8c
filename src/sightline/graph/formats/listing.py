"""A graph as text, a line for each node, at 100 columns: the output of ``print(graph)``."""

from __future__ import annotations

import textwrap
from typing import Final

from sightline.graph.formats.drawing import printable
from sightline.graph.graph import Graph, Node, Ref
from sightline.notation import constant_text

_WIDTH: Final = 100
_MAX_LINES: Final = 400


def listing(graph: Graph) -> str:
    """Name, op, arguments, result and module of every node.

    >>> x = Node(0, "x", "x", "input")
    >>> print(listing(Graph((x, Node(1, "relu", "relu", args={"self": Ref("x")})), (), "net")))
    net: 2 nodes, 0 edges
      x     input
      relu  relu(x)
    """
    nodes = graph.topological()
    total = sum(node.repeat for node in nodes)
    head = f"{graph.name or 'graph'}: {len(nodes)} nodes, {len(graph.edges)} edges"
    head += f", standing for {total} nodes" if total > len(nodes) else ""
    lines = [_cut(" ".join(printable(head).split()), _WIDTH)]
    if note := graph.info.get("not_recorded"):
        lines += textwrap.wrap(printable(f"# {note}"), _WIDTH, subsequent_indent="# ")
    shown = nodes if len(nodes) <= _MAX_LINES else nodes[: _MAX_LINES - 1]
    width = min(28, max((len(node.name) for node in shown), default=0))
    lines += [_line(node, width) for node in shown]
    if len(shown) < len(nodes):
        lines.append(f"  … {len(nodes) - len(shown)} more: fold, collapse or prune to see less of them")
    return "\n".join(lines)


def _line(node: Node, width: int) -> str:
    name = node.name if len(node.name) <= width else f"{node.name[: width - 1]}…"
    end = f" ×{node.repeat}" if node.repeat > 1 else ""
    if node.outputs:
        end += f" -> {', '.join(map(str, node.outputs[:3]))}{', …' if len(node.outputs) > 3 else ''}"
    if node.module and node.kind == "call":
        end += f"  [{node.module}]"
    if node.kind in ("call", "output"):
        room = _WIDTH - 6 - width - len(node.op) - len(end)  # arguments are cut before the result
        args = [  # tensors by the node they come from, the rest by name; None is left out
            _cut(repr(item) if isinstance(item, Ref) else f"{key}={constant_text(item)}", 40)
            for key, item in node.args.items()
            if item is not None
        ]
        text = f"{node.op}({_cut(', '.join(args), max(room, 12))})"
    else:
        text = node.kind if node.op in (node.name, node.kind) else f"{node.kind} {node.op}"
    return _cut(" ".join(printable(f"  {name:<{width}}  {text}{end}").splitlines()), _WIDTH)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
