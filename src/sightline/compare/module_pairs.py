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

from sightline.compare.sequences import Ints, align, best_pairs
from sightline.compare.side import Side

_MAX_PAIRS: Final = 250_000  #: pairs of calls that are compared each with each
_MAX_WRAPPERS: Final = 8  #: nested wrappers that only one side has
#: Scores of properties that two calls may share; a pair needs the last.
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
        """Pairs of calls in order; then calls that run in another order, if they share a name or weights."""
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
        left = set(range(len(calls_a))).difference(x for x, _ in pairs)
        right = set(range(len(calls_b))).difference(y for _, y in pairs)
        rest = [(-int(score[x, y]), x, y) for x in left for y in right if score[x, y] >= _NAME]
        for _, x, y in sorted(rest):
            if x in left and y in right:
                left.remove(x)
                right.remove(y)
                pairs.append((x, y))
        return [(calls_a[x], calls_b[y]) for x, y in pairs]

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
            sizes, norms = zip(weights_a.T, weights_b.T, strict=True)
            alike: bool | None = None
            if all(len(each) and not np.isnan(each).all() for each in norms):
                totals = [float(np.sqrt(np.nansum(each**2))) for each in norms]
                alike = abs(totals[0] - totals[1]) <= 2e-3 * max(totals)
                if sizes[0].sum() != sizes[1].sum():
                    alike = False
                elif len(norms[0]) == len(norms[1]) and not any(np.isnan(each).any() for each in norms):
                    errors = np.abs(np.sort(norms[0]) - np.sort(norms[1]))
                    alike = bool((errors <= 5e-3 * np.maximum(norms[0].max(), norms[1].max())).all())
            self._alike[key] = alike
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
