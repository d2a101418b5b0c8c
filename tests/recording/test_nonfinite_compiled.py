"""A NaN out of compiled code: the check names the compiled function, and says how to see inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.notation import short_path

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what it compiles here
X = torch.linspace(-1, 1, 12).reshape(3, 4)
HERE = short_path(__file__)
HINT = '  its ops are compiled and were not seen: compiled="eager" shows which it was'


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def root(x: Tensor) -> Tensor:
    return (-x.abs() - 1).sqrt()


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return root(x)


class RootGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * 0).sqrt() + x


def error_of(run: Callable[[], object], model: nn.Module | None = None) -> list[str]:
    with pytest.raises(sl.NonFiniteError) as caught, sl.trace(model, check="nonfinite"):
        run()
    return str(caught.value).splitlines()


def test_of_a_compiled_module_at_its_exit() -> None:
    compiled = torch.compile(Root(), backend="eager")
    for _ in range(2):  # compiled inside the block, and before it
        headline, given, hint = error_of(lambda: compiled(X))
        assert headline.startswith(f"compiled Root made 12 NaN of 12 in f32[3, 4], {HERE}:")
        assert given == "  argument 0 f32[3, 4] = input"
        assert hint == HINT


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y + 1,
        lambda y: y.view(4, 3).exp(),
        lambda y: torch.where(X > 0, y, 0.0),  # not everything that reads it has a NaN
    ],
    ids=["op", "view", "where"],
)
def test_of_a_compiled_function_when_it_is_first_seen(after: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(root, backend="eager")
    lines = error_of(lambda: after(compiled(X)))
    assert lines[0].startswith("compiled root made 12 NaN of 12 in f32[3, 4], ")
    assert lines[-1] == f"{HINT}, or that it came from outside"  # it has no gradient, so nobody can tell


def test_of_a_compiled_function_that_nothing_reads_at_the_end_of_the_block() -> None:
    compiled = torch.compile(root, backend="eager")
    with pytest.raises(sl.NonFiniteError, match=r"^compiled root made 12 NaN of 12"):
        with sl.trace(check="nonfinite"):
            kept = compiled(X)
    assert kept.isnan().all()


def test_of_a_compiled_backward_pass() -> None:
    model = RootGradient()
    compiled = torch.compile(model, backend="aot_eager")

    def run() -> bool:
        compiled(X).sum().backward()
        return True

    headline = error_of(run, model)[0]
    assert headline.startswith("compiled backward (backward of compiled RootGradient) made 4 NaN of 4")


def test_eagerly_the_op_inside_is_named() -> None:
    compiled = torch.compile(root, backend="eager")
    with pytest.raises(sl.NonFiniteError, match=r"^sqrt made 12 NaN of 12 .* in root"):
        with sl.trace(check="nonfinite", compiled="eager"):
            compiled(X)


def test_what_is_reported_has_the_hint() -> None:
    compiled = torch.compile(root, backend="eager")
    with sl.trace(check=sl.Check(on="report")) as t:
        compiled(X.clone().requires_grad_()) + 1
    assert HINT in str(t.nonfinite()).splitlines()


MASK = torch.full((4, 4), float("-inf")).triu(1)
BAD = torch.tensor([[float("nan")] * 4])


def test_what_was_there_before_is_not_blamed_on_compiled_code() -> None:
    double = torch.compile(lambda x: x * 2, backend="eager")
    with sl.trace(check="nonfinite") as t:
        double(BAD) + 1
        (double(X) @ torch.ones(4, 4) + MASK[:1]).softmax(-1).sum()
        double(BAD)
    assert "no op made a NaN or Inf" in str(t.nonfinite())
