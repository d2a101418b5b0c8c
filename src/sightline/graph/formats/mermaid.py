"""A Mermaid flowchart, which Markdown viewers draw."""

from __future__ import annotations

from typing import Final

from sightline.graph.formats.drawing import Drawing, printable
from sightline.graph.graph import Graph, Node

_SHAPES: Final = {"input": ('(["', '"])'), "output": ('(["', '"])'), "call": ('["', '"]')}
_CLASSES: Final = """\
  classDef input fill:#d3f9d8,stroke:#2b8a3e
  classDef output fill:#ffe3e3,stroke:#c92a2a
  classDef parameter fill:#e5dbff,stroke:#7048e8
  classDef buffer fill:#f3f0ff,stroke:#9775fa
  classDef constant fill:#f1f3f5,stroke:#868e96
  classDef call fill:#ffffff,stroke:#495057"""

#: Characters that could end a label or start markup in it.
_ENTITIES: Final = {
    "#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "\\": "#92;",
    "{": "#123;", "}": "#125;", "|": "#124;", ";": "#59;",
}  # fmt: skip


def to_mermaid(graph: Graph) -> str:
    """The graph as a flowchart from top to bottom.

    >>> print(to_mermaid(Graph((Node(0, "x", "x", "input"),), ())).splitlines()[1])
      n0(["x"]):::input
    """
    drawing = Drawing(graph)
    lines = ["flowchart TB"]
    for item, box, depth in drawing.walk():
        if isinstance(item, Node):
            label = drawing.label(item, box)
            texts = [label.heading, label.module, *label.lines]
            text = "<br/>".join(escaped(each) for each in texts if each)
            before, after = _SHAPES.get(item.kind, ('("', '")'))
            lines.append(f"{'  ' * depth}{_key(item.id)}{before}{text or ' '}{after}:::{item.kind}")
        elif item is not None:
            times = f" ×{item.times}" if item.times > 1 else ""
            title = escaped(f"{item.title} {item.type}{times}".strip())
            lines.append(f'{"  " * depth}subgraph s{len(lines)}["{title}"]')
        elif depth > 1:
            lines.append("  " * (depth - 1) + "end")
    for arrow in drawing.arrows():
        text = "<br/>".join(map(escaped, arrow.text.splitlines()))
        sign = ("-.->" if arrow.loop else "-->") + (f'|"{text}"|' if text else "")
        lines.append(f"  {_key(arrow.source)} {sign} {_key(arrow.target)}")
    lines.append(_CLASSES)
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """The text inside a quoted label, with entities.

    >>> escaped('say "hi" #1')
    'say #quot;hi#quot; #35;1'
    """
    flat = " ".join(printable(text).split())
    return "".join(_ENTITIES.get(character, character) for character in flat)


def _key(id: int) -> str:
    return f"n{id}" if id >= 0 else f"m{-id}"
