"""Keeping our own frames out of recorded stacks, and Dynamo out of our frames."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Final

from sightline.recording import stacks
from sightline.recording.torchapi import skip_in_dynamo

_PACKAGE: Final = __name__.rpartition(".")[0] + "."
#: Below these the user's own code runs, which Dynamo may compile.
_HANDLERS: Final = frozenset({"dispatch", "quiet"})
#: These Dynamo must be able to trace: they do nothing while it compiles.
_TRACED: Final = frozenset({"enter_module", "leave_module", "function"})


def hide_own_frames() -> None:
    """Mark every function of this package, once, when all of it is imported."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(_PACKAGE):
            continue
        classes = [kind for kind in vars(module).values() if isinstance(kind, type)]
        for holder in (module, *classes):
            for item in list(vars(holder).values()):
                if isinstance(item, FunctionType) and item.__module__ == name:
                    for code in _nested(item.__code__):
                        stacks.hide(code)
                        if code.co_name not in _TRACED:
                            skip_in_dynamo(code, below=code.co_name not in _HANDLERS)


def _nested(code: CodeType) -> list[CodeType]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return [code, *(found for part in inner for found in _nested(part))]
