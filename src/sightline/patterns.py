"""Globs on module paths and op names, the same everywhere, and the names near one that matches nothing.

A module pattern is matched segment by segment: ``blocks.*.attn``, ``layers.1`` (never ``layers.10``), and
``**`` for any number of segments. An op pattern is matched against the full name or the bare one:
``add`` matches ``add.Tensor``, ``cat`` matches ``torch.cat``, ``*softmax`` matches ``_softmax``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Protocol

from sightline.errors import NothingMatched
from sightline.hints import Hint


def path_matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a module path, or the path of a module that contains it.

    >>> path_matches("layers.1", "layers.10"), path_matches("layers.1", "layers.1.fc")
    (False, True)
    >>> path_matches("**.attn", "blocks.0.attn.qkv"), path_matches("*.attn", "blocks.0.attn")
    (True, False)
    """
    return _compiled(pattern)(segments_of(path))


def segments_of(path: str) -> list[str]:
    """The segments of a module path; the model itself has none."""
    return path.split(".") if path else []


class StarPattern:
    """A pattern over the parts of something as a small automaton, so that ``**`` needs no backtracking.

    Each step is a test of one part, or None for ``**``: any number of parts.
    """

    def __init__(self, steps: Sequence[Callable[[str], object] | None]) -> None:
        self._steps = steps

    def __call__(self, parts: Iterable[str]) -> bool:
        """Whether the parts, or a beginning of them, match."""
        states = self._after_stars({0})
        for part in parts:
            if len(self._steps) in states or not states:
                break
            states = self._next_states(states, part)
        return len(self._steps) in states

    def exactly(self, parts: Iterable[str]) -> bool:
        """Whether all parts together match.

        >>> PathPattern("blocks.*").exactly(["blocks", "0"]), PathPattern("blocks.*").exactly(["blocks"])
        (True, False)
        """
        states = self._after_stars({0})
        for part in parts:
            states = self._next_states(states, part)
        return len(self._steps) in states

    def _next_states(self, states: Iterable[int], part: str) -> set[int]:
        following = set()
        for state in states:
            if state == len(self._steps):
                continue
            step = self._steps[state]
            if step is None:
                following.add(state)
            elif step(part):
                following.add(state + 1)
        return self._after_stars(following)

    def _after_stars(self, states: Iterable[int]) -> set[int]:
        reached = set(states)
        for state in sorted(reached):
            while state < len(self._steps) and self._steps[state] is None:
                state += 1
                reached.add(state)
        return reached


class PathPattern(StarPattern):
    """A pattern over the segments of a module path."""

    def __init__(self, pattern: str) -> None:
        super().__init__(
            [None if part == "**" else re.compile(translate(part)).match for part in segments_of(pattern)]
        )


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> PathPattern:
    return PathPattern(pattern)


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


class ModulePaths(Protocol):
    """What a module is found by: its path, every path it is registered under, its class."""

    @property
    def path(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def type(self) -> str: ...


def module_matches(pattern: str, module: ModulePaths) -> bool:
    """Whether a module is meant, by one of its paths, or a model by its class."""
    paths = module.aliases or (module.path,)
    return any(path_matches(pattern, path) for path in paths) or (not module.path and module.type == pattern)


def no_module_matched(pattern: str, modules: Iterable[ModulePaths]) -> NothingMatched:
    """The error for a pattern that matches no module of a trace, with the nearest paths."""
    names = did_you_mean(pattern, (path for module in modules for path in module.aliases))
    return NothingMatched(f"{Hint.option('module', pattern)} matches no module of this trace{names}")


def choices_text(names: Iterable[str]) -> str:
    """Names as a sentence offers them.

    >>> choices_text(["a", "b", "c"])
    "'a', 'b' or 'c'"
    """
    texts = [repr(name) for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that does not exist: the nearest ones, or some of those that do.

    >>> did_you_mean("reluu", ["relu", "mul"]), did_you_mean("x", ["relu", "mul"])
    ("; did you mean 'relu'?", "; it has 'relu', 'mul'.")
    """
    existing = list(dict.fromkeys(each for each in names if each))
    close = close_names(name, existing)
    if close:
        return f"; did you mean {choices_text(close)}?"
    if not existing:
        return "."
    more = ", …" if len(existing) > 5 else ""
    return f"; it has {', '.join(map(repr, existing[:5]))}{more}."


def close_names(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names that look like one that does not exist, the nearest first."""
    matcher = difflib.SequenceMatcher()
    matcher.set_seq2(name)
    scores: dict[str, float] = {}
    for each in names:
        matcher.set_seq1(each)
        if matcher.real_quick_ratio() >= 0.5 and matcher.quick_ratio() >= 0.5:
            scores[each] = matcher.ratio()
    best = sorted(scores, key=lambda each: -scores[each])  # stable: equally near ones in the model's order
    return [each for each in best[:most] if scores[each] >= 0.5]
