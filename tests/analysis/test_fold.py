"""Folding repeats: nothing is lost, loops are found, and it stays fast."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sightline.analysis.fold import Node, Repeat, fold
from tests.unfold import unfold

#: Sequences made as programs make them: bodies of bodies, each run some times.
programs = st.recursive(
    st.lists(st.integers(0, 3), max_size=4),
    lambda inner: st.lists(st.tuples(inner, st.integers(1, 4)), max_size=4).map(
        lambda parts: [key for body, count in parts for key in body * count]
    ),
    max_leaves=12,
)


@given(programs)
def test_unfold_gives_back_what_was_folded(keys: list[int]) -> None:
    assert unfold(fold(keys), keys) == keys


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(2, 30))
def test_a_loop_is_never_written_longer_than_its_body(body: list[int], count: int) -> None:
    assert size(fold(body * count)) <= len(body)


@given(programs)
def test_a_fold_is_never_longer_than_the_sequence(keys: list[int]) -> None:
    assert size(fold(keys)) <= len(keys)


def size(nodes: list[Node]) -> int:
    return sum(size(list(node.body)) if isinstance(node, Repeat) else 1 for node in nodes)


def test_a_loop_between_other_ops() -> None:
    assert fold("xababaz") == [0, Repeat((1, 2), 2), 5, 6]
    assert fold("xabababz") == [0, Repeat((1, 2), 3), 7]


def test_a_loop_in_a_loop() -> None:
    keys = "x" + "abbc" * 3
    assert fold(keys) == [0, Repeat((1, Repeat((2,), 2), 4), 3)]


def test_two_loops_side_by_side() -> None:
    assert fold("ababab" + "cdcdcd") == [Repeat((0, 1), 3), Repeat((6, 7), 3)]


def test_nothing_to_fold() -> None:
    assert fold([]) == []
    assert fold("abcab") == [0, 1, 2, 3, 4]


def test_any_hashable_key() -> None:
    keys = [("mm", (2, 3)), None] * 2
    assert fold(keys) == [Repeat((0, 1), 2)]


def test_long_sequences_are_folded_whole() -> None:
    step = [0, *[*range(1, 40)] * 24, 99]
    for keys, left in ((step * 200, 41), ([7] * 200_000, 1), ([*range(1000)] * 200, 1000)):
        nodes = fold(keys)
        assert size(nodes) == left
        assert unfold(nodes, keys) == keys
