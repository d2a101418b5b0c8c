"""`torchspy.trace_graph`: names of `call_tree` and `digraph`, the same objects under either package name."""

from __future__ import annotations

from sightline.compat.torchspy.call_tree import (
    Node,
    apply_graph_render_options,
    build_tree,
    construct_graph,
    parse_trace,
    prune_leaves,
    render_graph,
    save_tree_json,
    squash_numeric_indices,
)
from sightline.compat.torchspy.digraph import Digraph

__all__ = [
    "Digraph",
    "Node",
    "apply_graph_render_options",
    "build_tree",
    "construct_graph",
    "parse_trace",
    "prune_leaves",
    "render_graph",
    "save_tree_json",
    "squash_numeric_indices",
]
