"""The stacks of the plain engine: frames are walked in Python, and each stack is stored once."""

from __future__ import annotations

from functools import partial
from itertools import count
from types import CodeType, FrameType

from sightline.recording.atomic import append_numbered, run_atomically
from sightline.recording.stacks import StackTrie, hidden_codes


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
