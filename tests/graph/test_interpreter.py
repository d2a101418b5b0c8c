from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sightline.errors import NoSuchNode, UsageError
from sightline.graph.exported import ExportedGraph, NodeIO, export
from tests.graph.exportable import Attention, Convolutional, InPlace, Modes, Shared, Structures

torch.set_num_threads(1)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def layered() -> ExportedGraph:
    torch.manual_seed(0)
    return export(Layered().eval(), torch.randn(3, 4))


def test_every_node_with_its_inputs_in_order(layered: ExportedGraph) -> None:
    x = torch.randn(5, 4)
    io = layered.run(x)
    assert list(io) == [node.name for node in layered.nodes]
    assert len(io) == len(layered)
    linear = io["linear"]
    assert isinstance(linear, NodeIO)
    assert linear.inputs[0] is x
    assert linear.inputs[1] is layered.model.blocks[0][0].weight  # type: ignore[union-attr, index]
    torch.testing.assert_close(linear.outputs, nn.functional.linear(x, *linear.inputs[1:]))
    assert io["add"].inputs == (x, io["relu"].outputs)
    assert "relu_2" in io
    assert repr(io) == f"<Run: {len(layered)} of {len(layered)} nodes>"


def test_unknown_nodes_are_told_with_near_names(layered: ExportedGraph) -> None:
    io = layered.run(torch.randn(5, 4))
    with pytest.raises(NoSuchNode, match=r"no node 'relu_9'; did you mean"):
        io["relu_9"]
    with pytest.raises(
        NoSuchNode, match=r"`edit=` names 'rellu_1', which this graph does not have; did you mean"
    ):
        layered.run(torch.randn(5, 4), edit={"rellu_1": torch.zeros(1)})
    with pytest.raises(NoSuchNode, match=r"`until=` names 'head.x'"):
        layered.run(torch.randn(5, 4), until="head.x")
    with pytest.raises(NoSuchNode, match=r"`until=` names 'zzz', .*; it has 'linear', 'relu', 'add'"):
        layered.run(torch.randn(5, 4), until="zzz")  # the message lists ops, not parameters


# -- kept values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("relu*", ["relu", "relu_1", "relu_2"]),
        (["relu", "head"], ["relu", "p_head_weight", "p_head_bias", "linear_3"]),
        (lambda name: name == "add_1", ["add_1"]),
        ((), []),
        (False, []),
    ],
)
def test_keep(layered: ExportedGraph, keep: Any, kept: list[str]) -> None:
    x = torch.randn(5, 4)
    whole, io = layered.run(x), layered.run(x, keep=keep)
    assert sorted(io) == sorted(kept)
    for name in kept:
        assert torch.equal(io[name].outputs, whole[name].outputs)
        assert len(io[name].inputs) == len(whole[name].inputs)
    assert torch.equal(io.output, whole.output)
    with pytest.raises(NoSuchNode, match="'linear' were not kept"):
        io["linear"]


def test_what_is_not_kept_is_freed(layered: ExportedGraph) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watch(name: str, inputs: tuple[Any, ...], outputs: Any) -> None:
        nonlocal most
        if layered[name].kind == "call":
            alive.append(weakref.ref(outputs))
        most = max(most, sum(one() is not None for one in alive))

    with torch.no_grad():
        layered.run(torch.randn(5, 4), keep=(), on_node=watch)
        assert most <= 3
        most, alive[:] = 0, []
        layered.run(torch.randn(5, 4), on_node=watch)
    assert most == len(alive) == 10
    gc.collect()


def test_until_stops_and_streams(layered: ExportedGraph) -> None:
    seen: list[str] = []
    io = layered.run(
        torch.randn(5, 4), until="relu_1", on_node=lambda name, inputs, outputs: seen.append(name)
    )
    assert seen[-1] == "relu_1"
    assert "linear_2" not in io
    assert "relu_1" in io
    with pytest.raises(UsageError, match="stopped after 'relu_1', as `until=` says"):
        io.output  # noqa: B018 — it raises
    assert list(layered.run(torch.randn(5, 4), until="blocks.0"))[-1] == "relu"


# -- edits -----------------------------------------------------------------------------------


def test_edits_by_name_path_and_glob(layered: ExportedGraph) -> None:
    model = copy.deepcopy(layered.model)
    assert isinstance(model, Layered)
    x = torch.randn(5, 4)
    model.blocks[1] = nn.Identity()
    by_value = layered.run(x, edit={"relu_1": layered.run(x)["add"].outputs})
    torch.testing.assert_close(by_value.output, model(x))
    by_path = layered.run(x, edit={"blocks.1": torch.zeros_like})
    assert torch.equal(by_path["add_1"].outputs, by_path["add"].outputs)
    everywhere = layered.run(x, edit={"blocks.*": lambda out: out * 0})
    torch.testing.assert_close(everywhere.output, model.head(x))
    assert torch.equal(layered.run(x, edit={"relu*": lambda out: out * 0}).output, everywhere.output)
    looked: list[Any] = []
    assert torch.equal(layered.run(x, edit={"relu": looked.append}).output, layered.run(x).output)
    assert len(looked) == 1
    weights = layered.run(x, edit={"p_head_weight": torch.zeros(2, 4)})
    torch.testing.assert_close(weights.output, model.head.bias.expand(5, 2))


