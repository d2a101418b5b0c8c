"""Two sequences aligned."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sightline.compare.sequences import align

_KEYS = st.lists(st.integers(0, 5), max_size=60)


def _aligned(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    return align([np.array(a, dtype=np.int64)], [np.array(b, dtype=np.int64)])


@given(_KEYS, _KEYS)
def test_pairs_rise_on_both_sides_and_are_of_one_key(a: list[int], b: list[int]) -> None:
    pairs = _aligned(a, b)
    assert all(a[x] == b[y] for x, y in pairs)
    assert all(x < u and y < v for (x, y), (u, v) in pairwise(pairs))


@given(_KEYS)
def test_a_sequence_is_aligned_with_itself(a: list[int]) -> None:
    assert _aligned(a, a) == [(at, at) for at in range(len(a))]


@given(_KEYS, st.integers(0, 60))
def test_one_that_is_missing_costs_one_pair(a: list[int], at: int) -> None:
    b = a[:at] + a[at + 1 :]
    assert len(_aligned(a, b)) == len(b)


def test_a_long_sequence_in_which_everything_repeats_finds_its_way_back() -> None:
    a = [1, 2, 3, 4] * 2000
    b = list(a)
    for at in range(7000, 0, -1000):
        b.insert(at, 9)
    b[3333] = 8
    pairs = _aligned(a, b)
    assert len(pairs) > 0.99 * len(a)


def test_the_stricter_key_decides_between_equals() -> None:
    name = np.array([1, 1]), np.array([1])
    strict = np.array([5, 7]), np.array([7])
    assert align([strict[0], name[0]], [strict[1], name[1]]) == [(1, 0)]
