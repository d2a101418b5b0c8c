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

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sightline.compat.dl_backtrace.backtrace import DLBacktrace
from sightline.compat.dl_backtrace.compatibility import diagnose_model_compatibility
from sightline.errors import UsageError

__all__ = ["DLBacktrace", "diagnose_model_compatibility"]

#: Names of the original package that are about relevance.
_RELEVANCE: Final = frozenset(
    ("DLBacktracePipeline", "ModelRegistry", "MoEBacktrace", "PipelineConfig", "Precision",
     "activation_master", "get_model_info", "load_relevance", "save_relevance")
)  # fmt: skip


def missing_name(name: str) -> NoReturn:
    """Raise the error for a name that is not here: one sentence for the original's names.

    >>> from sightline.errors import UsageError
    >>> try:
    ...     missing_name("MoEBacktrace")
    ... except UsageError as error:
    ...     print(error)
    MoEBacktrace is about relevance, which sightline does not compute: the original dl_backtrace has it.
    """
    if name in _RELEVANCE:
        raise UsageError(
            f"{name} is about relevance, which sightline does not compute: the original dl_backtrace has it."
        )
    raise AttributeError(f"module 'dl_backtrace' has no attribute {name!r}; it has {', '.join(__all__)}.")


if not TYPE_CHECKING:  # a type checker that saw it would accept any name

    def __getattr__(name: str) -> Any:
        if name == "pytorch_backtrace":
            return import_module("sightline.compat.dl_backtrace.pytorch_backtrace")
        missing_name(name)
