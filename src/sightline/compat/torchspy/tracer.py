"""`torchspy.tracer`, by its own name."""

from __future__ import annotations

from sightline.compat.torchspy.calls import CallTracer

__all__ = ["CallTracer"]
