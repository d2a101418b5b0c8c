"""Tensors whose sizes are symbols: recording asks none for its number, and shows it as torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import sightline as sl
from sightline.compat.torch_code_tracing import TracingMode
from sightline.errors import UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x).relu()
        late = y[x.shape[0] - 2 :]  # it begins at a symbol, too
        wide = y.reshape(x.shape[0], 1, 3).expand(-1, 2, 3) * 2
        return wide.sum(), late + 1, torch.cat([x, x])


class World:
    """A model and an input of a symbolic number of rows, in an environment that says what was guarded."""

    def __init__(self) -> None:
        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes)
        context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        self.x = self.mode.from_tensor(torch.randn(5, 4), symbolic_context=context)
        with self.mode:
            self.model = Net()

    def run(self) -> list[str]:
        with self.mode:
            outputs = self.model(self.x)
        return [str(tuple(one.shape)) for one in outputs]

    @property
    def guards(self) -> list[str]:
        return [str(guard.expr) for guard in self.shapes.guards]


def _shown(t: sl.Trace) -> None:
    for view in (t.code, t.log, t.summary, t.source, t.memory, t.graph):
        try:
            str(view())
        except UsageError:  # of what was not recorded
            continue
    str(t)


@pytest.mark.parametrize("ops", ["none", "api", "aten", "both"])
@pytest.mark.parametrize("where", ["memory", "disk", "last"])
def test_no_symbol_is_asked_for_its_number(tmp_path: Path, ops: Any, where: str) -> None:
    plain = World()
    shapes = plain.run()
    kept: dict[str, dict[str, Any]] = {
        "memory": {},
        "disk": {"path": tmp_path / "run.sight"},
        "last": {"last": 3},
    }
    traced = World()
    with sl.trace(traced.model, ops=ops, stats=True, capture=True, **kept[where]) as t:
        assert traced.run() == shapes
    _shown(t)
    assert traced.guards == plain.guards
    assert str(traced.x.shape) == str(plain.x.shape) != "torch.Size([5, 4])"
    if where == "disk":
        _shown(sl.load(tmp_path / "run.sight"))


def test_sizes_are_written_as_torch_writes_them(tmp_path: Path) -> None:
    world = World()
    symbol = str(world.x.shape[0])
    with sl.trace(world.model, ops="both", path=tmp_path / "run.sight") as t:
        world.run()
    for one in (t, sl.load(tmp_path / "run.sight")):
        assert f"addmm(f32[3], f32[{symbol}, 4], f32[4, 3]) -> f32[{symbol}, 3]" in str(one.code())
        assert f"FakeTensor [{symbol}, 4] @ cpu" in str(one.log())
        assert f"f32[2*{symbol}, 4]" in str(one.code())
    assert t.ops[0].inputs[0].shape == (5, 4)  # what torch has seen last


def test_a_size_that_only_the_run_knows(tmp_path: Path) -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        mask = torch.ones(6) > 0
        with sl.trace(path=tmp_path / "run.sight") as t:
            found = mask.nonzero()
    symbol = str(found.shape[0])
    assert f"-> i64[{symbol}, 1]" in str(t.code())
    assert f"-> i64[{symbol}, 1]" in str(sl.load(tmp_path / "run.sight").code())


def test_a_jagged_tensor_has_its_symbol() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(4, 8)], layout=torch.jagged)
    with sl.trace() as t:
        made = nested + 1
    assert f"f32[{', '.join(map(str, made.shape))}] nested" in str(t.code())
    assert made.shape[1] == nested.shape[1]


@pytest.mark.parametrize("quiet", [False, True])
def test_the_tracing_mode_changes_no_symbol(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plain, world = World(), World()
    plain.run()
    with TracingMode(quiet=quiet, color=False) as mode:
        world.run()
    symbol = str(world.x.shape[0])
    text = mode.format() if quiet else capsys.readouterr().out
    assert f"addmm(f32[3], f32[{symbol}, 4], f32[4, 3]) -> f32[{symbol}, 3];" in text
    assert world.guards == plain.guards


def test_plain_tensors_with_symbols() -> None:
    """A tensor on no device may have symbols without being of a class of its own."""
    shapes = ShapeEnv()
    size = shapes.create_unbacked_symint()
    x = torch.empty_strided((size, 4), (4, 1), device="meta")
    with sl.trace() as t:
        y = x.t()
    assert f"f32[4, {size}]" in str(t.code())
    assert str(y.shape[1]) == str(size)
    assert not shapes.guards
