"""A static graph of a model through `torch.export`, which can be run node by node.

`export` returns an `ExportedGraph`: a `Graph` with `run`, `verify` and `save`. `load_graph` reads one from an
archive.
"""

from __future__ import annotations

from sightline.errors import ExportError, TorchMissing

try:
    import torch  # noqa: F401  # the imports below need it
except ImportError as error:
    raise TorchMissing(
        "sl.export and sl.load_graph need torch, which is not installed here (looking at a saved trace does "
        "not): install torch and try again."
    ) from error

from sightline.graph.exported.dynamic import Dynamic
from sightline.graph.exported.exported_graph import ExportedGraph
from sightline.graph.exported.exporter import export, load_graph
from sightline.graph.exported.interpreter import NodeIO, Run
from sightline.graph.exported.verification import Verification

__all__ = ["Dynamic", "ExportError", "ExportedGraph", "NodeIO", "Run", "Verification", "export", "load_graph"]
