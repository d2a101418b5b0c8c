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
    assert "the ops inside compiled code were not compared" in str(diff)
    assert "the same ops" not in str(diff)
    assert diff.notes[0].endswith("the ops of a ran in compiled code and the ops of b ran in compiled code")
