"""Pairs the module calls of two recordings.

Calls inside a pair are paired by the names of their modules, their class, the sizes of their parameters and,
where they were measured, the weights themselves: a missing layer shifts the names of those after it, not
their weights. A module that only one side has is replaced by the calls inside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.compare.sequences import Ints, align, best_pairs
from sightline.compare.side import Side

_MAX_PAIRS: Final = 250_000  #: pairs of calls that are compared each with each
_MAX_WRAPPERS: Final = 8  #: nested wrappers that only one side has
#: Scores of what two calls may have in common; a pair needs the last.
_NAME, _WEIGHTS, _OTHER_WEIGHTS, _SIZES, _CLASS, _LEAST = 6, 8, -3, 2, 2, 2


class ModulePairs:
    """The calls of two recordings in pairs: ``of_a[call]`` is the partner of a call, or -1."""

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
            for x, y in self._inner_pairs(first, second):
                self.of_a[x], self.of_b[y] = y, x
                waiting.append((x, y))

    def _inner_pairs(self, first: int, second: int) -> list[tuple[int, int]]:
        """Pairs of the calls inside a pair; a wrapper that only one side has is replaced by its calls."""
        calls_a, calls_b = list(self._a.children.get(first, [])), list(self._b.children.get(second, []))
        if not calls_a or not calls_b:
            return []
        pairs = self._pair_calls(first, second, calls_a, calls_b)
        for _ in range(_MAX_WRAPPERS):
            lone_a = set(calls_a).difference(x for x, _ in pairs)
            lone_b = set(calls_b).difference(y for _, y in pairs)
            if not (lone_a and lone_b):
                break
            opened = _open(calls_a, lone_a, self._a.children), _open(calls_b, lone_b, self._b.children)
            if opened == (calls_a, calls_b):
                break
            calls_a, calls_b = opened
            pairs = self._pair_calls(first, second, calls_a, calls_b)
        return pairs

    def _pair_calls(
        self, first: int, second: int, calls_a: list[int], calls_b: list[int]
    ) -> list[tuple[int, int]]:
        names_a = [self._inner_name(self._a, first, call) for call in calls_a]
        names_b = [self._inner_name(self._b, second, call) for call in calls_b]
        if names_a == names_b:
            return list(zip(calls_a, calls_b, strict=True))
        if len(calls_a) * len(calls_b) > _MAX_PAIRS:
            keys_a = self._exact_keys(self._a, calls_a, names_a)
            keys_b = self._exact_keys(self._b, calls_b, names_b)
            return [(calls_a[x], calls_b[y]) for x, y in align([keys_a], [keys_b])]
        score = np.array(
            [[self._score(x, y, name == other) for y, other in zip(calls_b, names_b, strict=True)]
             for x, name in zip(calls_a, names_a, strict=True)],
            dtype=np.int32,
        )  # fmt: skip
        pairs = best_pairs(score)
        pairs += self._reordered_pairs(score, pairs)
        return [(calls_a[x], calls_b[y]) for x, y in pairs]

    def _reordered_pairs(
        self, score: NDArray[np.int32], pairs: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Further pairs, of calls that run in another order: only with the same name or weights."""
        left, right = np.ones(score.shape[0], dtype=bool), np.ones(score.shape[1], dtype=bool)
        for x, y in pairs:
            left[x] = right[y] = False
        rest = [(-int(score[x, y]), x, y) for x in np.flatnonzero(left) for y in np.flatnonzero(right)
                if score[x, y] >= _NAME]  # fmt: skip
        reordered = []
        for _, row, column in sorted(rest):
            if left[row] and right[column]:
                left[row] = right[column] = False
                reordered.append((int(row), int(column)))
        return reordered

    def _score(self, x: int, y: int, same_name: bool) -> int:
        """The score of a pair; 0 where it is too low for one."""
        one, other = int(self._a.data.calls.module[x]), int(self._b.data.calls.module[y])
        phase = int(self._a.data.calls.phase[x]) == int(self._b.data.calls.phase[y])
        key = (one, other, int(same_name), int(phase))
        score = self._scores.get(key)
        if score is None:
            a, b = self._a.data.modules[one], self._b.data.modules[other]
            score = _NAME * same_name + _CLASS * (a.type == b.type)
            alike = self._weights_alike(one, other)
            score += 0 if alike is None else _WEIGHTS if alike else _OTHER_WEIGHTS
            sizes_a, sizes_b = self._a.weights(one)[:, 0], self._b.weights(other)[:, 0]
            score += _SIZES * bool(len(sizes_a) and sizes_a.sum() == sizes_b.sum())
            score = self._scores[key] = score if score >= _LEAST and phase else 0
        return score

    def _weights_alike(self, one: int, other: int) -> bool | None:
        """Whether two modules have the same weights, up to rounding; None where they were not measured."""
        key = (one, other)
        if key not in self._alike:
            weights_a, weights_b = self._a.weights(one), self._b.weights(other)
            if (
                not len(weights_a)
                or not len(weights_b)
                or bool(np.isnan(weights_a[:, 1]).all() or np.isnan(weights_b[:, 1]).all())
            ):
                self._alike[key] = None
            elif weights_a[:, 0].sum() != weights_b[:, 0].sum():
                self._alike[key] = False
            else:
                total = [float(np.sqrt(np.nansum(each[:, 1] ** 2))) for each in (weights_a, weights_b)]
                self._alike[key] = abs(total[0] - total[1]) <= 2e-3 * max(total)
                if (
                    len(weights_a) == len(weights_b)
                    and not np.isnan(weights_a).any()
                    and not np.isnan(weights_b).any()
                ):
                    errors = np.abs(np.sort(weights_a[:, 1]) - np.sort(weights_b[:, 1]))
                    close = errors <= 5e-3 * np.maximum(weights_a[:, 1].max(), weights_b[:, 1].max())
                    self._alike[key] = bool(close.all())
        return self._alike[key]

    def _exact_keys(self, side: Side, calls: list[int], names: list[str]) -> Ints:
        phase = side.data.calls.phase
        return np.array(
            [side.key_id(("call", name, int(phase[call]))) for call, name in zip(calls, names, strict=True)],
            dtype=np.int64,
        )

    def name(self, path: str) -> str:
        """A path as it is compared: renamed, and without the parts that wrappers add."""
        name = self._names.get(path)
        if name is None:
            name = ".".join(part for part in path.split(".") if part != "_orig_mod")
            name = "" if name == "module" else name.removeprefix("module.")
            for old, new in self._renames:
                name = old.sub(new, name)
            self._names[path] = name
        return name

    def _inner_name(self, side: Side, parent: int, call: int) -> str:
        path = self.name(side.module(call).path)
        if parent < 0:
            return path
        outer = self.name(side.module(parent).path)
        return path.removeprefix(f"{outer}.") if outer else path


def _open(calls: list[int], lone: set[int], children: dict[int, list[int]]) -> list[int]:
    """The calls with those in ``lone`` replaced by the calls inside them."""
    result: list[int] = []
    for call in calls:
        result += (children.get(call) if call in lone else None) or [call]
    return result
