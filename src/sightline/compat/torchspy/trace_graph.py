"""`torchspy.trace_graph`: the names of `call_tree`, the same objects under either package name."""

from __future__ import annotations

from sightline.compat.torchspy.call_tree import (
    Digraph,
    Node,
    apply_graph_render_options,
    build_tree,
    construct_graph,
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
