"""`torchspy.context`, by its own name."""

from __future__ import annotations

from sightline.compat.torchspy.saver import DebugContext, get_debug_context

__all__ = ["DebugContext", "get_debug_context"]
