"""`torchspy.trace_graph`, by its own name; ``python -m`` runs it as the command."""

from __future__ import annotations

import sys

from sightline.compat.torchspy.drawing import Digraph, apply_graph_render_options, construct_graph, main
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
    "main",
    "parse_trace",
    "prune_leaves",
    "save_tree_json",
    "squash_numeric_indices",
]

if __name__ == "__main__":
    sys.exit(main())
