"""A tensor whose memory was freed is recorded, named in errors and left out of captures; nothing reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.argument_checks import argument_text
from sightline.compat.torchspy import TensorSaver
from sightline.tensor_memory import has_memory, holds_freed, is_freed
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


class Slotted(Exception):
    """The same, with the tensor in a slot."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        super().__init__("bad")
        self.tensor = tensor

    def __str__(self) -> str:
        return f"bad {self.tensor}"


@dataclass
class Holder:
    """An object whose text shows a tensor."""

    tensor: Any

    def method(self) -> None:
        """Does nothing; the text of the bound method has that of the object."""


class Shown(nn.Module):
    """A module whose text shows a tensor."""

    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor)

    def extra_repr(self) -> str:
        return f"{self.weight}"


@BOTH_ENGINES
@pytest.mark.parametrize(
    "error",
    [
        lambda one: ValueError("bad", one),
        lambda one: KeyError({"x": [one]}),
        lambda one: ValueError({one: 1}),
        lambda one: ValueError(Holder(one)),
        lambda one: ValueError(Holder(one).method),
        lambda one: ValueError(partial(print, one)),
        lambda one: ValueError(deque([one])),
        lambda one: ValueError(Shown(one)),
        lambda one: RuntimeError(ValueError(one)),
        ShowsIt,
        Slotted,
    ],
)
def test_the_text_of_an_exception_is_not_made_of_it(engine: Any, error: Any) -> None:
    one = error(freed())
    with pytest.raises(type(one)), sl.trace(engine=engine) as t:
        raise one
    assert t.info["exception"] == f"{type(one).__name__}: <its text may show a tensor whose memory was freed>"


class Refusing(Exception):
    """An exception with a text of its own."""

    def __init__(self, cause: object) -> None:
        super().__init__("bad")
        self.cause = cause

    def __str__(self) -> str:
        return f"refused: {type(self.cause).__name__}"


@BOTH_ENGINES
def test_the_text_of_an_exception_is_made_where_nothing_is_freed(engine: Any) -> None:
    def fail_after(first: Exception, error: Exception) -> None:
        try:
            raise first
        except ValueError:  # it has a text of its own
            raise error  # noqa: B904

    last = freed()  # in a frame that the traceback holds
    for error, text in (
        (Refusing(Holder(torch.ones(3))), "Refusing: refused: Holder"),
        (ValueError(Holder(torch.ones(1))), "ValueError: Holder(tensor=tensor([1.]))"),
        (KeyError(("a", 1)), "KeyError: ('a', 1)"),
    ):
        with pytest.raises(type(error)), sl.trace(engine=engine) as t:
            fail_after(ValueError(last), error)
        assert t.info["exception"] == text


def test_the_text_of_an_exception_may_be_plain_while_it_holds_one() -> None:
    error = ValueError("bad")
    error.tensor = freed()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="bad"), sl.trace() as t:
        raise error
    assert t.info["exception"] == "ValueError: bad"


def test_a_search_that_takes_too_long_counts_as_found() -> None:
    many = [[number] for number in range(30_000)]
    assert holds_freed(many)
    assert not holds_freed(many[:1000])
    with pytest.raises(ValueError, match="too"), sl.trace() as t:
        raise ValueError("too", many)
    assert t.info["exception"] == "ValueError: <its text may show a tensor whose memory was freed>"


@BOTH_ENGINES
@pytest.mark.parametrize("place", ["parameter", "attribute", "part"])
def test_a_module_is_not_asked_for_a_text_that_shows_it(engine: Any, place: str) -> None:
    class Outer(Shown):
        def __init__(self) -> None:
            super().__init__(freed() if place == "parameter" else torch.ones(2))
            self.part = nn.Linear(2, 2)
            self.attribute = freed() if place == "attribute" else 1
            if place == "part":
                self.part.weight.untyped_storage().resize_(0)

        def extra_repr(self) -> str:
            return f"{self.weight} {self.part.weight} {self.attribute}"

        def forward(self, x: Any) -> Any:
            return x + 1

    model = Outer()
    with sl.trace(model, engine=engine) as t:
        model(torch.ones(2))
    assert len(t.module_calls) == 1
    assert t.modules[0].extra == ""