def test_only_what_depends_on_an_edit_runs_again(layered: ExportedGraph) -> None:
    x = torch.randn(5, 4)
    io = layered.run(x)
    ran: list[str] = []
    change = {"blocks.1": lambda out: out * 0.5}
    again = layered.run(edit=change, given=io, on_node=lambda name, inputs, outputs: ran.append(name))
    assert ran == ["relu_1", "add_1", "linear_2", "relu_2", "add_2", "linear_3", "output"]
    assert torch.equal(again.output, layered.run(x, edit=change).output)
    assert again["linear"].outputs is io["linear"].outputs
    assert list(again) == list(io)


def test_what_an_earlier_run_did_not_keep_is_made_again(layered: ExportedGraph) -> None:
    x = torch.randn(5, 4)
    io = layered.run(x, keep=["x", "add"])
    change = {"relu_2": lambda out: -out}
    assert torch.equal(layered.run(edit=change, given=io).output, layered.run(x, edit=change).output)
    with pytest.raises(UsageError, match="did not keep the input 'x'"):
        layered.run(edit=change, given=layered.run(x, keep="relu"))


def test_wrong_edits(layered: ExportedGraph) -> None:
    x = torch.randn(5, 4)
    io = layered.run(x)
    with pytest.raises(UsageError, match="the inputs are those of the earlier run"):
        layered.run(x, given=io)
    with pytest.raises(UsageError, match="a run of another graph"):
        export(nn.ReLU().eval(), x).run(given=io)
    with pytest.raises(UsageError, match="The output itself cannot be edited"):
        layered.run(x, edit={"output": x})
    attention = export(Attention().eval(), torch.randn(2, 5, 8))
    with pytest.raises(UsageError, match=r"'attention' has 2 outputs in the graph \(.*\): name one of them"):
        attention.run(torch.randn(2, 5, 8), edit={"attention": lambda out: out})


def test_every_call_of_a_shared_module_is_edited() -> None:
    g = export(Shared().eval(), torch.randn(2, 4))
    assert (
        g.run(torch.randn(2, 4), edit={"fc": lambda out: out * 0, "twin": lambda out: out * 0}).output.sum()
        == 0
    )


# -- gradients and changes in place ------------------------------------------------------------


def test_gradients_are_those_of_the_model() -> None:
    model = Convolutional().eval()
    g = export(model, torch.randn(2, 3, 8, 8))
    x = torch.randn(3, 3, 8, 8, requires_grad=True)
    io = g.run(x)
    io["relu"].outputs.retain_grad()
    io.output.square().sum().backward()
    mine = (x.grad, model.fc.weight.grad, io["relu"].outputs.grad)
    assert all(grad is not None for grad in mine)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, model.fc.weight])
    torch.testing.assert_close(mine[0], wanted[0])
    torch.testing.assert_close(mine[1], wanted[1])
    with torch.no_grad():
        assert not g.run(x).output.requires_grad


def test_ops_in_other_modes_are_nodes_and_run_in_them() -> None:
    model = Modes().eval()
    g = export(model, torch.randn(2, 3))
    assert [node.name for node in g.nodes if node.kind == "call"] == ["linear", "linear_1", "mul", "add"]
    io = g.run(torch.randn(4, 3))
    assert not io["linear"].outputs.requires_grad
    assert io["linear_1"].outputs.dtype is torch.bfloat16
    assert (g["linear_1"].module, g["linear_1"].outputs[0].dtype) == ("other", "bfloat16")
    assert torch.is_grad_enabled()
    assert g.run(torch.randn(4, 3), edit={"one": torch.zeros_like}).output[1].abs().sum() == 0


def test_values_are_recorded_as_they_were_before_a_change_in_place() -> None:
    model = InPlace().eval()
    g = export(model, torch.randn(2, 1, 5, 5))
    x = torch.randn(2, 1, 6, 6)
    with torch.no_grad():
        io = g.run(x)
        conv = model.conv(x)
        assert torch.equal(io["conv2d"].outputs, conv)
        assert torch.equal(io["relu_"].inputs[0], conv)
        assert torch.equal(io["relu_"].outputs, conv.relu())
        again = g.run(edit={"conv2d": lambda out: out + 1}, given=io)
        assert torch.equal(again.output, g.run(x, edit={"conv2d": lambda out: out + 1}).output)
        assert torch.equal(io["conv2d"].outputs, conv)


