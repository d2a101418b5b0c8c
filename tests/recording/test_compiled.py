"""Compiled code stays compiled and appears as one opaque op; flex attention and ``torch.cond`` work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from tests.recording.nets import Net, api, aten

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what it compiles here
X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_stays_compiled(backend: str) -> None:
    net = Net()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    plain = compiled(X)
    before = graphs()
    with sl.trace(net):
        compiled(X)
    with sl.trace(net) as t:
        traced = compiled(X)
        traced.sum().backward()
    assert torch.equal(plain, traced)
    inside = graphs()
    assert inside <= before + 1  # once for all traces: Dynamo guards on the modes that are active
    compiled(X)
    assert graphs() == inside
    assert api(t)[:2] == ["compiled Net", "Tensor.sum"]
    opaque = t.ops[0]
    assert opaque.flavour == "opaque"
    assert opaque.outputs[0].consumers[0].name == "Tensor.sum"
    assert [value.kind for value in opaque.inputs] == ["input"]
    assert t.info["external"] == 0


def test_a_compiled_function_is_one_opaque_op_even_when_compiled_inside() -> None:
    def scaled(x: Tensor) -> Tensor:
        return (x @ x.T).relu()

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    with sl.trace() as t:
        first = compiled(X)
        second = compiled(X)
        first + second
    assert [op.name for op in t.ops if op.level == "api"] == [
        f"compiled {scaled.__qualname__}", f"compiled {scaled.__qualname__}", "+",
    ]  # fmt: skip
    assert [value.producer for value in t.ops[-1].inputs] == [t.ops[0], t.ops[1]]


def test_looking_inside_by_running_eagerly() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    compiled(X)
    with sl.trace(net, compiled="eager") as t:
        compiled(X)
    assert [name for name in aten(t) if name != "detach"] == ["t", "addmm", "relu", "t", "addmm"]
    before = graphs()
    compiled(X)
    assert graphs() == before


def test_a_module_compiled_in_place() -> None:
    net = Net()
    net.compile(backend="eager")
    net(X)
    with sl.trace(net) as t:
        net(X)
    assert api(t) == ["compiled Net"]


def test_a_compiled_part_inside_an_eager_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.compile(nn.Linear(4, 4), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x * 2).relu()  # type: ignore[no-any-return]

    model = Mixed()
    plain = model(X)
    with sl.trace(model) as t:
        traced = model(X)
    assert torch.equal(plain, traced)
    assert api(t) == ["*", "compiled Linear", "Tensor.relu"]
    assert t.ops[-2].inputs[0].producer == t.ops[2]


def test_cond_and_flex_attention_work() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))  # type: ignore[no-any-return]

    query = torch.linspace(-1, 1, 256).reshape(1, 2, 16, 8)
    plain = branch(X), flex_attention(query, query, query)
    with sl.trace() as t:
        traced = branch(X), flex_attention(query, query, query)
    assert torch.equal(plain[0], traced[0])
    assert isinstance(plain[1], Tensor)
    assert isinstance(traced[1], Tensor)
    assert torch.equal(plain[1], traced[1])
    assert any(op.flavour == "opaque" for op in t.ops)


def test_aten_ops_inside_compiled_code_are_not_said_to_be_unrecorded() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad():
        compiled(X)
        with sl.trace(net) as t:
            compiled(X)
    line = next(row for row in str(t).splitlines() if row.startswith("problems "))
    assert "compiled code" in line
    assert "aten ops" not in line
    assert "ops='both'" not in str(t.problems())
