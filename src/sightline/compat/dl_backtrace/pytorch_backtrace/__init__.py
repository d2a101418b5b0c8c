"""The module that scripts import `DLBacktrace` from."""

from __future__ import annotations

from sightline.compat.dl_backtrace.backtrace import DLBacktrace

__all__ = ["DLBacktrace"]
