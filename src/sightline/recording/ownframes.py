"""Keeping our own frames out of recorded stacks and of tracebacks, and Dynamo out of our frames."""

from __future__ import annotations

import os
import sys
from types import CodeType, FunctionType, TracebackType
from typing import Final

from sightline.recording import stacks
from sightline.recording.explain import traceback_of
from sightline.recording.torchapi import OpOverload, skip_in_dynamo

_FOLDER: Final = os.path.dirname(__file__) + os.sep
_OVERLOAD_CALL: Final = OpOverload.__call__.__code__
_PACKAGE: Final = __name__.rpartition(".")[0] + "."
#: Below these the user's own code runs, which Dynamo may compile.
_HANDLERS: Final = frozenset({"__torch_dispatch__", "quiet"})
#: These Dynamo must be able to trace: they do nothing while it compiles.
_TRACED: Final = frozenset({"enter_module", "leave_module", "__torch_function__"})


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


def leave_out_own_frames(error: BaseException) -> None:
    """Give an exception the traceback it would have without a recording.

    What goes with our handlers is torch's own ``OpOverload.__call__``, which nobody else calls from Python.
    """
    kept: list[TracebackType] = []
    at, ours = traceback_of(error), False
    while at is not None:
        code = at.tb_frame.f_code
        own = code.co_filename.startswith(_FOLDER)
        if not own and not (ours and code is _OVERLOAD_CALL):
            kept.append(at)
        at, ours = at.tb_next, own
    found: TracebackType | None = None
    for one in reversed(kept):
        line: int | None = one.tb_lineno  # a compiler may have given its code none, which is -1 here
        found = TracebackType(found, one.tb_frame, one.tb_lasti, -1 if line is None else line)
    if found is not None:  # else it is an error of our own
        BaseException.with_traceback(error, found)  # an exception may refuse to have attributes set
