"""Loops whose numbers differ from run to run: what is folded, what is not, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sightline as sl
from sightline.analysis.fold import Node, Varying, fold_alike
from sightline.api import Trace
from sightline.views.code import code
from tests.builders import TraceBuilder
from tests.unfold import unfold


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
    assert str(code(looped([5, 6, 7, 8]).index, fold=True)).splitlines() == [
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
    text = str(code(looped([40, 1, 2, 3]).index, fold=True))
    assert "┌ ×3" in text
    assert "f32[1, 40, 8]" in text
    assert "f32[1, 1…3, 8]" in text


def test_two_sizes_are_no_rule() -> None:
    assert "…" not in str(code(looped([5, 6]).index, fold=True))


@pytest.mark.parametrize(
    ("sizes", "written"), [([4, 8, 16], "4…16"), ([3, 9, 4, 1], "1…9"), ([31, 64, 31, 64], "31…64")]
)
def test_sizes_of_a_loop_may_be_any(sizes: list[int], written: str) -> None:
    text = str(code(looped(sizes).index, fold=True))
    assert text.startswith(f"┌ ×{len(sizes)}  while going:\n")
    assert f"f32[1, {written}, 8]" in text


def trained(rates: Sequence[float], weights: Sequence[int] = (4, 4)) -> Trace:
    """A training loop: the optimizer makes its state in the first step, and a scheduler lowers the rate."""
    b = TraceBuilder()
    b.source("t.py", "for x in data:\n    loss = net(x)\n    opt.step()\n    losses.append(loss.item())\n")
    known = [b.value(size, kind="parameter", name=f"w{at}") for at, size in enumerate(weights)]
    for step, rate in enumerate(rates):
        with b.at("t.py", 2, "<module>"):
            for weight in known:
                b.op("mul.Tensor", b.value(2 + step % 3, 1), weight, out=(2 + step % 3, 4))
        with b.at("t.py", 3, "<module>"), b.phase("optimizer"):
            for weight in known if step == 0 else ():
                b.op("zeros_like", weight, out=weight.shape)
            for weight in known:
                b.op(
                    "add_.Tensor",
                    weight,
                    b.value(*weight.shape, kind="gradient"),
                    alpha=rate,
                    out=weight.shape,
                )
        with b.at("t.py", 4, "<module>"):
            b.op("item", b.value(), out=())
    return b.build()


def test_steps_differ_in_rates_and_batches() -> None:
    text = str(code(trained([0.5, 0.4, 0.2, 0.1, 0.05, 0.01]).index, fold=True))
    assert text[text.index("┌ ×5") :].splitlines() == [
        "┌ ×5  for x in data:",
        "┊ loss = net(x)  # t.py:2 in <module>:",
        "┊ │ # mul.Tensor(f32[2…4, 1], f32[4]) -> f32[2…4, 4]; ×2",
        "┊ ── optimizer ───────────────────────────────",
        "┊ opt.step()  # t.py:3 in <module>:",
        "┊ │ # add_.Tensor(f32[4], f32[4], alpha=0.4…0.01) -> f32[4]; ×2",
        "┊ ── forward ─────────────────────────────────",
        "┊ losses.append(loss.item())  # t.py:4 in <module>:",
        "┊ │ # item(f32[]) -> f32[];",
        "└",
    ]


def test_weights_of_different_sizes_are_different_layers() -> None:
    text = str(code(trained([0.5, 0.4, 0.2, 0.1], weights=(4, 8)).index, fold=True))
    body = text[text.index("┌ ×3") :]
    assert "f32[2…4, 1], f32[4]" in body
    assert "f32[2…4, 1], f32[8]" in body
    assert "add_.Tensor(f32[4…8], f32[4…8], alpha=0.4…0.1) -> f32[4…8]; ×2" in body


def test_a_loop_over_weights_is_not_the_loop_over_batches() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False, momentum=0.9)
    with sl.trace(model, ops="aten") as t:
        for rows in (2, 2, 3):  # the last is unlike the first two: its update is folded by itself
            model(torch.ones(rows, 4)).square().mean().backward()
            optimizer.step()
    lines = str(t.code(fold=True, step="last")).splitlines()
    last = max(at for at, line in enumerate(lines) if "optimizer.step()" in line)
    assert [line.lstrip("│ ") for line in lines[last:] if "┌" in line] == ["┌ ×6"]
    assert [line for line in lines if "for rows in" in line] == []


def test_numbers_that_were_read_may_be_any() -> None:
    with sl.trace(ops="aten") as t:
        for number in (3.0, 1.0, 2.0):
            torch.tensor(number).add(1).item()
    assert "_local_scalar_dense(f32[]) -> 2.0…4.0;" in str(t.code(fold=True))


def test_names_stay_with_the_first_run() -> None:
    assert "f32[1, 5…7, 8]" in str(code(looped([5, 6, 7]).index, fold=True, names=True))


def test_other_arguments_must_be_the_same() -> None:
    b = TraceBuilder()
    for p in (0.1, 0.2, 0.3):
        b.op("dropout", b.value(4), p, True, out=(4,))
    for number in (2, 3, 4):
        b.op("select", b.value(4), 0, number, out=())
    assert str(code(b.build().index, fold=True)).splitlines()[1:] == [
        "│ # dropout(f32[4], 0.1, True) -> f32[4];",
        "│ # dropout(f32[4], 0.2, True) -> f32[4];",
        "│ # dropout(f32[4], 0.3, True) -> f32[4];",
        "│ # select(f32[4], 0, 2…4) -> f32[]; ×3",
    ]


keys = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=24)


def looks_of(items: Sequence[tuple[str, int]]) -> list[tuple[str, Varying]]:
    """Names, each with one whole number."""
    return [(name, ((number,), ())) for name, number in items]


@given(keys, st.booleans())
def test_nothing_is_lost(items: list[tuple[str, int]], loop: bool) -> None:
    nodes = fold_alike(looks_of(items), lambda _: loop)
    names = [name for name, _ in items]
    assert unfold(nodes, names) == names


@given(keys)
def test_without_a_loop_every_repeat_changes_by_the_same_amount(items: list[tuple[str, int]]) -> None:
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

    check(fold_alike(looks_of(items), lambda _: False))
