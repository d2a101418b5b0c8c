"""Globs on module paths and op names, the same for views, captures and checks.

A module pattern is matched segment by segment: ``blocks.*.attn``, ``layers.1`` (never ``layers.10``), and
``**`` for any number of segments. An op pattern is matched against the full name or the bare one:
``add`` matches ``add.Tensor``, ``cat`` matches ``torch.cat``, ``*softmax`` matches ``_softmax``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase, translate


def path_matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a module path, or the path of a module that contains it.

    >>> path_matches("layers.1", "layers.10"), path_matches("layers.1", "layers.1.fc")
    (False, True)
    >>> path_matches("**.attn", "blocks.0.attn.qkv"), path_matches("*.attn", "blocks.0.attn")
    (True, False)
    """
    return PathPattern(pattern)(segments_of(path))


def segments_of(path: str) -> list[str]:
    """The segments of a module path; the model itself has none."""
    return path.split(".") if path else []


class PathPattern:
    """A pattern as a small automaton over path segments, so that ``**`` needs no backtracking."""

    def __init__(self, pattern: str) -> None:
        self._steps = [
            None if part == "**" else re.compile(translate(part)).match for part in segments_of(pattern)
        ]

    def __call__(self, segments: Sequence[str]) -> bool:
        """Whether the path, or a beginning of it, matches."""
        states = self._after_stars({0})
        for segment in segments:
            if len(self._steps) in states or not states:
                break
            states = self._next_states(states, segment)
        return len(self._steps) in states

    def exactly(self, segments: Sequence[str]) -> bool:
        """Whether the whole path matches.

        >>> PathPattern("blocks.*").exactly(["blocks", "0"]), PathPattern("blocks.*").exactly(["blocks"])
        (True, False)
        """
        states = self._after_stars({0})
        for segment in segments:
            states = self._next_states(states, segment)
        return len(self._steps) in states

    def _next_states(self, states: Iterable[int], segment: str) -> set[int]:
        following = set()
        for state in states:
            if state == len(self._steps):
                continue
            step = self._steps[state]
            if step is None:
                following.add(state)
            elif step(segment):
                following.add(state + 1)
        return self._after_stars(following)

    def _after_stars(self, states: Iterable[int]) -> set[int]:
        reached = set(states)
        for state in sorted(reached):
            while state < len(self._steps) and self._steps[state] is None:
                state += 1
                reached.add(state)
        return reached


def op_matches(pattern: str, name: str, level: str) -> bool:
    """Whether a pattern matches an op's full name or its bare one.

    >>> op_matches("add", "add.Tensor", "aten"), op_matches("cat", "torch.cat", "api")
    (True, True)
    """
    return fnmatchcase(name, pattern) or fnmatchcase(bare_name(name, level), pattern)


def bare_name(name: str, level: str) -> str:
    """An op name without its overload (aten) or its namespace (API).

    >>> bare_name("add.Tensor", "aten"), bare_name("torch.cat", "api")
    ('add', 'cat')
    """
    return name.partition(".")[0] if level == "aten" else name.rpartition(".")[2]
