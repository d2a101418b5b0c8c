"""The longer path under which some scripts import `DLBacktrace`."""

from __future__ import annotations

from sightline.compat.dl_backtrace.backtrace import DLBacktrace

__all__ = ["DLBacktrace"]
