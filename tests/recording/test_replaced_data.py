"""Tensors that get another dtype, shape or memory without an op: what is shown is what they are when used."""

# mypy: disable-error-code="arg-type,call-overload,no-untyped-call"

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from tests.recording.engines import BOTH_ENGINES, EVERY_WAY, options
from tests.recording.nets import Net

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def swapping() -> Iterator[None]:
    """Parameters are swapped by ``module.to(…)``, as torch may do by default one day."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def after(change: Callable[[nn.Module], Any], dtype: torch.dtype = torch.float32, **asked: Any) -> sl.Trace:
    """A model that runs, is changed and runs again."""
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    with sl.trace(net, **asked) as t:
        net(X)
        change(net)
        net(X.to(dtype))
    t.validate()
    return t


def weights(trace: sl.Trace) -> list[Any]:
    """What each call of ``F.linear`` was given as its weight."""
    return [op.inputs[1] for op in trace.ops if op.name == "F.linear"]


@EVERY_WAY
def test_a_model_of_another_dtype(engine: str, kept: str, tmp_path: Path) -> None:
    t = after(lambda net: net.to(torch.bfloat16), torch.bfloat16, **options(engine, kept, tmp_path))
    found = weights(t)
    assert [value.dtype for value in found] == ["float32"] * 2 + ["bfloat16"] * 2
    assert [value.name for value in found] == ["fc1.weight", "fc2.weight"] * 2
    assert [value.kind for value in found] == ["parameter"] * 4
    assert found[2].previous == found[0]
    assert found[2].storage != found[0].storage
    assert "addmm(bf16[8], bf16[3, 4], bf16[4, 8])" in str(t.code())


@EVERY_WAY
def test_a_model_of_another_dtype_that_is_swapped(
    engine: str, kept: str, tmp_path: Path, swapping: None
) -> None:
    t = after(lambda net: net.to(torch.bfloat16), torch.bfloat16, **options(engine, kept, tmp_path))
    found = weights(t)
    assert [value.dtype for value in found] == ["float32"] * 2 + ["bfloat16"] * 2
    assert [value.name for value in found] == ["fc1.weight", "fc2.weight"] * 2
    assert [value.kind for value in found] == ["parameter"] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EVERY_WAY
def test_a_model_on_another_device(engine: str, kept: str, tmp_path: Path) -> None:
    net = Net().requires_grad_(False)
    with sl.trace(net, **options(engine, kept, tmp_path)) as t:
        net(X)
        net.to("cuda")
        net(X.to("cuda"))
    t.validate()
    assert [value.device for value in weights(t)] == ["cpu"] * 2 + ["cuda:0"] * 2
    assert "copy" not in str(t.problems())


@EVERY_WAY
def test_a_model_on_the_meta_device(engine: str, kept: str, tmp_path: Path) -> None:
    net = Net().requires_grad_(False)
    with sl.trace(net, **options(engine, kept, tmp_path)) as t:
        net(X)
        net.to("meta")
        net(X.to("meta"))
    t.validate()
    assert [value.device for value in weights(t)] == ["cpu"] * 2 + ["meta"] * 2


@EVERY_WAY
def test_other_data(engine: str, kept: str, tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(3))
    lasting = torch.zeros(2, 2)
    with sl.trace(**options(engine, kept, tmp_path)) as t:
        p.mul(1)
        p.data = torch.zeros(4)
        p.mul(1)
        p.data = p.data.view(2, 2)
        p.mul(1)
        p.data = lasting
        p.mul(1)
        with torch.no_grad():
            p.set_(torch.ones(5))
        p.mul(1)
    t.validate()
    used = [op.inputs[0] for op in t.ops.where(level="aten") if op.name == "mul.Tensor"]
    assert [tuple(value.shape) for value in used] == [(3,), (4,), (2, 2), (2, 2), (5,)]
    assert used[1].previous == used[0]
    assert used[2].previous == used[1]
    assert used[2].storage == used[1].storage
    assert used[3].previous == used[2]
    assert len({value.storage for value in used[:4]}) == 3


@EVERY_WAY
def test_parameters_that_are_assigned(engine: str, kept: str, tmp_path: Path) -> None:
    held = {name: tensor.to(torch.float64) for name, tensor in Net().state_dict().items()}
    t = after(
        lambda net: net.load_state_dict(held, assign=True), torch.float64, **options(engine, kept, tmp_path)
    )
    found = weights(t)
    assert [value.dtype for value in found] == ["float32"] * 2 + ["float64"] * 2
    assert [value.name for value in found] == ["fc1.weight", "fc2.weight"] * 2
    assert [value.kind for value in found] == ["parameter"] * 4


@EVERY_WAY
def test_what_is_trained_afterwards_has_its_gradients(engine: str, kept: str, tmp_path: Path) -> None:
    net = Net()
    held = {name: tensor.to(torch.float64) for name, tensor in net.state_dict().items()}
    with sl.trace(net, **options(engine, kept, tmp_path)) as t:
        net(X)
        net.load_state_dict(held, assign=True)
        net(X.double()).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    t.validate()
    assert {value.dtype for value in t.values if value.name == "fc1.weight.grad"} == {"float64"}


@EVERY_WAY
def test_a_lazy_parameter_has_its_shape(engine: str, kept: str, tmp_path: Path) -> None:
    net = nn.LazyLinear(2)
    with sl.trace(net, **options(engine, kept, tmp_path)) as t:
        net(X)
    found = weights(t)
    assert [(tuple(value.shape), value.kind, value.name) for value in found] == [
        ((2, 4), "parameter", "weight")
    ]


@EVERY_WAY
def test_a_run_that_changes_nothing_has_no_new_versions(engine: str, kept: str, tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with sl.trace(net, **options(engine, kept, tmp_path)) as t:
        for _ in range(2):
            net(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    versions = [value for value in t.values if value.previous is not None]
    assert versions
    assert all(value.producer is not None for value in versions)


OBSERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "api": {"ops": "api"},
    "none": {"ops": "none"},
    "capture": {"capture": sl.Capture(modules="**", ops="*", inputs=True, gradients=True)},
    "statistics": {"stats": sl.Stats(fingerprint="views")},
    "check": {"check": sl.Check(on="report")},
}


class Constant(Net):
    """A model with an attribute that is a tensor, of which the recorder takes note."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((2,), 3.0)

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("observed", OBSERVED)
@EVERY_WAY
def test_a_finished_recording_refers_to_no_tensor(
    engine: str, kept: str, observed: str, tmp_path: Path
) -> None:
    net, x = Constant(), torch.ones(3, 4)
    state = list(net.parameters())
    optimizer = torch.optim.Adam(net.parameters())
    with sl.trace(net, **options(engine, kept, tmp_path), **OBSERVED[observed]) as t:
        y = net(x)
        y.sum().backward()
        optimizer.step()
    moments = [one for state in optimizer.state.values() for one in state.values()]
    held = [x, y, net.scale, *state, *(one.grad for one in state), *moments]
    assert not any(map(weakref.getweakrefs, held))
    assert len(t.ops) or observed == "none"  # read only now
    assert len(t.module_calls) == 3
    assert not any(map(weakref.getweakrefs, held))


