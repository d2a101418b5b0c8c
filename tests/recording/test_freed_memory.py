"""A tensor whose memory was freed is recorded, named in errors and left out of captures; nothing reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.argument_checks import argument_text
from sightline.compat.torchspy import TensorSaver
from sightline.tensor_memory import has_memory, is_freed
from tests.recording.engines import BOTH_ENGINES


def freed(*shape: int) -> Any:
    tensor = torch.ones(shape or (64,))
    tensor.untyped_storage().resize_(0)
    return tensor


class Free(nn.Module):
    """Returns a tensor that has no memory any more, a view of it, and one that has."""

    def forward(self, x: Any) -> Any:
        y = x * 2
        view = y[1:]
        y.untyped_storage().resize_(0)
        return sl.spy("y", y), view, x + 1


@BOTH_ENGINES
@pytest.mark.parametrize("kept", ["memory", "path"])
def test_is_left_out_of_captures(engine: str, kept: str, tmp_path: Path) -> None:
    folder = {"path": tmp_path / "run.sight"} if kept == "path" else {}
    options = sl.Capture(modules="**", inputs=True, ops="*")
    with sl.trace(Free(), engine=engine, capture=options, stats=True, check="nonfinite", **folder) as t:  # type: ignore[arg-type]
        Free()(torch.ones(8, 8))
    outputs = t.tensors.where(role="output")
    assert [one.shape for one in outputs] == [(8, 8)]
    assert t.info["left_out"]
    assert t.info["faults"] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda one: sl.spy(one, "name"),  # the arguments swapped
        sl.trace,
        lambda one: sl.trace(capture=one),
        lambda one: sl.trace(capture=[one]),
        lambda one: sl.trace(stats=one),
        lambda one: sl.trace(check={"a": (one,)}),  # type: ignore[arg-type]
        lambda one: sl.trace(last=one),
        lambda one: sl.trace(ops=one),
        lambda one: sl.trace(path=one),
        lambda one: sl.trace(name=one),
        lambda one: sl.trace(engine=one),
        lambda one: sl.Capture(modules=one),
        lambda one: sl.Capture(when=one),
        lambda one: sl.trace(capture=sl.Capture(dtype=slice(one))).start(),
        lambda one: sl.Capture(max_bytes=one),
        sl.load,
        lambda one: sl.step(one).__enter__(),
    ],
)
def test_is_not_read_for_an_error(call: Any) -> None:
    with pytest.raises(sl.SightlineError) as caught, sl.trace():
        call(freed())
    assert "tensor(" not in str(caught.value)


class ShowsIt(Exception):
    """An exception whose text shows a tensor that is no argument of it."""

    def __init__(self, tensor: Any) -> None:
        super().__init__("bad")
        self.tensor = tensor

    def __str__(self) -> str:
        return f"bad {self.tensor}"


@BOTH_ENGINES
@pytest.mark.parametrize(
    "error", [lambda one: ValueError("bad", one), lambda one: KeyError({"x": [one]}), ShowsIt]
)
def test_the_text_of_an_exception_is_not_made_of_it(engine: Any, error: Any) -> None:
    one = error(freed())
    with pytest.raises(type(one)), sl.trace(engine=engine) as t:
        raise one
    assert t.info["exception"] == f"{type(one).__name__}: <its text shows a tensor whose memory was freed>"


@BOTH_ENGINES
def test_a_module_is_not_asked_for_a_text_that_shows_it(engine: Any) -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(freed())

        def extra_repr(self) -> str:
            return f"{self.weight}"

        def forward(self, x: Any) -> Any:
            return x + 1

    model = Shown()
    with sl.trace(model, engine=engine) as t:
        model(torch.ones(2))
    assert len(t.module_calls) == 1


def test_views_name_it_by_its_class() -> None:
    with sl.trace() as t:
        torch.ones(2).relu()
    for option in ("module", "op", "phase"):
        with pytest.raises(sl.UsageError, match="a Tensor"):
            t.code(**{option: freed()})


def test_arguments_are_written_only_where_nothing_is_read() -> None:
    assert argument_text(freed()) == "a Tensor"
    assert argument_text([freed()]) == "a list"
    assert argument_text({"x": (freed(),)}) == "a dict"
    assert argument_text(slice(freed())) == "a slice"
    assert argument_text(nn.Parameter(torch.ones(2))) == "a Parameter"
    assert argument_text((torch.float32, "a", 1, None, ...)) == "(torch.float32, 'a', 1, None, Ellipsis)"


@pytest.mark.parametrize("norm_only", [False, True])
def test_is_not_saved_by_torchspy(tmp_path: Path, norm_only: bool) -> None:
    saver = TensorSaver(tmp_path)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged)
    jagged.values().untyped_storage().resize_(0)
    for one in (freed(), freed().view(8, 8), [freed()], jagged):
        with pytest.raises(sl.UsageError, match="its memory was freed"):
            saver.save("x", one, norm_only=norm_only)
    assert list(tmp_path.iterdir()) == []


class Still(torch.optim.SGD):
    """Steps nowhere: an optimizer would read the gradients itself."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def test_gradients_and_rates_are_not_read() -> None:
    layer = nn.Linear(4, 4)
    rate = torch.tensor(0.1)
    optimizer = Still(layer.parameters(), lr=rate)
    with sl.trace(layer) as t:
        layer(torch.ones(2, 4)).sum().backward()
        for one in layer.parameters():
            assert one.grad is not None
            one.grad.untyped_storage().resize_(0)
        rate.untyped_storage().resize_(0)
        optimizer.step()
    assert t.info["faults"] == []
    assert t.info["training"]["count"] == 1


def test_weights_are_not_compared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    model = Tied()
    model.table.weight.untyped_storage().resize_(0)
    with sl.trace(model) as t:
        model.head(torch.ones(1, 4))
    assert t.info["faults"] == []


def test_which_tensors_have_memory() -> None:
    plain = torch.arange(12.0).reshape(3, 4)
    assert all(
        map(has_memory, (plain, plain.t(), plain[1:], plain.expand(2, 3, 4), torch.empty(0), plain[:0]))
    )
    shrunk = torch.ones(8)
    head = shrunk[:2]
    shrunk.untyped_storage().resize_(8)
    assert has_memory(head)
    none = [freed(), shrunk, plain.to("meta"), plain.to_sparse(), plain.to_mkldnn()]
    none += [torch._efficientzerotensor(3), torch.nested.nested_tensor([plain], layout=torch.jagged)]
    assert not any(map(has_memory, none))
    assert [is_freed(one) for one in none] == [True, True, *[False] * 5]
    copied = torch._lazy_clone(plain)
    storage = torch._C._storage_address(plain)  # type: ignore[attr-defined]
    users = torch._C._storage_Use_Count(storage)
    assert has_memory(copied)
    assert has_memory(plain)
    # Asking copies nothing, and makes no object that would count as another user.
    assert torch._C._is_cow_tensor(copied)  # type: ignore[attr-defined]
    assert torch._C._storage_Use_Count(storage) == users
