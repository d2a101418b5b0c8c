"""A recording of nothing: every view says so, in words and without an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sightline as sl

VIEWS: dict[str, tuple[Callable[[sl.Trace], object], str]] = {
    "code": (lambda t: t.code(), "(no ops were recorded)"),
    "log": (lambda t: t.log(), "(no module call and no op of a forward pass was recorded)"),
    "call_order": (lambda t: t.call_order(), "This trace has no module calls."),
    "summary": (lambda t: t.summary(), "(nothing was recorded)"),
    "source": (lambda t: t.source(), "(no ops were recorded)"),
    "nonfinite": (
        lambda t: t.nonfinite(), 'Nothing was measured: record with stats=True or check="nonfinite".'
    ),
    "tensors": (lambda t: repr(t.tensors), "<0 captured tensors>"),
    "ops": (lambda t: t.ops, "<0 Op rows>"),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_nothing_says_so(view: str) -> None:
    with sl.trace() as t:
        pass
    shown, text = VIEWS[view]
    assert str(shown(t)) == text


@pytest.mark.parametrize("options", [{}, {"stats": True}, {"check": "nonfinite"}, {"capture": True}])
def test_the_overview_and_the_problems_of_nothing(options: dict[str, Any]) -> None:
    with sl.trace(**options) as t:
        pass
    assert "empty     no op and no module call was recorded: nothing of torch's ran in the block" in str(t)
    assert "all finite" not in str(t)
    assert str(t.problems()).splitlines() == [
        "problems: none found in 0 ops", "nothing was recorded, so nothing was looked at",
    ]  # fmt: skip


def test_a_check_of_nothing() -> None:
    with sl.trace(check="nonfinite") as t:
        torch.ones(3, dtype=torch.int64) + 1
    assert str(t.nonfinite()) == "nothing was checked: no op with a floating result was recorded"


def test_a_single_element_that_is_not_finite_is_named_once() -> None:
    with sl.trace(stats=True) as t:
        torch.tensor(float("nan")) * 1
        torch.tensor([float("inf")] * 2) * 1
    texts = [str(value.stats) for value in t.values if value.stats is not None]
    assert set(texts) == {"1 NaN", "2 Inf"}
    assert re.search(r"# mul.Tensor\(f32\[\], 1\) -> f32\[\]; +NaN$", str(t.code()), re.MULTILINE)
    assert str(t.lineage(t.ops.where(name="mul.Tensor")[0])).endswith("     NaN; constant $0 f32[] (NaN)")


def test_doubles_whose_squares_are_too_large_have_a_deviation() -> None:
    with sl.trace(stats=True, capture=sl.Capture(ops="mul.Tensor")) as t:
        for _ in range(2):
            torch.tensor([1e300, -1e300, 2e300], dtype=torch.float64) * 1
    assert str(t.ops.where(name="mul.Tensor")[0].outputs[0].stats) == (
        "-1e+300 … 2e+300, mean 6.67e+299, std 1.53e+300"
    )
    assert "-1e+300 … 2e+300, mean 6.67e+299, std 1.53e+300" in repr(t.tensors["mul.Tensor"][0])
    assert "-1e+300 … 2e+300" in str(t.code(fold=True))
    assert "-1e+300 … 2e+300" in str(t.source())
