"""`torchspy.saver`: the names of `tensor_saver`, the same objects under either package name."""

from __future__ import annotations

from sightline.compat.torchspy.tensor_saver import TensorSaver, spy_save

__all__ = ["TensorSaver", "spy_save"]
