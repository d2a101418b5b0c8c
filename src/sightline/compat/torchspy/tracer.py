"""`torchspy.tracer`: the names of `call_tracer`, the same objects under either package name."""

from __future__ import annotations

from sightline.compat.torchspy.call_tracer import CallTracer

__all__ = ["CallTracer"]
