"""What a recording holds: ops at both levels, values, module calls, stacks, phases."""

from __future__ import annotations

import gc
import linecache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sightline as sl
from tests.recording.engines import NATIVE
from tests.recording.nets import Nested, Net, Shared, api, aten


def test_api_calls_are_named_as_they_are_written() -> None:
    x = torch.ones(2, 2)
    with sl.trace() as t:
        torch.cat([x, x])
        F.linear(x, x)
        x.view(4)
        x @ x
        x.matmul(x)
        _ = 2 - x
        x[0]
        _ = -x
        _ = x > 1
        y = x.clone()
        y += 1
        y[0] = 3
        x.T  # noqa: B018  # a property that runs an op
        torch.linalg.norm(x)
    calls = [(op.name, op.flavour) for op in t.ops.where(level="api")]
    assert calls == [
        ("torch.cat", "function"), ("F.linear", "function"), ("Tensor.view", "method"), ("@", "operator"),
        ("Tensor.matmul", "method"), ("-", "operator"), ("[]", "operator"), ("-", "operator"),
        (">", "operator"), ("Tensor.clone", "method"), ("+=", "operator"), ("[]=", "operator"),
        ("Tensor.T", "property"), ("torch.linalg.norm", "function"),
    ]  # fmt: skip


def test_noise_is_left_out() -> None:
    x = torch.ones(2, 2)
    with sl.trace() as t:
        x.shape, x.dtype, x.device, x.size(), x.dim(), x.is_contiguous(), x.requires_grad, len(x)
        torch.is_tensor(x)
        with torch.no_grad():
            x.numel()
    assert len(t.ops) == 0


def test_what_returns_no_tensor_but_runs_an_op_is_kept() -> None:
    with sl.trace() as t:
        torch.ones(1).item()
    assert api(t) == ["torch.ones", "Tensor.item"]
    assert aten(t)[-1] == "_local_scalar_dense"


def test_each_aten_op_knows_its_api_call_module_and_line() -> None:
    net = Net()
    with sl.trace(net) as t:
        net(torch.ones(1, 4))
    addmm = next(op for op in t.ops if op.name == "addmm")
    assert addmm.parent is not None
    assert addmm.parent.name == "F.linear"
    assert addmm.module is not None
    assert addmm.module.path == "fc1"
    assert addmm.frame is not None
    chain = [frame for frame in addmm.frame.chain if frame.file.endswith("nets.py")]
    assert chain[-1].function == "Net.forward"
    assert chain[-1].code == "h = torch.relu(self.fc1(x))"
    first, last = chain[-1].columns or (0, 0)
    assert linecache.getline(chain[-1].file, chain[-1].line)[first:last] == "self.fc1(x)"


def test_arguments_are_kept_as_data() -> None:
    x = torch.ones(2, 3)
    with sl.trace() as t:
        torch.add(x, x, alpha=2)
        x.to(torch.float64)
        torch.zeros(2, dtype=torch.int64)
        F.gelu(x, approximate="tanh")
    add, to, zeros, gelu = t.ops.where(level="aten")
    assert add.args["alpha"] == 2
    assert add.args["self"].shape == (2, 3)
    assert repr(to.args["dtype"]) == "torch.float64"
    assert zeros.args["size"] == [2]
    assert gelu.args["approximate"] == "tanh"
    assert str(add) == "add.Tensor(f32[2, 3], f32[2, 3], alpha=2) -> f32[2, 3]"


def test_equal_looking_arguments_are_told_apart() -> None:
    x = torch.ones(2)
    with sl.trace() as t:
        for scalar in (1, 1.0, True, 0.0, -0.0, 0, False):
            torch.mul(x, scalar)
    shown = [str(op).split(", ")[1].split(")")[0] for op in t.ops.where(level="api")]
    assert shown == ["1", "1.0", "True", "0.0", "-0.0", "0", "False"]


def test_long_arguments_are_bounded() -> None:
    with sl.trace() as t:
        torch.tensor(list(range(10_000)))
        torch.ones(3)[torch.zeros(2, dtype=torch.int64)]
    assert all(len(str(op)) < 1000 for op in t.ops)


