"""A graph in graphviz' language, DOT, with every string of the recording escaped."""

from __future__ import annotations

import html
from typing import Final

from sightline.graph.formats.drawing import Arrow, Box, Drawing, printable
from sightline.graph.graph import Graph, Node

#: Fill, border and shape of each kind of node.
NODE_STYLES: Final = {
    "input": ("#d3f9d8", "#2b8a3e", "oval"),
    "output": ("#ffe3e3", "#c92a2a", "oval"),
    "parameter": ("#e5dbff", "#7048e8", "box"),
    "buffer": ("#f3f0ff", "#9775fa", "box"),
    "constant": ("#f1f3f5", "#868e96", "box"),
    "call": ("#ffffff", "#495057", "box"),
    "module": ("#dbeafe", "#1c7ed6", "box"),
    "backward": ("#fff4e6", "#e8590c", "box"),
}
_FONT: Final = "Helvetica,Arial,sans-serif"
_HEAD: Final = f"""\
  graph [rankdir=TB, fontname="{_FONT}", fontsize=11, nodesep=0.25, ranksep=0.2, splines=spline,
         bgcolor="white", compound=true, newrank=true, margin=0.1];
  node [fontname="{_FONT}", fontsize=11, style="filled,rounded", margin="0.11,0.06", height=0.28, penwidth=1];
  edge [fontname="{_FONT}", fontsize=9, fontcolor="#5c636a", color="#868e96", arrowsize=0.6];"""
_LEFT: Final = "\\l"  #: ends a left-aligned line
_SHADES: Final = ("#f8f9fa", "#f1f3f5", "#e9ecef", "#e3e7eb")


def to_dot(graph: Graph, *, inline: bool = True) -> str:
    """The graph in graphviz' language; ``inline=False`` draws every parameter as a node.

    >>> print(to_dot(Graph((Node(0, "x", "x", "input"),), (), "net")).splitlines()[0])
    digraph "net" {
    """
    drawing = Drawing(graph, inline=inline)
    lines = [f"digraph {quoted(graph.name or 'graph')} {{", _HEAD]
    for item, box, depth in drawing.walk():
        if isinstance(item, Node):
            lines.append("  " * depth + _node(drawing, item, box))
        elif item is not None:
            lines += _box_lines(item, len(lines), depth)
        elif depth > 1:
            lines.append("  " * (depth - 1) + "}")
    lines += [_arrow(arrow) for arrow in drawing.arrows()]
    lines.append("}")
    return "\n".join(lines) + "\n"


def quoted(text: str, newline: str = "\\n") -> str:
    """A string of DOT, in which only the quote and the backslash are special.

    >>> print(quoted('a "b"'))
    "a \\"b\\""
    """
    plain = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", newline)
    return f'"{plain}"'


def escaped(text: str) -> str:
    """The text escaped for XML and graphviz' HTML-like labels, on one line.

    >>> escaped("</script>\\n&")
    '&lt;/script&gt; &amp;'
    """
    plain = printable(text)
    return html.escape(" ".join(plain.split()) if "\n" in plain or "\t" in plain else plain) or " "


def _box_lines(box: Box, number: int, depth: int) -> list[str]:
    """The lines that open a box."""
    pad, several = "  " * depth, box.times > 1
    title = f"<B>{escaped(box.title or box.type)}</B>"
    if box.type and box.title:
        title += f'  <FONT COLOR="#868e96">{escaped(box.type)}</FONT>'
    if several:
        title += f'  <FONT COLOR="#d9480f"><B>×{box.times}</B></FONT>'
    border = 'color="#d9480f", penwidth=1.6' if several else 'color="#ced4da", penwidth=1'
    shade = _SHADES[min(depth - 1, len(_SHADES) - 1)]
    style = (
        f'label=<{title}>, labeljust=l, style="rounded,filled", fillcolor="{shade}", '
        f"{border}, fontsize=10, margin=8, tooltip={quoted(box.path)}"
    )
    return [f"{pad}subgraph cluster_{number} {{", f"{pad}  graph [{style}];"]


def _node(drawing: Drawing, node: Node, box: Box) -> str:
    kind = node.kind
    if kind == "call" and "collapsed" in node.info:
        kind = "module"
    elif kind == "call" and node.phase in ("backward", "recompute"):
        kind = "backward"
    fill, border, shape = NODE_STYLES[kind]
    label = drawing.label(node, box)
    head = f"<B>{escaped(label.title)}</B>"
    if label.times > 1:
        head += f' <FONT COLOR="#d9480f"><B>×{label.times}</B></FONT>'
    small = [f'<FONT POINT-SIZE="9" COLOR="#1864ab">{escaped(label.module)}</FONT>'] if label.module else []
    small += [
        f'<FONT POINT-SIZE="8.5" COLOR="#5c636a">{escaped(line)}</FONT>' for line in label.lines if line
    ]
    return (
        f"n{_key(node.id)} [label=<{'<BR/>'.join([head, *small])}>, shape={shape}, "
        f'fillcolor="{fill}", color="{border}", tooltip={quoted(drawing.tip(node))}];'
    )


def _arrow(arrow: Arrow) -> str:
    lines = [f"  {line}\n" for line in arrow.text.splitlines()]
    attributes = [f"label={quoted(''.join(lines), _LEFT)}"] if lines else []
    attributes.append(f"tooltip={quoted(arrow.tip)}")
    ends = [f"n{_key(arrow.source)}", f"n{_key(arrow.target)}"]
    if arrow.loop:
        # Laid out as if it went from the first node to the last, it gets a path of its own.
        attributes.append('style=dashed, color="#d9480f", fontcolor="#d9480f", dir=back')
        ends.reverse()
    elif arrow.near:
        attributes.append("weight=4")
    if arrow.alone and len(lines) == 1:
        attributes.append("labelfloat=true")  # there is room: the line does not have to bend around its label
    return f"  {' -> '.join(ends)} [{', '.join(attributes)}];"


def _key(id: int) -> str:
    return str(id) if id >= 0 else f"_{-id}"
