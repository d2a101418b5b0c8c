"""`torchspy._base`, by its own name."""

from __future__ import annotations

from sightline.compat.torchspy.saver import BaseDebugger

__all__ = ["BaseDebugger"]
