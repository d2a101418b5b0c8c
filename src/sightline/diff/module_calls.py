"""Which module call of one recording is which of the other.

Calls inside a pair are paired by what their modules are called, their class, the sizes of their parameters
and, where they were measured, the weights themselves: a layer that is missing shifts the names of those after
it, not their weights. A module that only one side has is looked through: what it calls is paired with what is
left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.diff.sequences import Ints, aligned, best_pairs
from sightline.diff.side import Side
from sightline.trace.data import PHASES

_LARGEST: Final = 250_000  #: pairs of calls that are compared each with each
_DEEPEST: Final = 8  #: wrappers that are looked through
_FORWARD: Final = PHASES.index("forward")
_NAME, _WEIGHTS, _OTHER_WEIGHTS, _SIZES, _CLASS, _LEAST = 6, 8, -3, 2, 2, 2


class ModulePairs:
    """The calls of two recordings in pairs: ``of_a[call]`` is the call of the other side, or -1."""

    def __init__(self, a: Side, b: Side, rename: Mapping[str, str] | None = None) -> None:
        self._a, self._b = a, b
        self._renames = [
            (re.compile(rf"(?<![^.]){re.escape(old)}(?![^.])"), new) for old, new in (rename or {}).items()
        ]
        self._names: dict[str, str] = {}
        self._alike: dict[tuple[int, int], bool | None] = {}
        self._scores: dict[tuple[int, int, int, int], int] = {}
        self.of_a: Ints = np.full(len(a.data.calls), -1, dtype=np.int64)
        self.of_b: Ints = np.full(len(b.data.calls), -1, dtype=np.int64)
        waiting = [(-1, -1)]
        while waiting:
            first, second = waiting.pop()
            for x, y in self._inside(first, second):
                self.of_a[x], self.of_b[y] = y, x
                waiting.append((x, y))

    def _inside(self, first: int, second: int) -> list[tuple[int, int]]:
        """Pairs of the calls inside a pair; wrappers that only one side has are looked through."""
        ours, theirs = list(self._a.children.get(first, [])), list(self._b.children.get(second, []))
        if not ours or not theirs:
            return []
        pairs = self._paired(first, second, ours, theirs)
        for _ in range(_DEEPEST):
            met = {x for x, _ in pairs}, {y for _, y in pairs}
            lone = [[call for call in calls if call not in known]
                    for calls, known in zip((ours, theirs), met, strict=True)]  # fmt: skip
            if not (lone[0] and lone[1]):
                break
            opened = (
                _opened(ours, set(lone[0]), self._a.children),
                _opened(theirs, set(lone[1]), self._b.children),
            )
            if opened == (ours, theirs):
                break
            ours, theirs = opened
            pairs = self._paired(first, second, ours, theirs)
        return pairs

    def _paired(self, first: int, second: int, ours: list[int], theirs: list[int]) -> list[tuple[int, int]]:
        names = [self._inner_name(self._a, first, call) for call in ours]
        others = [self._inner_name(self._b, second, call) for call in theirs]
        if names == others:
            return list(zip(ours, theirs, strict=True))
        if len(ours) * len(theirs) > _LARGEST:
            mine, its = self._exact_keys(self._a, ours, names), self._exact_keys(self._b, theirs, others)
            return [(ours[x], theirs[y]) for x, y in aligned([mine], [its])]
        score = np.array(
            [[self._score(x, y, name == other) for y, other in zip(theirs, others, strict=True)]
             for x, name in zip(ours, names, strict=True)],
            dtype=np.int32,
        )  # fmt: skip
        found = best_pairs(score)
        found += self._moved(score, found)
        return [(ours[x], theirs[y]) for x, y in found]

    def _moved(self, score: NDArray[np.int32], found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Pairs of what is left that run in another order: only with the same name or weights."""
        left, right = np.ones(score.shape[0], dtype=bool), np.ones(score.shape[1], dtype=bool)
        for x, y in found:
            left[x] = right[y] = False
        rest = [(-int(score[x, y]), x, y) for x in np.flatnonzero(left) for y in np.flatnonzero(right)
                if score[x, y] >= _NAME]  # fmt: skip
        moved = []
        for _, row, column in sorted(rest):
            if left[row] and right[column]:
                left[row] = right[column] = False
                moved.append((int(row), int(column)))
        return moved

    def _score(self, x: int, y: int, same_name: bool) -> int:
        """How much speaks for a pair; 0 if too little."""
        one, other = int(self._a.data.calls.module[x]), int(self._b.data.calls.module[y])
        phase = int(self._a.data.calls.phase[x]) == int(self._b.data.calls.phase[y])
        key = (one, other, int(same_name), int(phase))
        known = self._scores.get(key)
        if known is None:
            a, b = self._a.data.modules[one], self._b.data.modules[other]
            score = _NAME * same_name + _CLASS * (a.type == b.type)
            alike = self._weights_alike(one, other)
            score += 0 if alike is None else _WEIGHTS if alike else _OTHER_WEIGHTS
            mine, its = self._a.weights(one)[:, 0], self._b.weights(other)[:, 0]
            score += _SIZES * bool(len(mine) and mine.sum() == its.sum())
            known = self._scores[key] = score if score >= _LEAST and phase else 0
        return known

    def _weights_alike(self, one: int, other: int) -> bool | None:
        """Whether two modules hold the same weights, up to rounding; None where nobody knows."""
        key = (one, other)
        if key not in self._alike:
            mine, its = self._a.weights(one), self._b.weights(other)
            if not len(mine) or not len(its) or bool(np.isnan(mine[:, 1]).all() or np.isnan(its[:, 1]).all()):
                self._alike[key] = None
            elif mine[:, 0].sum() != its[:, 0].sum():
                self._alike[key] = False
            else:
                total = [float(np.sqrt(np.nansum(each[:, 1] ** 2))) for each in (mine, its)]
                self._alike[key] = abs(total[0] - total[1]) <= 2e-3 * max(total)
                if len(mine) == len(its) and not np.isnan(mine).any() and not np.isnan(its).any():
                    apart = np.abs(np.sort(mine[:, 1]) - np.sort(its[:, 1]))
                    close = apart <= 5e-3 * np.maximum(mine[:, 1].max(), its[:, 1].max())
                    self._alike[key] = bool(close.all())
        return self._alike[key]

    def _exact_keys(self, side: Side, calls: list[int], names: list[str]) -> Ints:
        phase = side.data.calls.phase
        return np.array(
            [side.word(("call", name, int(phase[call]))) for call, name in zip(calls, names, strict=True)],
            dtype=np.int64,
        )

    def name(self, path: str) -> str:
        """A path as it is compared: renamed, and without what a wrapper puts into it."""
        known = self._names.get(path)
        if known is None:
            known = ".".join(part for part in path.split(".") if part != "_orig_mod")
            known = "" if known == "module" else known.removeprefix("module.")
            for old, new in self._renames:
                known = old.sub(new, known)
            self._names[path] = known
        return known

    def _inner_name(self, side: Side, parent: int, call: int) -> str:
        path = self.name(side.module(call).path)
        if parent < 0:
            return path
        outer = self.name(side.module(parent).path)
        return path.removeprefix(f"{outer}.") if outer else path


def _opened(calls: list[int], lone: set[int], children: dict[int, list[int]]) -> list[int]:
    """The calls with those in ``lone`` replaced by what they call."""
    made: list[int] = []
    for call in calls:
        inner = children.get(call) if call in lone else None
        made += inner if inner else [call]
    return made