def test_values_know_what_they_are() -> None:
    net = Net()
    x = torch.ones(1, 4, requires_grad=True)
    with sl.trace(net) as t:
        y = net(x)
    first = t.module_calls[0]
    (given,) = first.inputs
    assert (given.kind, given.shape, given.requires_grad) == ("input", (1, 4), True)
    weight = next(value for value in t.values if value.name == "fc1.weight")
    assert (weight.kind, weight.requires_grad) == ("parameter", True)
    (result,) = first.outputs
    assert result.kind == "activation"
    assert result.requires_grad is y.requires_grad is True
    assert result.producer is not None
    assert result.producer.name == "addmm"
    relu = next(op for op in t.ops if op.name == "relu")
    assert relu.outputs[0].consumers[0].name in ("F.linear", "Tensor.detach", "detach", "addmm")
    assert given.storage_bytes == 16


def test_views_share_storage_and_know_their_base() -> None:
    with sl.trace() as t:
        x = torch.zeros(4, 4)
        x[1:3].t()
    zeros, part, turned = (op.outputs[0] for op in t.ops.where(level="aten"))
    assert part.base == zeros
    assert turned.base == part
    assert zeros.storage == part.storage == turned.storage
    assert zeros.storage_bytes == 64
    assert t.data.values.offset.tolist()[part.id] == 4
    assert turned.stride == (1, 4)


def test_an_in_place_op_makes_a_new_version() -> None:
    with sl.trace() as t:
        x = torch.zeros(4)
        x.add_(1)
        x.relu()
    zeros, add, relu = t.ops.where(level="aten")
    (version,) = add.outputs
    assert version.previous == zeros.outputs[0]
    assert version.storage == zeros.outputs[0].storage
    assert add.mutates
    assert relu.inputs[0] == version


def test_a_change_through_a_view_reaches_its_base_and_nothing_else() -> None:
    with sl.trace() as t:
        x = torch.zeros(4)
        first, second = x[:2], x[2:]
        first.add_(1)
        x.sum()
        second.sum()
    add = next(op for op in t.ops if op.name == "add_.Tensor")
    whole, untouched = [op for op in t.ops.where(level="aten") if op.name == "sum"]
    assert whole.inputs[0].producer == add
    assert whole.inputs[0].previous is not None
    assert whole.inputs[0].previous.producer is not None
    assert whole.inputs[0].previous.producer.name == "zeros"
    assert untouched.inputs[0].producer is not None
    assert untouched.inputs[0].producer.name == "slice.Tensor"


def test_what_returns_its_input_makes_no_new_value() -> None:
    x = torch.ones(2)
    with sl.trace() as t:
        x.contiguous()
        x.to(torch.float32)
    assert all(op.outputs[0] == op.inputs[0] for op in t.ops)


def test_an_out_argument_is_a_new_version_of_it() -> None:
    out = torch.zeros(2)
    with sl.trace() as t:
        torch.add(torch.ones(2), 1, out=out)
    op = t.ops[-1]
    assert op.name == "add.out"
    assert op.outputs[0].previous is not None


def test_tensors_made_from_data_are_constants() -> None:
    with sl.trace() as t:
        torch.tensor([1.0, 2.0]) * torch.from_numpy(np.ones(2, dtype=np.float32))
    assert [value.kind for value in t.ops[-1].inputs] == ["constant", "constant"]


