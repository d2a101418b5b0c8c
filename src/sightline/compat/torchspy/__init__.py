"""The names of torchspy: change the import line, or replace the package for a whole program.

>>> import sys
>>> import sightline.compat.torchspy
>>> sys.modules["torchspy"] = sightline.compat.torchspy
>>> from torchspy.saver import spy_save
>>> spy_save is sightline.compat.torchspy.spy_save
True
>>> for name in [name for name in sys.modules if name.partition(".")[0] == "torchspy"]:
...     del sys.modules[name]

The submodules that people import (``saver``, ``tracer``, ``context``, ``trace_graph``, ``_base``) re-export
names by their full path: under whatever name they are imported, they have the same objects.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sightline.compat.torchspy.call_tracer import CallTracer
    from sightline.compat.torchspy.tensor_saver import (
        BaseDebugger,
        DebugContext,
        TensorSaver,
        get_debug_context,
        spy_save,
    )

__all__ = ["BaseDebugger", "CallTracer", "DebugContext", "TensorSaver", "get_debug_context", "spy_save"]

_MODULES: Final = dict.fromkeys(__all__, "sightline.compat.torchspy.tensor_saver") | {
    "CallTracer": "sightline.compat.torchspy.call_tracer"
}


if not TYPE_CHECKING:  # a type checker that saw it would accept any name

    def __getattr__(name: str) -> Any:
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module 'torchspy' has no attribute {name!r}; it has {', '.join(__all__)}.")
        return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
