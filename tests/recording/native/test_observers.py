"""Observers of the native engine see what the program has, and what they raise reaches it once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl
from tests.recording.engines import needs_native

pytestmark = needs_native

OBSERVED: dict[str, dict[str, Any]] = {
    "stats": {"stats": True},
    "check": {"check": "nonfinite"},
    "capture": {"capture": sl.Capture(ops="*")},
    "live": {"live": "log"},
}


@pytest.fixture(params=OBSERVED)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OBSERVED[request.param]


@pytest.mark.parametrize("ops", ["api", "aten", "both"])
def test_results_are_the_tensors_that_the_program_gets(options: dict[str, Any], ops: Any) -> None:
    with sl.trace(ops=ops, engine="native", **options) as t:
        made = torch.ones(2, 3)  # torch copies the result of a factory that somebody else holds
        shaped = torch.zeros_like(made)
        (made + shaped).sum()
    assert t.info["engine"] == "native"
    assert not t.info["faults"]
    level = "api" if ops == "api" else "aten"
    by_name = {op.name.rpartition(".")[2].partition(".")[0]: op for op in t.ops.where(level=level)}
    added = next(op for op in t.ops.where(level=level) if op.name.startswith(("add", "+")))
    assert [one.producer for one in added.inputs] == [by_name["ones"], by_name["zeros_like"]]


def test_a_parameter_can_be_made_of_what_was_looked_at(options: dict[str, Any]) -> None:
    with sl.trace(engine="native", **options) as t:
        made = nn.Parameter(torch.randn(3, 3))
        layer = nn.Linear(3, 3)
        layer(made).sum().backward()
    assert type(made) is nn.Parameter
    assert not t.info["faults"]


def test_gradients_are_accumulated_as_without(options: dict[str, Any]) -> None:
    def step(**given: Any) -> tuple[list[str], Tensor]:
        x = torch.ones(3, requires_grad=True)
        with sl.trace(ops="aten", engine="native", **given) as t:
            (x.exp() + x.sin() + x.cos()).sum().backward()
        assert x.grad is not None
        return [op.name for op in t.ops], x.grad

    plain, observed = step(), step(**options)
    assert observed[0] == plain[0]
    assert torch.equal(observed[1], plain[1])


def checked(run: Callable[[], object]) -> None:
    with sl.trace(check="nonfinite", engine="native"):
        run()


class TestAnErrorThatStopsTheRun:
    def test_is_raised_right_after_a_call(self) -> None:
        after = []

        def run() -> None:
            torch.log(torch.tensor([-1.0, -2.0]))
            after.append(1)

        with pytest.raises(sl.NonFiniteError, match=r"^log made 2 NaN"):
            checked(run)
        assert not after

    def test_of_an_operator_is_raised_by_the_next_call(self) -> None:
        after = []

        def run() -> None:
            zero = torch.zeros(1)
            zero / zero
            after.append(len("a call"))

        with pytest.raises(sl.NonFiniteError, match=r"^div(\.Tensor)? made 1 NaN"):
            checked(run)
        assert not after

    def test_comes_out_of_the_block_if_nothing_follows(self) -> None:
        zero = torch.zeros(1)
        recording = sl.trace(check="nonfinite", engine="native")
        with pytest.raises(sl.NonFiniteError, match=r"^div(\.Tensor)? made 1 NaN"), recording:
            result = zero / zero
        assert result.isnan()
        assert recording.stop().info["exception"].startswith("NonFiniteError: ")

    def test_is_raised_once(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
        for _ in range(3):
            with pytest.raises(sl.NonFiniteError):
                checked(lambda: model(torch.full((1, 2), float("inf")) - float("inf")))
        assert torch.ones(2).sum().item() == 2  # nothing is left to be raised

    def test_comes_out_of_the_block_in_another_thread(self) -> None:
        found: list[sl.NonFiniteError] = []

        def work() -> None:
            try:
                checked(lambda: [torch.log(torch.tensor([-1.0])) for _ in range(1000)])
            except sl.NonFiniteError as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        (error,) = found
        assert str(error).startswith("log made 1 NaN of 1 in f32[1], ")

    def test_leaves_nothing_pending_under_a_debugger(self) -> None:
        zero = torch.zeros(1)
        with pytest.raises(sl.NonFiniteError):
            checked(lambda: zero / zero)
        called = []
        sys.settrace(lambda *given: called.append(given[1]))
        try:
            bool(zero.isnan())
            checked(lambda: None)
        finally:
            sys.settrace(None)
        assert called

    def test_in_a_backward_pass(self) -> None:
        x = torch.zeros(2, requires_grad=True)
        with pytest.raises(sl.NonFiniteError, match="backward"):
            checked(lambda: (F.relu(x).sqrt().sum() * 0).backward(retain_graph=True))


def test_transforms_are_measured_below_them() -> None:
    x = torch.randn(4, 3)

    def loss(row: Tensor) -> Tensor:
        return row.exp().sum()

    plain = torch.vmap(torch.func.grad(loss))(x)
    with sl.trace(stats=True, check="nonfinite", engine="native") as t:
        observed = torch.vmap(torch.func.grad(loss))(x)
    assert torch.equal(plain, observed)
    assert not t.info["faults"]


def test_autocast_is_not_measured_in_its_dtype() -> None:
    x = torch.full((64, 64), 1.001)
    with torch.autocast("cpu", dtype=torch.bfloat16), sl.trace(ops="aten", stats=True, engine="native") as t:
        (x + 0).sum()
    assert not t.info["faults"]
    added = next(op.outputs[0] for op in t.ops if op.name.startswith("add"))
    assert added.stats is not None
    assert added.stats.mean == pytest.approx(1.001, rel=1e-6)
    assert added.stats.l2 == pytest.approx(64 * 1.001, rel=1e-6)
