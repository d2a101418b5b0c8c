"""`torchspy.saver`, by its own name."""

from __future__ import annotations

from sightline.compat.torchspy.saving import TensorSaver, spy_save

__all__ = ["TensorSaver", "spy_save"]
