"""Python stacks, interned: a stack is one number, made of code objects and instruction offsets.

Our own frames are left out of recorded stacks and of tracebacks, and Dynamo does not compile them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from operator import setitem
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Final

from sightline.recording.atomic import run_atomically
from sightline.recording.exception_notes import traceback_of
from sightline.recording.torchapi import MODULE_CALL_CODES, OpOverload, skip_in_dynamo

#: Codes whose frames are left out, by id: those of torch's module call, and of our own functions.
_hidden: Final = {id(code): code for code in MODULE_CALL_CODES}


def hide(code: CodeType) -> None:
    """Leave frames of this code out of every stack."""
    _hidden[id(code)] = code


def is_hidden(code: CodeType) -> bool:
    """Whether frames of this code are left out."""
    return id(code) in _hidden


class StackTrie:
    """The trie of frames: node n is (parent node, code, instruction); node -1 is the empty stack."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.code_ids: list[int] = []
        self.instructions: list[int] = []
        self.codes: list[CodeType] = []  # kept alive: their ids, or addresses in C++, are keys


class Stacks(StackTrie):
    """The trie of the plain engine, which interns frames itself."""

    def __init__(self) -> None:
        super().__init__()
        self._codes: dict[int, int] = {}
        self._nodes: dict[tuple[int, int, int], int] = {}

    def find(self, frame: FrameType | None, anchor: FrameType | None, anchor_stack: int) -> int | None:
        """The stack of ``frame``, given the stack of ``anchor``, a frame that called it.

        None says that ``anchor`` is not on this stack: its call ended without its exit hook firing.
        """
        shown: list[FrameType] = []
        at = frame
        while at is not anchor:
            if at is None:
                return None
            if id(at.f_code) not in _hidden:
                shown.append(at)
            at = at.f_back
        node = anchor_stack
        for one in reversed(shown):
            key = (node, id(one.f_code), one.f_lasti)
            child = self._nodes.get(key)
            node = self._add(key, one.f_code) if child is None else child
        return node

    def _add(self, key: tuple[int, int, int], code: CodeType) -> int:
        parent, code_key, instruction = key
        if code_key not in self._codes:
            register = partial(setitem, self._codes, code_key, len(self.codes))
            run_atomically(partial(self.codes.append, code), register)
        node = len(self.parents)
        run_atomically(  # an interrupt in between would shift the columns against each other
            partial(self.parents.append, parent),
            partial(self.code_ids.append, self._codes[code_key]),
            partial(self.instructions.append, instruction),
            partial(setitem, self._nodes, key, node),
        )
        return node


def variable_name(tensor: Any) -> str:
    """The global or enclosing variable of the running functions that holds a tensor, or an empty text."""
    at: FrameType | None = sys._getframe(1)
    while at is not None and at.f_code not in MODULE_CALL_CODES:
        if not is_hidden(at.f_code):
            local: Mapping[str, Any] = at.f_locals
            free = {name: local[name] for name in at.f_code.co_freevars if name in local}
            for name, value in (*free.items(), *at.f_globals.items()):
                if value is tensor:
                    return str(name)
        at = at.f_back
    return ""


_FOLDER: Final = os.path.dirname(__file__) + os.sep
_OVERLOAD_CALL: Final = OpOverload.__call__.__code__
_PACKAGE: Final = __name__.rpartition(".")[0] + "."
#: This one calls the user's own code, which Dynamo may compile.
_HANDLER: Final = "__torch_dispatch__"
#: Dynamo must be able to trace these: they do nothing while it compiles.
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
