"""The in-place culprit: both lines, the one that saved the tensor and the ones that changed it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.analysis.problems import find
from tests.recording.engines import BOTH_ENGINES


def leaf(*shape: int) -> Any:
    return torch.rand(shape, requires_grad=True)


def relu_after_sigmoid() -> None:
    y = leaf(2, 3).sigmoid()  # saved
    y.relu_()  # changed
    y.sum().backward()


def index_put() -> None:
    a = leaf(3).exp()
    b = a * a  # saved
    a[0] = 5.0  # changed
    b.sum().backward()


def through_a_view() -> None:
    a = leaf(4, 4).tanh()  # saved
    row = a[1]
    row += 1  # changed
    a.sum().backward()


def a_weight_after_its_use() -> None:
    weight, x = leaf(3, 3), leaf(2, 3)
    y = (x @ weight) ** 2  # saved
    with torch.no_grad():
        weight.add_(1)  # changed
    y.sum().backward()


def changed_twice() -> None:
    a = leaf(3).exp()  # saved
    a.mul_(2)  # changed
    a.add_(1)  # changed
    a.sum().backward()


class Square(torch.autograd.Function):
    """A function of the user's that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


FAULTS = [relu_after_sigmoid, index_put, through_a_view, a_weight_after_its_use, changed_twice]


def lines_of(fault: Callable[[], None], word: str) -> list[int]:
    lines, first = inspect.getsourcelines(fault)
    return [first + number for number, line in enumerate(lines) if f"# {word}" in line]


def note_of(fault: Callable[[], None], **options: Any) -> str:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        with sl.trace(**options):
            fault()
    (note,) = caught.value.__notes__
    return str(note)


@pytest.mark.parametrize("ops", ["aten", "both"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_both_lines_are_named(fault: Callable[[], None], ops: str) -> None:
    saver, *changers = note_of(fault, ops=ops).splitlines()
    (saved,) = lines_of(fault, "saved")
    assert f"test_inplace.py:{saved} in {fault.__name__}" in saver
    assert saver.endswith("for the backward pass; changed since by")
    for line, changer in zip(lines_of(fault, "changed"), changers, strict=True):
        assert f"test_inplace.py:{line} in {fault.__name__}" in changer


def test_the_note_reads_well() -> None:
    saver, changer = note_of(relu_after_sigmoid).splitlines()
    assert saver.startswith("sightline: sigmoid at ")
    assert " saved its result f32[2, 3] for" in saver
    assert changer.startswith("  relu_ at ")


def test_modules_are_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(3, 3), nn.ReLU(inplace=True)

        def forward(self, x: Any) -> Any:
            h = torch.sigmoid(self.fc(x))
            return self.act(h)

    model = Net()
    note = note_of(lambda: model(torch.rand(2, 3)).sum().backward(), model=model)
    assert "(Net) saved its result" in note
    assert note.endswith("(act)")


def test_a_function_of_the_users_that_saves() -> None:
    def run() -> None:
        x = leaf(3) * 1
        y = Square.apply(x)
        x.add_(1)
        y.sum().backward()

    note = note_of(run)
    assert "Square.forward saved its input" in note
    assert "  add_.Tensor at " in note


def test_what_was_saved_before_the_block_is_not_guessed() -> None:
    y = leaf(3).sigmoid()
    assert "changed since by" not in note_of(lambda: y.relu_().sum().backward())


def test_a_leaf_view_names_the_line() -> None:
    weight = leaf(3)

    def run() -> None:
        view = weight.view(3)
        view += 1  # changed

    with pytest.raises(RuntimeError, match="a view of a leaf Variable") as caught, sl.trace():
        run()
    (line,) = lines_of(run, "changed")
    assert f"test_inplace.py:{line} in " in caught.value.__notes__[0]


def test_the_api_level_says_what_would_help() -> None:
    advice = 'record with ops="both" (--ops both) to see which op saved the tensor'
    assert advice in note_of(relu_after_sigmoid, ops="api")


class RetainedGraph(nn.Module):
    """Whose graph is used again after an optimizer has changed its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).relu())
        return result


@BOTH_ENGINES
def test_a_backward_pass_after_a_step_fails_at_its_own_line(engine: Any) -> None:
    model = RetainedGraph()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def again() -> None:
        y = model(torch.randn(5, 4))
        for _ in range(2):
            y.mean().backward(retain_graph=True)  # failed
            optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        with sl.trace(engine=engine) as t:
            again()
    (problem,) = (each for each in find(t.index) if each.kind == "failure")
    assert f"test_inplace.py:{lines_of(again, 'failed')[0]} in" in problem.place
    assert "(parameter second.weight) for the backward pass; changed since by add_" in problem.detail
    assert "test_inplace.py" in problem.detail.partition("changed since by")[2]
