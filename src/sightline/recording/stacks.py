"""Python stacks, interned: a stack is one number, made of code objects and instruction offsets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from itertools import count
from types import CodeType, FrameType
from typing import Any

from sightline.recording.atomic import append_numbered, run_atomically
from sightline.recording.hidden_frames import hidden_codes, is_hidden
from sightline.recording.torchapi import MODULE_CALL_CODES


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
            if id(at.f_code) not in hidden_codes:
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
            self._codes[code_key] = append_numbered(self.codes, code)
        row = parent, self._codes[code_key], instruction
        columns = self.parents, self.code_ids, self.instructions
        first = len(self.parents)  # or later, if another thread adds one meanwhile
        # An interrupt in between would shift the columns against each other.
        run_atomically(*(partial(column.append, number) for column, number in zip(columns, row, strict=True)))
        node = next(at for at in count(first) if tuple(column[at] for column in columns) == row)
        self._nodes[key] = node
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
