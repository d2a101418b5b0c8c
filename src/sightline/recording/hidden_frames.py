"""Frames that are left out of recorded stacks and of tracebacks: our own, and those of torch's module call.

Dynamo does not compile our own either. The files of torch that views hide are in `trace.file_owners`.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FunctionType, TracebackType
from typing import Final

from sightline.recording.exception_notes import traceback_of
from sightline.recording.torchapi import MODULE_CALL_CODES, OpOverload, skip_in_dynamo

#: Codes whose frames are left out, by id: those of torch's module call, and of our own functions.
hidden_codes: Final = {id(code): code for code in MODULE_CALL_CODES}
_FOLDER: Final = os.path.dirname(__file__) + os.sep
_OVERLOAD_CALL: Final = OpOverload.__call__.__code__
_PACKAGE: Final = __name__.rpartition(".")[0] + "."
#: This one calls the user's own code, which Dynamo may compile.
_HANDLER: Final = "__torch_dispatch__"
#: Dynamo must be able to trace these: they do nothing while it compiles.
_TRACED: Final = frozenset({"enter_module", "leave_module", "__torch_function__"})


def is_hidden(code: CodeType) -> bool:
    """Whether frames of this code are left out."""
    return id(code) in hidden_codes


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
                        hidden_codes[id(code)] = code
                        if code.co_name not in _TRACED:
                            skip_in_dynamo(code, below=code.co_name != _HANDLER)


def _nested(code: CodeType) -> list[CodeType]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return [code, *(each for part in inner for each in _nested(part))]


def leave_out_own_frames(error: BaseException) -> None:
    """Give an exception the traceback it would have without a recording.

    After a handler of ours, torch's ``OpOverload.__call__`` is left out too: our handler called it.
    """
    shown: list[TracebackType] = []
    at, ours = traceback_of(error), False
    while at is not None:
        code = at.tb_frame.f_code
        own = code.co_filename.startswith(_FOLDER)
        if not own and not (ours and code is _OVERLOAD_CALL):
            shown.append(at)
        at, ours = at.tb_next, own
    traceback: TracebackType | None = None
    for one in reversed(shown):
        line: int | None = one.tb_lineno  # None where a compiler gave its code no lines; stored as -1
        traceback = TracebackType(traceback, one.tb_frame, one.tb_lasti, -1 if line is None else line)
    if traceback is not None:  # else it is an error of our own
        BaseException.with_traceback(error, traceback)  # an exception may refuse to have attributes set
