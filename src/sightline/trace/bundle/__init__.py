"""A recording on disk: ``run.sight/``, one SQLite database per process and shards of tensors beside it."""

from sightline.trace.bundle.reader import load
from sightline.trace.bundle.writer import save

__all__ = ["load", "save"]