class Unwritable:
    """A key that refuses to be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


KEYS: dict[str, Callable[[], Any]] = {
    "freed": freed,
    "in a tuple": lambda: (freed(),),
    "living": lambda: torch.ones(2),
    "refusing": Unwritable,
}


@BOTH_ENGINES
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kept", ["tensor", "layer"])
def test_a_key_is_not_written_into_the_name_of_an_attribute(
    engine: Any, key: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held: dict[Any, Any] = {"first": 1, KEYS[key](): torch.ones(2)}
            self.layers: dict[Any, Any] = {"first": 1, KEYS[key](): nn.Linear(2, 2)}

        def forward(self, x: Any) -> Any:
            return list(self.layers.values())[1](x) if kept == "layer" else x + list(self.held.values())[1]

    printed: list[Any] = []
    monkeypatch.setattr("torch._tensor_str._str", lambda *given, **_: str(printed.extend(given)))  # type: ignore[func-returns-value]
    model, name = Keyed(), {"refusing": "Unwritable 1", "in a tuple": "tuple 1"}.get(key, "Tensor 1")
    with sl.trace(model, engine=engine) as t:
        model(torch.ones(1, 2))
    assert t.info["faults"] == []
    if kept == "layer":
        assert [one[2] for one in t.info["unregistered"]] == [f"layers[{name}]"]
    else:
        assert f"held[{name}]" in [value.name for value in t.values]
    assert not printed


@BOTH_ENGINES
@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_not_written_into_the_path_of_a_capture(engine: Any, key: str) -> None:
    class Keyed(nn.Module):
        def forward(self, x: Any, given: Any) -> Any:
            return {KEYS[key](): {"a": x + 1, "b": x + 2}, "c": x + 3, KEYS[key](): x + 4}

    model = Keyed()
    with sl.trace(model, engine=engine, capture=sl.Capture(inputs=True)) as t:
        model(torch.ones(2), {KEYS[key](): torch.ones(2)})
    assert t.info["faults"] == []
    name = {"refusing": "Unwritable", "in a tuple": "tuple"}.get(key, "Tensor")
    outputs = [one.path for one in t.index.raw.captures if one.role == "output"]
    assert outputs == [f"[{name} 0]['a']", f"[{name} 0]['b']", "['c']", f"[{name} 1]"]
    assert f"[1][{name} 0]" in [one.path for one in t.index.raw.captures if one.role == "input"]


@BOTH_ENGINES
def test_arguments_are_recorded_without_their_texts(engine: Any) -> None:
    class Taking(nn.Module):
        def forward(self, x: Any, given: Any) -> Any:
            return x + 1

    model = Taking()
    for given in (
        [Holder(freed()) for _ in range(100)],
        slice([freed()], Holder(freed())),
        [Unwritable()] * 99,
    ):
        with sl.trace(model, engine=engine) as t:
            model(torch.ones(2), given)
        assert t.info["faults"] == []
        held = [value for value in t.module_calls[0].inputs if value.shape == (64,)]
        assert len(held) == (64 if isinstance(given, list) and isinstance(given[0], Holder) else 0)


def test_the_state_of_an_optimizer_is_named_without_it() -> None:
    parameter = nn.Parameter(torch.ones(2))
    with sl.trace() as t:
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.sum().backward()
        optimizer.step()
        optimizer.state[parameter] = {freed(): torch.zeros(2), "plain": torch.zeros(2)}
        optimizer.step()
    assert t.info["faults"] == []


def test_ranks_name_it_by_its_class(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with sl.trace() as t:
        torch.ones(2).relu()
    t.save(tmp_path / "run" / "rank0.sight")
    t.save(tmp_path / "run" / "rank1.sight")
    job = sl.load(tmp_path / "run")
    with pytest.raises(sl.UsageError, match="rank a Tensor"):
        job.ranks[freed()]


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
