"""The note of an exception follows sizes by the ops that hand them on, never by equal numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.size_origins import size_origin
from sightline.data.rows import Value
from tests.recording.engines import BOTH_ENGINES


def _note(run: Callable[[], Any], **options: Any) -> str:
    """The last line of the note of a run that fails."""
    with pytest.raises(RuntimeError) as caught, sl.trace(**options):
        run()
    return str(caught.value.__notes__[0].splitlines()[-1])


@BOTH_ENGINES
@pytest.mark.parametrize("ops", ["both", "aten", "api"])
def test_a_weight_with_an_equal_number_is_not_named(engine: Any, ops: Any) -> None:
    down = nn.Conv2d(2, 8, 4)  # its kernel has four rows, and so has its result
    given, other = torch.ones(1, 2, 7, 7), torch.ones(1, 8, 5, 5)

    def run() -> Tensor:
        result: Tensor = down(given) + other
        return result

    note = _note(run, engine=engine, ops=ops)
    assert "parameter" not in note
    assert note.startswith(
        f"  size 4 in dimension 3 first appears at {'convolution' if ops == 'aten' else 'conv2d'}, "
    )


@BOTH_ENGINES
@pytest.mark.parametrize("ops", ["both", "aten", "api"])
def test_a_weight_that_gives_a_result_its_size_is_named(engine: Any, ops: Any) -> None:
    first, second = nn.Linear(6, 8), nn.Linear(7, 2)
    note = _note(lambda: second(torch.relu(first(torch.ones(3, 5, 6)))), engine=engine, ops=ops)
    assert "is the size of parameter weight; 7 is the size of parameter Linear_1.weight" in note


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(10, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos[: x.shape[0]]


@pytest.mark.parametrize("steps", [0, 1, 450])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_weight_is_made_where_it_was_created_not_where_a_step_changed_it(steps: int, foreach: bool) -> None:
    def run() -> None:
        model = _Positions()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        for length in [8] * steps + [12]:
            model(torch.randn(length, 4)).sum().backward()
            optimizer.step()

    line = _Positions.__init__.__code__.co_firstlineno + 2
    assert _note(run).endswith(
        f"10 is the size of parameter pos, made at tests/recording/test_size_origins.py:{line}"
    )


@BOTH_ENGINES
@pytest.mark.parametrize("ops", ["both", "aten", "api"])
def test_an_op_that_changes_many_tensors_in_place_makes_no_size(engine: Any, ops: Any) -> None:
    table, other = torch.zeros(10, 4), torch.zeros(3)

    def run() -> Tensor:
        with torch.no_grad():
            torch._foreach_add_([table, other], 1.0)
        return torch.ones(12, 4) + table

    note = _note(run, engine=engine, ops=ops)
    assert note.endswith("10 is a size of input f32[10, 4]")


@pytest.mark.parametrize("ops", ["both", "aten", "api"])
def test_a_batch_of_the_size_of_a_weight_comes_from_the_input(ops: Any) -> None:
    layer, given, other = nn.Linear(6, 4), torch.ones(4, 6), torch.ones(5)
    note = _note(lambda: layer(given).T.softmax(0) @ other, ops=ops)
    assert note.startswith("  size 4 in dimension 1 is a size of input f32[4, 6]; 5 is a size of ")


def test_the_size_of_an_expanded_tensor_is_not_claimed_to_come_from_an_equal_number() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(2, 5).mul(2).expand(3, 4)

    model, given = Net(), torch.ones(4)
    note = _note(lambda: model(given), model=model)
    assert note.startswith("  size 5 in dimension 1 first appears at ones, ")
    assert note.endswith("; 4 is also a size of input f32[4]")


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], int, int | None]] = {
    "transposed": (lambda x: x.transpose(0, 2), 0, 2),
    "permuted": (lambda x: x.permute(2, 0, 1), 1, 0),
    "unsqueezed": (lambda x: x.unsqueeze(1), 3, 2),
    "a new dimension": (lambda x: x.unsqueeze(1), 1, None),
    "selected": (lambda x: x[1], 0, 1),
    "sliced elsewhere": (lambda x: x[:, 1:], 2, 2),
    "sliced here": (lambda x: x[:, 1:], 1, None),
    "flattened": (lambda x: x.flatten(0, 1), 1, 2),
    "flattened here": (lambda x: x.flatten(0, 1), 0, None),
    "split in two": (lambda x: x.reshape(3, 2, 2, 5), 3, 2),
    "elementwise": (lambda x: (x * 2).relu() + torch.ones(5), 1, 1),
    "a product": (lambda x: x @ torch.ones(3, 5, 2), 1, 1),
    "a product's columns": (lambda x: torch.ones(3, 6, 4) @ x, 2, 2),
    "joined elsewhere": (lambda x: torch.cat([x, x]), 1, 1),
    "joined here": (lambda x: torch.cat([x, x]), 0, None),
    "an op that is not known": (lambda x: torch.einsum("abc->ca", x), 0, None),
}  # fmt: skip


@pytest.mark.parametrize("ops", ["both", "aten", "api"])
@pytest.mark.parametrize("way", WAYS)
def test_a_size_is_followed_by_its_dimension(way: str, ops: Any) -> None:
    run, dimension, origin = WAYS[way]
    if ops == "api" and way == "selected":
        origin = None  # its index is not looked at
    given = torch.ones(3, 4, 5)
    with sl.trace(ops=ops) as t:
        run(given)
    result = [op for op in t.ops if op.outputs][-1].outputs[-1]
    source, at, maker = size_origin(result, dimension)
    if origin is None:
        assert maker is not None
        assert source.id != _given(t).id
    else:
        assert (source.id, at, maker) == (_given(t).id, origin, None)


def _given(t: sl.Trace) -> Value:
    return next(value for value in t.values if value.kind == "input" and value.shape == (3, 4, 5))


def test_an_unknown_op_is_not_said_to_have_made_a_size_that_its_input_has() -> None:
    given, other = torch.ones(4, 6, 3), torch.ones(5)
    note = _note(lambda: torch.einsum("abc->cba", given).cumprod(0)[..., 0] + other)
    assert " comes out of " in note or " is a size of input" in note
    assert "first appears at einsum" not in note


def test_lineage_follows_a_size_by_its_dimension() -> None:
    given = torch.ones(5, 7)
    with sl.trace() as t:
        (given.unfold(1, 5, 2).sum(0) * 2).relu()  # the five columns of the frames are not the five rows
    assert str(t.lineage(t.values[-1])).startswith("$")
    with sl.trace() as t:
        (given.unfold(1, 4, 2) * 2).relu()
    assert "size 4 first appears at test_size_origins.py" in str(t.lineage(t.values[-1]))
