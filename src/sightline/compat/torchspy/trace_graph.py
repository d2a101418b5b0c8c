"""`torchspy.trace_graph`, by its own name; the command is ``sightline trace-graph``."""

from __future__ import annotations

from sightline.compat.torchspy.drawing import Digraph, apply_graph_render_options, construct_graph
from sightline.compat.torchspy.pathtree import (
    Node,
    build_tree,
    parse_trace,
    prune_leaves,
    save_tree_json,
    squash_numeric_indices,
)

__all__ = [
    "Digraph",
    "Node",
    "apply_graph_render_options",
    "build_tree",
    "construct_graph",
    "parse_trace",
    "prune_leaves",
    "save_tree_json",
    "squash_numeric_indices",
]
