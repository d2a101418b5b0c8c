"""Graphs written to files: pictures through graphviz' ``dot`` program, texts directly.

The program is started without a shell and reads the graph from its standard input: no text of a recording
is ever part of a command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from sightline.errors import SightlineError, UsageError
from sightline.graph.formats.dot import to_dot
from sightline.graph.graph import Graph
from sightline.patterns import choices_text

_PICTURES: Final = (".svg", ".png", ".pdf")
_TEXTS: Final = (".dot", ".gv", ".mmd", ".json")
_INSTALL: Final = "`apt-get install graphviz`, `brew install graphviz` or `conda install graphviz`"
_MOST_INLINE: Final = 400  #: nodes a notebook can still lay out without a pause
_PATIENCE: Final = 120  #: seconds
_DPI: Final = 120  #: sharp on today's screens


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph in the format that the end of the file name asks for."""
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix in (*_PICTURES, *_TEXTS) and not file.parent.is_dir():
        raise UsageError(f"There is no folder {str(file.parent)!r} to save the graph in.")
    if suffix in _PICTURES:
        file.write_bytes(draw(graph, suffix[1:]))
    elif suffix in (".dot", ".gv"):
        file.write_text(to_dot(graph), "utf-8")
    elif suffix == ".mmd":
        file.write_text(graph.to_mermaid(), "utf-8")
    elif suffix == ".json":
        file.write_text(graph.to_json(), "utf-8")
    else:
        raise UsageError(
            f"{file.name!r} names no format of a graph; end it in {choices_text(_PICTURES + _TEXTS)}."
        )


def draw(graph: Graph, format: str) -> bytes:
    """The picture of a graph as graphviz lays it out."""
    return drawn(to_dot(graph), format, len(graph), dpi=_DPI if format == "png" else None)


def drawn(text: str, format: str, nodes: int, *, dpi: int | None = None) -> bytes:
    """The picture graphviz makes of any text in its language; ``nodes`` is said where it takes too long."""
    program = shutil.which("dot")
    if program is None:
        raise UsageError(f"Drawing needs graphviz' `dot`, which is not installed: {_INSTALL} brings it.")
    command = [program, f"-T{format}", *([f"-Gdpi={dpi}"] if dpi is not None else [])]
    try:
        done = subprocess.run(  # noqa: S603  # a fixed command; the graph goes to standard input
            command, input=text.encode(), capture_output=True, check=False, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"graphviz did not lay out {nodes} nodes in {_PATIENCE} s: fold, collapse or prune first."
        ) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = said[0].rstrip(".") if said else "it gave no reason"
        raise SightlineError(f"graphviz could not draw the graph: {reason}.")
    return done.stdout


def inline_svg(graph: Graph) -> str:
    """The picture for a notebook; empty where graphviz is missing or the graph too big to lay out at once."""
    if len(graph) > _MOST_INLINE or shutil.which("dot") is None:
        return ""
    try:
        text = draw(graph, "svg").decode("utf-8", "replace")
    except (SightlineError, OSError):  # a notebook shows the listing then: looking at a graph never fails
        return ""
    return text[text.find("<svg") :]  # without the XML declaration, which HTML does not want
