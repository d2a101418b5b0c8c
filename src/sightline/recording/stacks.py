"""Python stacks, interned: a stack is one number, made of code objects and instruction offsets.

Our own frames are kept out of recorded stacks and of tracebacks, and Dynamo out of our frames.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from operator import setitem
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Final

from sightline.recording.atomic import at_once
from sightline.recording.exception_notes import traceback_of
from sightline.recording.torchapi import MODULE_CALL_CODES, OpOverload, skip_in_dynamo

#: Frames that stand between two calls of the user's and say nothing: torch's module call, our handlers.
_hidden: Final = {id(code): code for code in MODULE_CALL_CODES}


def hide(code: CodeType) -> None:
    """Leave frames of this code out of every stack."""
    _hidden[id(code)] = code


def is_hidden(code: CodeType) -> bool:
    """Whether frames of this code are left out."""
    return id(code) in _hidden


class Stacks:
    """The trie of frames: node n is (parent node, code, instruction); node -1 is the empty stack."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.code_ids: list[int] = []
        self.instructions: list[int] = []
        self.codes: list[CodeType] = []  # kept alive: their ids are keys
        self._codes: dict[int, int] = {}
        self._nodes: dict[tuple[int, int, int], int] = {}

    def find(self, frame: FrameType | None, mark: FrameType | None, above: int) -> int | None:
        """The stack of ``frame``, given that ``above`` is the stack of the frames from ``mark`` up.

        None says that ``mark`` is not on this stack: the call it stands for has ended without a word.
        """
        shown: list[FrameType] = []
        at = frame
        while at is not mark:
            if at is None:
                return None
            if id(at.f_code) not in _hidden:
                shown.append(at)
            at = at.f_back
        node = above
        for one in reversed(shown):
            key = (node, id(one.f_code), one.f_lasti)
            known = self._nodes.get(key)
            node = self._add(key, one.f_code) if known is None else known
        return node

    def _add(self, key: tuple[int, int, int], code: CodeType) -> int:
        parent, code_key, instruction = key
        if code_key not in self._codes:
            known = partial(setitem, self._codes, code_key, len(self.codes))
            at_once(partial(self.codes.append, code), known)
        node = len(self.parents)
        at_once(  # an interrupt in between would have every later node at another's place
            partial(self.parents.append, parent),
            partial(self.code_ids.append, self._codes[code_key]),
            partial(self.instructions.append, instruction),
            partial(setitem, self._nodes, key, node),
        )
        return node


def variable_name(tensor: Any) -> str:
    """The global or enclosing variable under which the functions of a module know a tensor, or nothing."""
    at: FrameType | None = sys._getframe(1)
    while at is not None and at.f_code not in MODULE_CALL_CODES:
        if not is_hidden(at.f_code):
            held: Mapping[str, Any] = at.f_locals
            free = {name: held[name] for name in at.f_code.co_freevars if name in held}
            for name, value in (*free.items(), *at.f_globals.items()):
                if value is tensor:
                    return str(name)
        at = at.f_back
    return ""


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
                        hide(code)
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
