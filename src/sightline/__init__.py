"""See straight through a PyTorch model.

One ``with`` block records what the model did; everything else is a view of that recording.

>>> import torch, sightline as sl
>>> with sl.trace() as t:
...     y = torch.ones(2, 3).relu()
>>> [op.name for op in t.ops.where(level="aten")]
['ones', 'relu']

The names below are the whole public surface. They are imported when first used, so that ``import
sightline`` costs a few milliseconds and needs neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module

from sightline._version import __version__

# Type checkers take this name for true. Importing typing for it would cost four times all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sightline.api import Trace, load
    from sightline.diff_api import Diff, diff
    from sightline.errors import (
        CaptureError,
        DamagedFile,
        ExportError,
        InvalidGraph,
        InvalidTrace,
        NativeUnavailable,
        NonFiniteError,
        NoSuchNode,
        NotCaptured,
        NothingMatched,
        SightlineError,
        TorchMissing,
        UnsupportedTorch,
        UsageError,
    )
    from sightline.graph.exported import export, load_graph
    from sightline.markers import spy, step
    from sightline.options import Bundle, Capture, Check, Stats
    from sightline.tracing import trace

__all__ = [
    "Bundle",
    "Capture",
    "CaptureError",
    "Check",
    "DamagedFile",
    "Diff",
    "ExportError",
    "InvalidGraph",
    "InvalidTrace",
    "NativeUnavailable",
    "NoSuchNode",
    "NonFiniteError",
    "NotCaptured",
    "NothingMatched",
    "SightlineError",
    "Stats",
    "TorchMissing",
    "Trace",
    "UnsupportedTorch",
    "UsageError",
    "__version__",
    "diff",
    "export",
    "load",
    "load_graph",
    "spy",
    "step",
    "trace",
]

#: Where each public name lives.
_HOMES = {
    "Bundle": "sightline.options",
    "Capture": "sightline.options",
    "CaptureError": "sightline.errors",
    "Check": "sightline.options",
    "DamagedFile": "sightline.errors",
    "Diff": "sightline.diff_api",
    "ExportError": "sightline.errors",
    "InvalidGraph": "sightline.errors",
    "InvalidTrace": "sightline.errors",
    "NativeUnavailable": "sightline.errors",
    "NoSuchNode": "sightline.errors",
    "NonFiniteError": "sightline.errors",
    "NotCaptured": "sightline.errors",
    "NothingMatched": "sightline.errors",
    "SightlineError": "sightline.errors",
    "Stats": "sightline.options",
    "TorchMissing": "sightline.errors",
    "Trace": "sightline.api",
    "UnsupportedTorch": "sightline.errors",
    "UsageError": "sightline.errors",
    "diff": "sightline.diff_api",
    "export": "sightline.graph.exported",
    "load": "sightline.api",
    "load_graph": "sightline.graph.exported",
    "spy": "sightline.markers",
    "step": "sightline.markers",
    "trace": "sightline.tracing",
}


def _load(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"sightline has no {name!r}; its names are {', '.join(_HOMES)}.")
    found = globals()[name] = getattr(import_module(home), name)
    return found


if not TYPE_CHECKING:  # a type checker that saw it would accept any name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(__all__)
