"""What went into a module call is what it was given, whatever it did to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from tests.recording.engines import EVERY_WAY, options

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Changing(nn.Module):
    """Puts its result into what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Any], *, more: list[Any] | None = None) -> dict[str, Any]:
        batch["x"] = self.fc(batch["x"])
        batch["made"] = {"y": batch["x"] + 1}
        if more is not None:
            more[0]["x"] = batch["x"]
            more.append(batch["x"])
        return batch


class Outer(nn.Module):
    """Calls it, so that it is no root."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Changing()

    def forward(self, x: Tensor) -> Any:
        return self.inner({"x": x, "deep": [{"x": x}]}, more=[{"x": x}])


def shapes(values: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


@EVERY_WAY
def test_a_dict_that_is_changed(engine: str, kept: str, tmp_path: Path) -> None:
    net = Outer()
    with sl.trace(net, **options(engine, kept, tmp_path)) as t:
        net(X)
    inner = next(call for call in t.module_calls if call.module.path == "inner")
    assert shapes(inner.inputs) == [(2, 4)] * 3
    assert shapes(inner.outputs) == [(2, 3), (2, 4), (2, 3)]
    assert {value.id for value in inner.inputs} == {t.module_calls[0].inputs[0].id}


@EVERY_WAY
@pytest.mark.parametrize("ops", ["none", "api", "aten"])
def test_at_every_level(engine: str, kept: str, tmp_path: Path, ops: str) -> None:
    net = Outer()
    with sl.trace(net, ops=ops, **options(engine, kept, tmp_path)) as t:  # type: ignore[arg-type]
        net(X)
    inner = next(call for call in t.module_calls if call.module.path == "inner")
    assert shapes(inner.inputs) == [(2, 4)] * 3


@EVERY_WAY
def test_a_call_that_raises(engine: str, kept: str, tmp_path: Path) -> None:
    class Raising(Changing):
        def forward(self, batch: dict[str, Any], *, more: Any = None) -> Any:
            super().forward(batch)
            raise ValueError("never mind")

    net = Outer()
    net.inner = Raising()
    with pytest.raises(ValueError, match="never mind"), sl.trace(net, **options(engine, kept, tmp_path)) as t:
        net(X)
    inner = next(call for call in t.module_calls if call.module.path == "inner")
    assert shapes(inner.inputs) == [(2, 4)] * 3


@EVERY_WAY
def test_what_a_hook_replaces_is_what_went_in(engine: str, kept: str, tmp_path: Path) -> None:
    net = Outer()
    net.inner.fc.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with sl.trace(net, **options(engine, kept, tmp_path)) as t:
        net(X)
    fc = next(call for call in t.module_calls if call.module.path == "inner.fc")
    assert [value.producer and value.producer.name for value in fc.inputs] == ["mul.Tensor"]
