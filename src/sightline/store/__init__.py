"""A recording on disk: ``run.sight/``, one SQLite database per process and shards of tensors beside it."""

from sightline.store.reader import load
from sightline.store.writer import save

__all__ = ["load", "save"]