def test_plain_tensor_attributes_of_a_module_are_constants_with_their_name() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.full((1,), 3.0)
            self.table = [torch.ones(1), torch.zeros(1)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.table[1]

    model = Scaled()
    with sl.trace(model) as t:
        model(torch.ones(1))
    kinds = {value.name: value.kind for value in t.values if value.name}
    assert kinds == {"scale": "constant", "table[1]": "constant"}


def test_a_tensor_from_nowhere_is_external_and_counted() -> None:
    class Secret:
        value = torch.ones(1)

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * Secret.value

    model = Odd()
    with sl.trace(model) as t:
        model(torch.ones(1))
    assert t.info["external"] == t.validate().external == 1


def test_module_calls_nest_and_count() -> None:
    model = Shared()
    with sl.trace(model) as t:
        model(torch.ones(1, 4))
    calls = [(call.module.label, call.index, call.depth) for call in t.module_calls]
    assert calls == [("Shared", 0, 0), ("first", 0, 1), ("first", 1, 1)]
    assert t.module_calls[1].module.aliases == ("first", "second")
    assert [call.order for call in t.module_calls] == [2, 0, 1]
    assert all(call.duration > 0 for call in t.module_calls)


def test_nested_inputs_and_outputs_have_key_paths() -> None:
    model = Nested()
    batch = {"ids": torch.ones(2, 3), "unused": torch.ones(1)}
    with sl.trace(model) as t:
        model(batch, mask=torch.zeros(2, 3), scale=2.0)
    (call,) = t.module_calls
    assert call.input_form.slots() == ["[0]['ids']", "[0]['unused']", "mask"]
    assert [value.shape for value in call.inputs] == [(2, 3), (1,), (2, 3)]
    assert call.output_form.slots() == ["[0].logits", "[0].hidden[0]", "[0].hidden[1]"]
    assert call.input_form.kwargs is not None
    assert call.input_form.kwargs["scale"] == 2.0


def test_inputs_are_what_went_in_even_if_changed_in_place_since() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * 1)  # type: ignore[no-any-return]

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    model = Changes()
    with sl.trace(model) as t:
        model(torch.ones(1))
    inner = t.module_calls[1]
    assert inner.inputs[0].producer is not None
    assert inner.inputs[0].producer.name == "mul.Tensor"
    assert inner.outputs[0].previous == inner.inputs[0]


def test_modules_not_of_the_model_have_a_root_of_their_own() -> None:
    net, loss = Net(), nn.MSELoss()
    with sl.trace(net) as t:
        loss(net(torch.ones(1, 4)), torch.zeros(1, 2))
    assert t.module_calls[-1].module.label == "MSELoss"
    assert t.module_calls[-1].module.root == t.module_calls[-1].module


def test_without_a_model_paths_are_relative_to_the_first_one_called() -> None:
    net = Net()
    with sl.trace() as t:
        net(torch.ones(1, 4))
    assert [call.module.path for call in t.module_calls] == ["", "fc1", "fc2"]
    assert {value.name for value in t.values if value.kind == "parameter"} >= {"fc1.weight", "fc2.bias"}


def test_every_backward_op_is_linked_to_its_forward_op() -> None:
    net = Net()
    with sl.trace(net) as t:
        net(torch.ones(1, 4)).sum().backward()
    backward = t.ops.where(level="aten", phase="backward")
    assert len(backward) > 8
    assert all(op.forward is not None for op in backward)
    mm = next(op for op in backward if op.name == "mm")
    assert mm.forward is not None
    assert mm.forward.name == "addmm"
    assert mm.module is not None
    assert mm.module.path == "fc2"
    assert "fc1.weight.grad" in {value.name for value in t.values if value.kind == "gradient"}


def test_an_optimizer_step_is_a_phase_with_named_state() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with sl.trace(net) as t:
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        net(torch.ones(1, 4))
    assert len(t.ops.where(phase="optimizer")) > 10
    assert t.ops[-1].phase == "forward"
    state = {value.name for value in t.values if value.kind == "state"}
    assert {"fc1.weight.exp_avg", "fc2.bias.exp_avg_sq"} <= state


def test_levels_record_what_they_say() -> None:
    net = Net()
    seen = {}
    levels: tuple[Literal["none", "api", "aten", "both"], ...] = ("none", "api", "aten", "both")
    for level in levels:
        with sl.trace(net, ops=level) as t:
            net(torch.ones(1, 4)).sum().backward()
        assert [call.module.label for call in t.module_calls] == ["Net", "fc1", "fc2"]
        seen[level] = {op.level for op in t.ops}
    assert seen == {"none": set(), "api": {"api"}, "aten": {"aten"}, "both": {"api", "aten"}}


