"""`Digraph`: a graph in graphviz' language, with the methods that users of the graphviz package call.

The text is the one that package writes, so that programs that read or compare it work unchanged.
"""

from __future__ import annotations

import os
import re
import webbrowser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from sightline.errors import UsageError
from sightline.graph.formats.dot import quoted
from sightline.graph.formats.files import render_dot

#: Text that DOT reads without quotes: names and numbers, except its own words.
_PLAIN: Final = re.compile(
    r"(?!(?:node|edge|graph|digraph|subgraph|strict)$)[a-z_]\w*|-?(?:\.\d+|\d+(?:\.\d*)?)",
    re.ASCII | re.IGNORECASE,
)
_DEFAULT_NAME: Final = "Digraph.gv"


class Digraph:
    """A graph in graphviz' language.

    >>> dot = Digraph()
    >>> dot.attr(rankdir="TB")
    >>> dot.node("n0", "encoder x 2")
    >>> print(dot.source.expandtabs(4), end="")
    digraph {
        rankdir=TB
        n0 [label="encoder x 2"]
    }

    ``graph_attr``, ``node_attr`` and ``edge_attr`` hold defaults that may be set at any time.
    """

    def __init__(self, format: str = "png") -> None:
        self.format = format
        self.graph_attr: dict[str, Any] = {}
        self.node_attr: dict[str, Any] = {}
        self.edge_attr: dict[str, Any] = {}
        self.body: list[str] = []

    def attr(self, kw: str | None = None, **attributes: Any) -> None:
        """Set attributes of the graph, or defaults of later statements: ``kw`` is graph, node or edge."""
        if kw is not None and kw.lower() not in ("graph", "node", "edge"):
            raise ValueError(f"attr statement must target graph, node, or edge: {kw!r}")
        text = _pairs(sorted(attributes.items()))
        if text:
            self.body.append(f"\t{text}\n" if kw is None else f"\t{kw} [{text}]\n")

    def node(self, name: str, label: str | None = None, **attributes: Any) -> None:
        """Add a node."""
        self.body.append(f"\t{_identifier(name)}{_suffix(label, attributes)}\n")

    def edge(self, tail_name: str, head_name: str, label: str | None = None, **attributes: Any) -> None:
        """Add an edge."""
        ends = f"{_identifier(tail_name)} -> {_identifier(head_name)}"
        self.body.append(f"\t{ends}{_suffix(label, attributes)}\n")

    def edges(self, tail_head_iter: Iterable[Any]) -> None:
        """Add edges, each a pair of names."""
        for tail, head in tail_head_iter:
            self.edge(tail, head)

    @property
    def source(self) -> str:
        """The text that ``dot`` reads."""
        defaults = (("graph", self.graph_attr), ("node", self.node_attr), ("edge", self.edge_attr))
        head = [f"\t{kind} [{_pairs(sorted(values.items()))}]\n" for kind, values in defaults if values]
        return "".join(["digraph {\n", *head, *self.body, "}\n"])

    def __str__(self) -> str:
        return self.source

    def pipe(self, format: str | None = None, encoding: str | None = None) -> Any:
        """The picture itself: bytes, or text where an encoding is given."""
        picture = render_dot(self.source, _checked_format(format or self.format), len(self.body))
        return picture if encoding is None else picture.decode(encoding)

    def _repr_svg_(self) -> str:
        text: str = self.pipe("svg", encoding="utf-8")
        return text

    def save(
        self, filename: str | os.PathLike[str] | None = None, directory: str | os.PathLike[str] | None = None
    ) -> str:
        """Write the text that ``dot`` reads; returns its file.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Path(Digraph().save("g.gv", folder)).read_text()
        'digraph {\\n}\\n'
        """
        path = Path(directory or "", filename or _DEFAULT_NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.source, "utf-8")
        return str(path)

    def render(
        self, filename: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None, view: bool = False, cleanup: bool = False,
        format: str | None = None,
    ) -> str:  # fmt: skip
        """Write the picture and, without ``cleanup``, its text; returns the picture's file.

        The suffix is added where it is missing: ``g`` and ``g.png`` both write ``g.png``.
        """
        kind = _checked_format(format or self.format)
        path = Path(directory or "", filename or _DEFAULT_NAME)
        has_suffix = path.suffix.lower() == f".{kind}"
        picture = path if has_suffix else path.with_name(f"{path.name}.{kind}")
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(self.pipe(kind))
        if not cleanup:
            self.save(path.with_suffix(".gv") if has_suffix else path)
        if view:
            webbrowser.open(picture.resolve().as_uri())
        return str(picture)

    def view(
        self, filename: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None, cleanup: bool = False,
    ) -> str:  # fmt: skip
        """Write the picture as `render` does, and open it."""
        return self.render(filename, directory, view=True, cleanup=cleanup)


def _identifier(text: Any) -> str:
    """A name or a value in DOT, in quotes where it needs them.

    >>> _identifier("fill"), _identifier(4.5), _identifier("6,4!"), _identifier("node")
    ('fill', '4.5', '"6,4!"', '"node"')
    """
    return str(text) if _PLAIN.fullmatch(str(text)) else quoted(str(text))


def _pairs(attributes: Iterable[tuple[str, Any]]) -> str:
    return " ".join(
        f"{_identifier(name)}={_identifier(value)}" for name, value in attributes if value is not None
    )


def _suffix(label: str | None, attributes: Mapping[str, Any]) -> str:
    text = _pairs([("label", label), *sorted(attributes.items())])
    return f" [{text}]" if text else ""


def _checked_format(format: str) -> str:
    if format not in ("png", "svg", "pdf"):
        raise UsageError(f"{format!r} is no format of a picture here; choose png, svg or pdf.")
    return format
