"""Writes graphs to files: pictures through graphviz' ``dot`` program, texts directly.

The program is started without a shell and reads the graph from its standard input: no text of a recording
is ever part of a command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sightline.errors import SightlineError, UsageError
from sightline.graph.formats.dot import to_dot
from sightline.graph.graph import Graph
from sightline.patterns import choices_text

_PICTURES: Final = (".svg", ".png", ".pdf")
_TEXTS: Final[dict[str, Callable[[Graph], str]]] = {
    ".dot": to_dot,
    ".gv": to_dot,
    ".mmd": Graph.to_mermaid,
    ".json": Graph.to_json,
}
_INSTALL: Final = "`apt-get install graphviz`, `brew install graphviz` or `conda install graphviz`"
_MAX_INLINE: Final = 400  #: nodes that a notebook lays out without a noticeable pause
_TIMEOUT: Final = 120  #: seconds
_DPI: Final = 120  #: sharp on high-resolution screens


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph in the format that the suffix of the file names."""
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix in (*_PICTURES, *_TEXTS) and not file.parent.is_dir():
        raise UsageError(f"There is no folder {str(file.parent)!r} to save the graph in.")
    if suffix in _PICTURES:
        file.write_bytes(render(graph, suffix[1:]))
    elif suffix in _TEXTS:
        file.write_text(_TEXTS[suffix](graph), "utf-8")
    else:
        raise UsageError(
            f"{file.name!r} names no format of a graph; end it in {choices_text((*_PICTURES, *_TEXTS))}."
        )


def render(graph: Graph, format: str) -> bytes:
    """The picture of a graph, laid out by graphviz."""
    return render_dot(to_dot(graph), format, len(graph), dpi=_DPI if format == "png" else None)


def render_dot(text: str, format: str, nodes: int, *, dpi: int | None = None) -> bytes:
    """The picture of a text in DOT; the error for a layout that takes too long names ``nodes``."""
    program = shutil.which("dot")
    if program is None:
        raise UsageError(f"Drawing needs graphviz' `dot`, which is not installed: {_INSTALL} brings it.")
    command = [program, f"-T{format}", *([f"-Gdpi={dpi}"] if dpi is not None else [])]
    try:
        process = subprocess.run(  # noqa: S603  # a fixed command; the graph goes to standard input
            command, input=text.encode(), capture_output=True, check=False, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"graphviz did not lay out {nodes} nodes in {_TIMEOUT} s: fold, collapse or prune first."
        ) from None
    if process.returncode:
        lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[0].rstrip(".") if lines else "it gave no reason"
        raise SightlineError(f"graphviz could not draw the graph: {reason}.")
    return process.stdout


def inline_svg(graph: Graph) -> str:
    """The picture for a notebook; "" where graphviz is missing or the graph too big to lay out quickly."""
    if len(graph) > _MAX_INLINE or shutil.which("dot") is None:
        return ""
    try:
        text = render(graph, "svg").decode("utf-8", "replace")
    except (SightlineError, OSError):  # the notebook shows the listing instead
        return ""
    return text[text.find("<svg") :]  # without the XML declaration
