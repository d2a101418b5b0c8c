"""Loops whose sizes grow: what is folded, what is not, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.analysis.fold import Node, Repeat, fold, unfold
from sightline.api import Trace
from sightline.views.code import code
from sightline.views.growing import grown
from tests.builders import TraceBuilder


def looped(sizes: Sequence[int], *, layers: int = 2) -> Trace:
    """A decoding loop: every step runs some layers, and has one size more than the one before."""
    b = TraceBuilder()
    step = "def step(x):\n    for f in fs:\n        x = f(x)\n"
    b.source("g.py", f"while going:\n    y = step(x)\n    x = cat(x, y)\n{step}")
    for size in sizes:
        with b.at("g.py", 2, "<module>"):
            for _ in range(layers):
                with b.at("g.py", 6, "step"):
                    h = b.op("bmm", b.value(1, size, 8), out=(1, size, 8))
                    b.op("view", h, [size, 8], out=(size, 8))
        with b.at("g.py", 3, "<module>"):
            b.op("cat", [b.value(1, size), b.value(1, 1)], -1, out=(1, size + 1))
    return b.build()


def test_a_decoding_loop_is_one_body() -> None:
    assert str(code(looped([5, 6, 7, 8]), fold=True)).splitlines() == [
        "┌ ×4  while going:",
        "┊ y = step(x)  # g.py:2 in <module>:",
        "┊ │ ⬇️",
        "┊ │ ┌ ×2  for f in fs:",
        "┊ │ ┊ x = f(x)  # g.py:6 in step:",
        "┊ │ ┊ │ # bmm(f32[1, 5…8, 8]) -> f32[1, 5…8, 8];",
        "┊ │ ┊ │ # view(f32[1, 5…8, 8], [5…8, 8]) -> f32[5…8, 8];",
        "┊ │ └",
        "┊ x = cat(x, y)  # g.py:3 in <module>:",
        "┊ │ # cat([f32[1, 5…8], f32[1, 1]], -1) -> f32[1, 6…9];",
        "└",
    ]


def test_the_first_step_may_be_another_size() -> None:
    text = str(code(looped([40, 1, 2, 3]), fold=True))
    assert "┌ ×3" in text
    assert "f32[1, 40, 8]" in text
    assert "f32[1, 1…3, 8]" in text


@pytest.mark.parametrize("sizes", [[5, 6], [4, 8, 16], [3, 9, 4, 1]])
def test_sizes_without_a_rule_stay_apart(sizes: list[int]) -> None:
    assert "…" not in str(code(looped(sizes), fold=True))


def test_names_stay_with_the_first_run() -> None:
    assert "f32[1, 5…7, 8]" in str(code(looped([5, 6, 7]), fold=True, names=True))


def test_other_arguments_must_be_the_same() -> None:
    b = TraceBuilder()
    for p in (0.1, 0.2, 0.3):
        b.op("dropout", b.value(4), p, True, out=(4,))
    for number in (2, 3, 4):
        b.op("select", b.value(4), 0, number, out=())
    assert str(code(b.build(), fold=True)).splitlines()[1:] == [
        "│ # dropout(f32[4], 0.1, True) -> f32[4];",
        "│ # dropout(f32[4], 0.2, True) -> f32[4];",
        "│ # dropout(f32[4], 0.3, True) -> f32[4];",
        "│ # select(f32[4], 0, 2…4) -> f32[]; ×3",
    ]


keys = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=24)


@given(keys)
def test_nothing_is_lost(items: list[tuple[str, int]]) -> None:
    nodes = grown(fold(items), lambda at: (items[at][0], (items[at][1],)))
    names = [name for name, _ in items]
    assert unfold(nodes, names) == names


@given(keys)
def test_every_repeat_changes_by_the_same_amount(items: list[tuple[str, int]]) -> None:
    at = 0

    def check(nodes: Sequence[Node]) -> None:
        nonlocal at
        for node in nodes:
            if isinstance(node, int):
                at += 1
                continue
            start = at
            check(node.body)
            period = at - start
            at = start + period * node.count
            for place in range(start, start + period):
                sizes = [items[place + run * period][1] for run in range(node.count)]
                assert len({b - a for a, b in pairwise(sizes)}) == 1

    check(grown(fold(items), lambda at: (items[at][0], (items[at][1],))))


def test_what_is_folded_already_stays() -> None:
    assert grown([Repeat((0, 1), 3), 6], lambda at: (at, ())) == [Repeat((0, 1), 3), 6]
