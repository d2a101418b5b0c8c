"""The interface of DLBacktrace's model tracing, over `sightline.export`.

A script needs another import line, or none at all when this package stands in for the tool's:

>>> import sys
>>> import sightline.compat.dl_backtrace
>>> sys.modules["dl_backtrace"] = sightline.compat.dl_backtrace
>>> from dl_backtrace.pytorch_backtrace import DLBacktrace
>>> DLBacktrace is sightline.compat.dl_backtrace.DLBacktrace
True
>>> for name in [name for name in sys.modules if name.partition(".")[0] == "dl_backtrace"]:
...     del sys.modules[name]

Relevance is not computed here; everything up to it is: the graph, its attributes, and the values of a run.
"""

from __future__ import annotations

from sightline.compat.dl_backtrace.backtrace import DLBacktrace

__all__ = ["DLBacktrace"]
