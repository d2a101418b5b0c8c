"""A compiled region is compared with the module calls it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from tests.compare.models import inputs, net, recorded

BACKENDS = ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _compiled(model: nn.Module, backend: str) -> sl.Trace:
    """A recording of a model that is compiled already."""
    with torch.no_grad():
        model(inputs())
    return recorded(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_is_compared_with_all_of_the_other(backend: str) -> None:
    compiled: Any = torch.compile(net(), backend=backend)
    diff = sl.diff(recorded(net()), _compiled(compiled, backend))
    assert diff.verdict in ("same", "close")
    assert diff.notes == []
    assert any("are inside compiled regions of b" in text for text in diff.comparison.harmless)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_compiled_module_with_another_result_is_named(backend: str) -> None:
    model: Any = net(1.0, 2.0, 1.0)
    for at, block in enumerate(model.blocks):
        model.blocks[at] = torch.compile(block, backend=backend)
    diff = sl.diff(recorded(net()), _compiled(model, backend))
    assert diff.divergence is not None
    assert diff.divergence.reason.kind == "compiled"
    assert diff.divergence.text.startswith("compiled Block at ")
    assert "(blocks.1): another result than the 26 ops of the first side" in diff.divergence.text
    assert diff.divergence.text.endswith("inputs are the same")
    assert len(diff.divergences) == 1


def test_two_compiled_models_that_differ_do_not_count_as_the_same_ops() -> None:
    one: Any
    other: Any
    one, other = (torch.compile(net(*scales), backend="eager") for scales in ((), (1.0, 2.0, 1.0)))
    diff = sl.diff(_compiled(one, "eager"), _compiled(other, "eager"))
    assert diff.verdict == "different"
    assert "the same ops" not in str(diff)
    assert diff.divergence is not None
    reason = diff.divergence.reason
    assert reason.kind == "compiled"
    assert [label is not None and label.module for label in (reason.a, reason.b)] == ["Net", "Net"]
    assert "the ops of both ran in compiled code" in diff.notes[0]


def _one(backend: str = "", where: str = "model", scale: float = 1.0, **options: Any) -> sl.Trace:
    """A forward and a backward pass; ``where`` is the part that the backend compiles."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Scaled(scale), torch.randn(16, 8)
    run: Any = (lambda x: model(x) * 2) if where == "function" else model
    if backend and where == "submodule":
        model.fc.compile(backend=backend)
    elif backend:
        run = torch.compile(run, backend=backend)
    run(x).sum().backward()
    model.zero_grad()
    with sl.trace(model, **options) as trace:
        run(x).sum().backward()
    return trace


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 4), scale

    def forward(self, x: torch.Tensor) -> Any:
        return (self.fc(x) * self.scale).relu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["model", "submodule", "function"])
def test_without_values_ops_inside_a_region_are_no_difference(where: str, backend: str) -> None:
    diff = sl.diff(_one(), _one(backend, where))
    assert diff.verdict == "unknown"
    assert diff.divergence is None
    assert diff.parting is None
    inside = [text for text in diff.comparison.harmless if "inside compiled regions" in text]
    assert len(inside) == 1
    assert "of a are inside compiled regions of b" in inside[0]
    assert "their results are compared" not in inside[0]
    assert not any("only in" in text and "no arithmetic" not in text for text in diff.comparison.harmless)


def test_a_recording_has_as_many_ops_beside_a_compiled_one_as_beside_another() -> None:
    eager, compiled = _one(), _one("eager")
    beside_eager, beside_compiled = sl.diff(eager, compiled), sl.diff(compiled, compiled)
    assert beside_eager.comparison.op_counts is not None
    assert beside_compiled.comparison.op_counts == (beside_eager.comparison.op_counts[1],) * 2
    function = _one("eager", "function")
    with torch.no_grad(), sl.trace(net()) as alone:
        torch.compile(lambda x: x + 1, backend="eager")(inputs())  # nothing uses its result
    for other in (function, alone):
        counts = sl.diff(other, other).comparison.op_counts
        assert counts is not None
        assert counts[0] == counts[1] > 0


def test_without_ops_the_module_with_another_result_is_named() -> None:
    calls = [_one(scale=scale, ops="none", stats=True) for scale in (1.0, 3.0)]
    compiled = _one("eager", stats=True)
    for a, b in (calls, (compiled, calls[1])):
        diff = sl.diff(a, b)
        assert diff.verdict == "different"
        assert diff.divergence is not None
        reason = diff.divergence.reason
        assert [label is not None and label.module for label in (reason.a, reason.b)] == ["Scaled"] * 2
        assert diff.comparison.op_counts is None
        assert "nothing\n" not in str(diff)
        assert "0 ops" not in str(diff)
