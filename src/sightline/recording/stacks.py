"""Python stacks, interned: a stack is one number, made of code objects and instruction offsets.

Nothing is read from source here. A walk ends at the innermost *mark*: a live frame (of a module call,
an API call, or the caller of the block) above which the stack is known and cannot have changed, since
every frame above it is suspended in the same call. Most walks see one to three frames.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from operator import setitem
from types import CodeType, FrameType
from typing import Any, Final

from sightline.recording.atomic import at_once
from sightline.recording.torchapi import MODULE_CALL_CODES

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