@BOTH_ENGINES
def test_a_recording_with_compiled_code_refers_to_no_tensor(engine: str) -> None:
    older, doubled = torch.ones(3), torch.compile(lambda x: x * 2, backend="eager")
    with sl.trace(engine=engine, check=sl.Check(on="report")) as t:
        y = doubled(older)
        z = doubled(y)
    assert not any(map(weakref.getweakrefs, (older, y, z)))
    assert sum(op.name.startswith("compiled ") for op in t.ops) == 2


@EVERY_WAY
def test_a_recording_that_never_began_refers_to_no_tensor(
    engine: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()

    def fail(*_: Any) -> None:
        raise OSError("no signal handlers here")

    monkeypatch.setattr("sightline.recording.recorder.StackDump.install", fail)
    with pytest.raises(OSError, match="no signal handlers") as raised:
        with sl.trace(net, **options(engine, kept, tmp_path)):
            pass
    assert raised.tb is not None  # which holds the recorder
    assert not any(map(weakref.getweakrefs, net.parameters()))


@EVERY_WAY
def test_a_forked_process_refers_to_no_tensor(engine: str, kept: str, tmp_path: Path) -> None:
    net = Net()
    with sl.trace(net, **options(engine, kept, tmp_path)) as t:
        net(X)
        child = os.fork()
        if child == 0:
            os._exit(sum(map(len, map(weakref.getweakrefs, net.parameters()))))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        net(X)
    assert len(t.module_calls) == 6