class Counts(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x.mul_(2)
        return x + self.count


def test_inputs_and_buffers_change_as_in_the_model() -> None:
    model = Counts().eval()
    g = export(model, torch.ones(2, 3))
    assert model.count == 0  # exporting changes nothing
    x = torch.ones(4, 3)
    io = g.run(x)
    assert model.count == 1
    assert torch.equal(x, torch.full((4, 3), 2.0))
    assert torch.equal(io.output, torch.full((4, 3), 3.0))
    assert io["b_count"].outputs == 0
    assert torch.equal(io["x"].outputs, torch.ones(4, 3))
    assert g.verify(torch.ones(5, 3))
    assert model.count == 1  # and so does comparing


# -- wrong inputs -----------------------------------------------------------------------------------


def test_wrong_inputs_are_named() -> None:
    g = export(Structures().eval(), *_structures(2))
    args, kwargs = _structures(3)
    g.run(*args, **kwargs)
    g.run(*args[:1], batch=args[1], **kwargs)  # by name instead of by position
    turned = g.run(args[0], {"z": args[1]["z"], "inner": args[1]["inner"]}, **kwargs)  # keys in another order
    assert torch.equal(turned.output["y"], g.run(*args, **kwargs).output["y"])
    with pytest.raises(
        UsageError, match="The input scale is missing: this graph takes pair, batch, scale: f32"
    ):
        g.run(*args, power=3)
    with pytest.raises(UsageError, match="no input 'scales'; did you mean 'scale'"):
        g.run(*args, **kwargs, scales=1)
    with pytest.raises(UsageError, match="The input batch was given twice"):
        g.run(*args, batch=1, **kwargs)
    with pytest.raises(
        UsageError, match="The input power is 3 in this graph, fixed by the export, but got 4"
    ):
        g.run(*args, **{**kwargs, "power": 4})
    with pytest.raises(
        UsageError,
        match=r"pair\[1\] must be f32\[s\d+, 4\], but is f64\[3, 4\]: convert it with \.to\(torch\.float32\)",
    ):
        g.run([args[0][0], args[0][1].double()], *args[1:], **kwargs)
    with pytest.raises(
        UsageError, match="The input pair must be a list of 2 as in the example, but is a list of 3"
    ):
        g.run([*args[0], args[0][0]], *args[1:], **kwargs)
    with pytest.raises(UsageError, match=r"The input batch must be a dict with the keys \['inner', 'z'\]"):
        g.run(args[0], {"inner": args[1]["inner"]}, **kwargs)
    with pytest.raises(UsageError, match=r"The input scale must be a tensor f32\[s\d+, 4\], but is 1\.5"):
        g.run(*args, scale=1.5, power=3)
    with pytest.raises(
        UsageError,
        match=r"scale must be f32\[s\d+, 4\], but is f32\[4\]: 1 instead of 2 dimensions",
    ):
        g.run(*args, scale=torch.ones(4), power=3)
    with pytest.raises(UsageError, match="got 7 positional inputs"):
        g.run(1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(
        UsageError,
        match=r"The input scale must be one tensor f32\[s\d+, 4\] as in the example, but is a list of 1",
    ):
        g.run(*args, scale=[kwargs["scale"]], power=3)
    with pytest.raises(UsageError, match=r"scale must be on cpu, but is on meta: move it with \.to\('cpu'\)"):
        g.run(*args, scale=kwargs["scale"].to("meta"), power=3)


def _structures(batch: int) -> tuple[Any, Any]:
    x = [torch.randn(batch, 4) for _ in range(5)]
    return (x[:2], {"inner": {"x": x[2]}, "z": x[3]}), {"scale": x[4], "power": 3}


def test_an_error_in_an_op_says_where_it_was(layered: ExportedGraph) -> None:
    with pytest.raises(RuntimeError) as caught:
        layered.run(torch.randn(5, 4), edit={"relu": lambda out: out[:, :3]})
    assert caught.value.__notes__[0].startswith(
        "In the node 'add' of the exported graph, tests/graph/test_interpreter.py:"
    )
    assert caught.value.__notes__[0].endswith(
        "in Layered.forward, given f32[5, 4], f32[5, 3]; 'relu' had been edited."
    )


# -- comparing -----------------------------------------------------------------------------------


def test_verify_names_the_first_module_that_differs() -> None:
    model = Layered().eval()
    g = export(model, torch.randn(3, 4))
    assert g.verify(torch.randn(5, 4))
    model.blocks[1].register_forward_hook(lambda module, inputs, output: output + 1)  # the graph has no hook
    found = g.verify(torch.randn(5, 4))
    assert not found
    assert (found.module, found.node) == ("blocks.1", "relu_1")
    assert str(found).startswith(
        "The graph differs from the model from the node 'relu_1' (tests/graph/test_interpreter.py:"
    )
    assert "Tensor-likes are not close" in str(found)