def test_a_snapshot_can_be_read_while_the_block_runs() -> None:
    lengths = []

    class Peeks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            lengths.append((len(t.ops), t.module_calls[0].unfinished, str(t.code(tail=20))))
            return x * 2

    model, x = Peeks(), torch.ones(1)
    with sl.trace(model) as t:
        model(x)
    ((count, unfinished, code),) = lengths
    assert (count, unfinished) == (2, True)
    assert "add.Tensor" in code
    assert len(t.ops) == 4
    assert not t.module_calls[0].unfinished


def test_the_durations_leave_out_the_recorder() -> None:
    net = Net()
    with sl.trace(net) as t:
        net(torch.ones(1, 4))
    root = t.module_calls[0]
    assert root.duration <= t.info["duration_ns"]
    assert sum(op.duration for op in root.ops.where(level="aten")) <= root.duration


def test_factory_functions_are_seen() -> None:
    with sl.trace() as t:
        torch.zeros(2), torch.arange(3), torch.rand(1), torch.eye(2)
    assert aten(t) == ["zeros", "arange", "rand", "eye"]
    assert api(t) == ["torch.zeros", "torch.arange", "torch.rand", "torch.eye"]


def test_several_results_know_their_place_and_their_base() -> None:
    with sl.trace() as t:
        x = torch.zeros(4, 6)
        x.split(3, dim=1)
        torch.nn.functional.layer_norm(x, (6,))
    split, norm = (op for op in t.ops.where(level="aten") if len(op.outputs) > 1)
    assert [value.slot for value in split.outputs] == [0, 1]
    assert all(value.base == split.inputs[0] for value in split.outputs)
    assert [t.data.values.offset[value.id] for value in split.outputs] == [0, 3]
    assert [value.slot for value in norm.outputs] == [0, 1, 2]
    assert len({value.storage for value in norm.outputs}) == 3


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("path", [False, True])
def test_a_parameter_stays_one_whoever_makes_and_changes_it(inside: bool, path: bool, tmp_path: Path) -> None:
    model = None if inside else torch.nn.Linear(3, 2)
    with sl.trace(model, path=tmp_path / "run.sight" if path else None) as t:
        model = torch.nn.Linear(3, 2) if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    t.validate()
    read = [op.inputs[0] for op in t.ops.where(name="addmm")]
    assert [(value.kind, value.name) for value in read] == [("parameter", "bias")] * 2
    assert read[1].producer is not None
    assert read[1].producer.phase == "optimizer"
    weights = t.values.where(name="weight")
    assert {value.kind for value in weights} == {"parameter"}
    assert [value.producer and value.producer.name for value in weights] == (
        # The observer also sees the op by which torch makes a parameter of a tensor.
        [*[None] * (not (NATIVE and inside)), *["uniform_"] * inside, "add_.Tensor", "add_.Tensor"]
    )


class Talkative(nn.Module):
    """Says how it is by running ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def extra_repr(self) -> str:
        return f"mean={self.weight.mean().item():.1f}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_module_that_is_gone_at_the_end_is_known() -> None:
    with sl.trace() as t:
        for _ in range(2):
            nn.Sequential(Talkative(), nn.ReLU())(torch.ones(3))
            gc.collect()
    first = [module for module in t.modules if not module.path.startswith("Sequential")]
    assert [(module.path, module.type, module.extra) for module in first] == [
        ("", "Sequential", ""), ("0", "Talkative", "mean=1.0"), ("1", "ReLU", ""),
    ]  # fmt: skip
    assert [op.name for op in t.ops.where(level="api", module="0")] == ["*"]
    assert len({info.key for module in t.data.modules for info in module.parameters}) == 2


def test_what_autograd_saved_is_the_value_that_it_saved() -> None:
    scores = torch.randn(3, 3, requires_grad=True)
    with sl.trace(ops="aten") as t:
        weights = scores.softmax(-1)
        (weights @ torch.ones(3, 2, requires_grad=True)).sum().backward()  # transposes the weights first
    (made,) = [op.outputs[0] for op in t.ops if op.name == "_softmax"]
    (again,) = [op.inputs[1] for op in t.ops if op.name == "_softmax_backward_data"]
    assert again.id in {made.id, *(op.outputs[0].id for op in t.ops if op.name == "detach")}
