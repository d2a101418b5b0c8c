"""`torchspy._base`: names of `tensor_saver`, the same objects under either package name."""

from __future__ import annotations

from sightline.compat.torchspy.tensor_saver import BaseDebugger

__all__ = ["BaseDebugger"]
