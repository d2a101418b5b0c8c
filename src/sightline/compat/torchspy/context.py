"""`torchspy.context`: names of `tensor_saver`, the same objects under either package name."""

from __future__ import annotations

from sightline.compat.torchspy.tensor_saver import DebugContext, get_debug_context

__all__ = ["DebugContext", "get_debug_context"]
