"""Recorded Python stacks: their trie, and the frames that are left out of them.

Our own functions, which Dynamo does not compile either, and torch's call of a module are left out. Views go
by the owner of a frame's file: see `data.file_owners`.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

from sightline.recording.torchapi import MODULE_CALL_CODES, skip_in_dynamo

#: Instructions that call ``__enter__``: one of its own, or from Python 3.14 a call after its look-up.
_ENTERS: Final = "BEFORE_WITH"
_LOOKS_UP: Final = "LOAD_SPECIAL"
_SUSPENDED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
#: Codes whose frames are left out, by id: those of torch's module call, and of our own functions.
hidden_codes: Final = {id(code): code for code in MODULE_CALL_CODES}
_PACKAGE: Final = __name__.rpartition(".")[0] + "."
#: This one calls the user's own code, which Dynamo may compile.
_HANDLER: Final = "__torch_dispatch__"
#: Dynamo must be able to trace these: they do nothing while it compiles.
_TRACED: Final = frozenset({"enter_module", "leave_module", "__torch_function__"})


class StackTrie:
    """The trie of frames: node n is (parent node, code, instruction); node -1 is the empty stack."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.code_ids: list[int] = []
        self.instructions: list[int] = []
        self.codes: list[CodeType] = []  # kept alive: their ids, or addresses in C++, are keys


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


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def enters_block(frame: FrameType) -> bool:
    """Whether a frame is at a ``with`` statement, so that its callers wait until the block ends.

    Those of a generator or coroutine do not: it may be resumed from elsewhere.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    if frame.f_code.co_flags & _SUSPENDED or at < 2:
        return False
    return dis.opname[code[at]] == _ENTERS or dis.opname[code[at - 2]] == _LOOKS_UP


def variable_name(tensor: Any) -> str:
    """The global or enclosing variable of the running functions that holds a tensor, or an empty text."""
    for at in frames_from(sys._getframe(1)):
        if at.f_code in MODULE_CALL_CODES:
            break
        if not is_hidden(at.f_code):
            local: Mapping[str, Any] = at.f_locals
            free = {name: local[name] for name in at.f_code.co_freevars if name in local}
            for name, value in (*free.items(), *at.f_globals.items()):
                if value is tensor:
                    return str(name)
    return ""
