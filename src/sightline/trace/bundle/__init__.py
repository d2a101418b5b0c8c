"""A recording on disk: ``run.sight/``, one SQLite database per process and shards of tensors beside it."""

from sightline.trace.bundle.loading import load
from sightline.trace.bundle.saving import save
from sightline.trace.bundle.sources import install_sources

__all__ = ["install_sources", "load", "save"]
