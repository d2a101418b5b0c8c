"""Graphs of recorded runs: their nodes, their edges, and the sources of values."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl
from sightline.data.forms import Symbol
from sightline.data.index import Index
from sightline.errors import NothingMatched, UsageError
from sightline.graph.graph import Graph, Ref
from sightline.graph.recorded_graph import graph
from tests.builders import make_trace


def made(t: Any, **options: Any) -> Graph:
    """The graph, checked, with all that can be done to it."""
    g = graph(t.index, **options).lint()
    folded = g.fold().lint()
    assert sum(node.repeat for node in folded.nodes) == sum(node.repeat for node in g.nodes)
    assert sum(edge.repeat for edge in folded.edges) == sum(edge.repeat for edge in g.edges)
    for each in (g, folded):
        for depth in range(3):
            each.collapse(depth).lint()
        each.prune("views", "parameters", "constants", "leaves").lint()
        assert Graph.from_json(each.to_json()) == each
    return g


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.fc, self.drop = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.drop(F.gelu(self.fc(self.norm(x))))
        return x + h


class Net(nn.Module):
    def __init__(self, depth: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "hidden": x}


def recorded(model: nn.Module | None = None, *args: Any, **options: Any) -> Any:
    model = model if model is not None else Net()
    given = args or (torch.ones(2, 8),)
    with sl.trace(model.eval(), **options) as t, torch.no_grad():
        model(*given)
    return t


def ops(g: Graph) -> list[str]:
    return [node.op for node in g if node.kind == "call"]


def test_calls_parameters_inputs_and_outputs_are_nodes() -> None:
    g = made(recorded(Net(1)))
    assert [(node.name, node.kind) for node in g] == [
        ("input", "input"), ("blocks_0_norm_weight", "parameter"), ("blocks_0_norm_bias", "parameter"),
        ("layer_norm", "call"), ("blocks_0_fc_weight", "parameter"), ("blocks_0_fc_bias", "parameter"),
        ("linear", "call"), ("gelu", "call"), ("dropout", "call"), ("add", "call"),
        ("head_weight", "parameter"), ("head_bias", "parameter"), ("linear_1", "call"), ("output", "output"),
    ]  # fmt: skip
    linear = g["linear"]
    assert linear.args == {
        "input": Ref("layer_norm"), "weight": Ref("blocks_0_fc_weight"), "bias": Ref("blocks_0_fc_bias"),
    }  # fmt: skip
    assert linear.module == "blocks.0.fc"
    assert linear.target == "torch.nn.functional.linear"
    assert "test_recorded_graph.py:" in linear.source
    assert linear.source.endswith("in Block.forward")
    assert [str(meta) for meta in linear.outputs] == ["f32[2, 8]"]
    assert linear.info["flops"] == 2 * 2 * 8 * 8
    assert [edge.argument for edge in g.incoming("linear")] == ["input", "weight", "bias"]
    assert g["output"].args == {"['logits']": Ref("linear_1"), "['hidden']": Ref("add")}
    assert g.modules["blocks.0"] == "Block"


def test_what_hands_back_its_input_stays_in_the_chain() -> None:
    g = made(recorded(Net(1)))
    assert g["dropout"].args["input"] == Ref("gelu")
    assert g["add"].args == {"self": Ref("input"), "other": Ref("dropout")}


def test_aten_ops_have_the_names_of_their_schema() -> None:
    g = made(recorded(Net(1)), level="aten")
    assert ops(g) == ["native_layer_norm", "t", "addmm", "gelu", "add.Tensor", "t", "addmm"]
    assert set(g["addmm"].args) >= {"self", "mat1", "mat2"}
    assert [edge.argument for edge in g.incoming("addmm")] == ["self", "mat1", "mat2"]


def test_arguments_nobody_gave_have_the_defaults_of_the_schema(tmp_path: Path) -> None:
    with sl.trace() as t:
        x = torch.ones(1, 1, 4, 8)
        y = torch.add(F.max_pool2d(x, 2), 1, alpha=2).softmax(-1)
        torch.logcumsumexp(F.huber_loss(y, y).view(1), 0)
        x + y.sum()
    t.save(tmp_path / "t.sight")
    for g in (made(t), made(sl.load(tmp_path / "t.sight"))):
        assert g["max_pool2d"].args == {
            "input": Ref("ones"), "kernel_size": 2, "stride": None, "padding": 0, "dilation": 1,
            "ceil_mode": False, "return_indices": False,
        }  # fmt: skip
        assert g["add"].args == {"input": Ref("max_pool2d"), "other": 1, "alpha": 2}
        assert g["huber_loss"].args["delta"] == 1.0  # of its own signature
        assert g["logcumsumexp"].args == {"self": Ref("view"), "dim": 0}  # of the op of its name
        assert g["sum"].args == {"self": Ref("softmax"), "dim": None, "keepdim": False}  # of a method
        assert g["add_1"].args == {"self": Ref("ones"), "other": Ref("sum")}  # an operator has none
    for g in (made(t, level="aten"), made(sl.load(tmp_path / "t.sight"), level="aten")):
        assert g["max_pool2d_with_indices"].args == {
            "self": Ref("ones"), "kernel_size": [2, 2], "stride": [], "padding": [0, 0], "dilation": [1, 1],
            "ceil_mode": False,
        } or g["max_pool2d_with_indices"].args["stride"] == [2, 2]  # fmt: skip  # as F.max_pool2d fills it in
        assert g["sum"].args["dtype"] is None
        assert [edge.argument for edge in g.incoming("add_1")] == ["self", "other"]
        assert g["add_1"].args["alpha"] == 1


@pytest.mark.parametrize(
    ("default", "shown"),
    [
        ("1", 1), ("'none'", "none"), ("[0, 1]", [0, 1]), ("torch.float32", Symbol("torch.float32")),
        ("inf", Symbol("inf")), ("__import__('os')", Symbol("__import__('os')")), ("", Symbol("")),
        ("(" * 300, Symbol("(" * 200)), ("[" * 150, Symbol("[" * 150)), ("\0", Symbol("\0")),
    ],
)  # fmt: skip
def test_a_default_out_of_a_file_is_data(default: str, shown: Any) -> None:
    with sl.trace() as t:
        torch.ones(2).relu()
    old = graph(Index(replace(t.data, schemas={"relu": ("self",)})), level="aten")
    assert old["relu"].args == {"self": Ref("ones")}  # a file of before defaults were kept
    g = graph(Index(replace(t.data, schemas={"relu": ("self", f"alpha={default}")})), level="aten")
    assert g["relu"].args == {"self": Ref("ones"), "alpha": shown}
    assert Graph.from_json(g.lint().to_json()) == g


class NamedLikeNodes(nn.Module):
    output: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("output", torch.ones(3))

    def forward(self, output: Tensor, linear: Tensor, fc_weight: Tensor) -> Any:
        return self.fc(output) + linear * self.output, fc_weight * 2


def test_inputs_named_like_nodes() -> None:
    model = NamedLikeNodes()
    given = {name: torch.ones(2, 3) for name in ("output", "linear", "fc_weight")}
    with sl.trace(model) as t:
        model(**given)
    g = made(t)
    assert {node.op: node.name for node in g.nodes_of(kind="input")} == {
        "output": "output", "linear": "linear_1", "fc_weight": "fc_weight_1",
    }  # fmt: skip
    assert [node.kind for node in (g["output"], g["output_1"], g["output_2"])] == [
        "input",
        "buffer",
        "output",
    ]
    assert g["linear"].args["input"] == Ref("output")
    for picture in (g.fold(), g.collapse(1), g.subgraph("fc"), g.prune("parameters")):
        picture.lint()
        assert Graph.from_json(picture.to_json()) == picture


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_is_as_it_was(on: bool) -> None:
    t = make_trace(1)
    try:
        gc.enable() if on else gc.disable()
        graph(t.index)
        assert gc.isenabled() is on
    finally:
        gc.enable()


def test_leaf_modules_with_what_runs_between_them() -> None:
    g = made(recorded(Net(1)), level="module")
    assert ops(g) == ["LayerNorm", "Linear", "gelu", "Dropout", "+", "Linear"]
    assert g["blocks_0_fc"].args == {
        "input": Ref("blocks_0_norm"), "weight": Ref("blocks_0_fc_weight"), "bias": Ref("blocks_0_fc_bias"),
    }  # fmt: skip
    assert g["blocks_0_fc"].info["extra"] == "in_features=8, out_features=8, bias=True"


@pytest.mark.parametrize("level", ["api", "aten", "both", "none"])
def test_every_recording_has_a_graph(level: str) -> None:
    g = made(recorded(ops=level))
    assert g.nodes_of(kind="output")
    assert g.nodes_of(kind="input")
    if level == "none":
        assert ops(g)[:3] == ["LayerNorm", "Linear", "Dropout"]


def test_layers_fold_and_collapse() -> None:
    t = recorded(Net(12))
    folded = made(t, fold=True)
    assert len(folded) == 14  # as many as a net of one block
    assert folded["linear"].repeat == 12
    assert folded.info["folds"] == {"blocks.0": ["blocks.11", 12]}
    flat = graph(t.index, depth=1, fold=False).lint()
    assert ops(flat) == ["ModuleList", "Linear"]
    both = graph(t.index, depth=1, fold=True).lint()
    assert [(node.op, node.repeat) for node in both] == [
        ("input", 1),
        ("Block", 12),
        ("Linear", 1),
        ("output", 1),
    ]
    assert len(graph(t.index, depth=2).lint()) == 15


def test_one_module() -> None:
    g = made(recorded(), module="blocks.2")
    assert ops(g) == ["layer_norm", "linear", "gelu", "dropout", "+"]
    assert [node.name for node in g.nodes_of(kind="input")] == ["add_1"]
    with pytest.raises(NothingMatched, match="module='block' matches no module"):
        graph(recorded().index, module="block")


def test_any_tensor_code() -> None:
    with sl.trace() as t:
        x = torch.ones(3, 4)
        a, b = x.split(2, dim=1)
        c = torch.cat([a, b @ b.T, a], dim=1)
        x[0] = 3.0
        x.add_(1)
        total = (x.sum() + c.sum()).item()
    assert total
    g = made(t)
    assert g["cat"].args["tensors"] == [Ref("split"), Ref("matmul"), Ref("split")]
    assert [edge.argument for edge in g.incoming("cat")] == ["tensors[0]", "tensors[1]", "tensors[2]"]
    assert g["matmul"].args["self"] == Ref("split", 1)
    # an in-place version comes from the op that wrote it, though it was written through a view
    assert [node.name for node in g.ancestors("add_")] == ["ones", "setitem"]
    assert g["add_"].args["self"].node == "setitem"
    assert g["sum_1" if g["sum"].args["self"].node == "cat" else "sum"].args["self"] == Ref("add_")


def test_a_recurrence_is_a_loop() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            h, c = x.new_zeros(2, 6), x.new_zeros(2, 6)
            outs = []
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
                outs.append(h)
            return torch.stack(outs, 1)

    g = made(recorded(Recurrent(), torch.ones(2, 7, 4)), fold=True)
    assert g["lstm_cell"].repeat == 7
    assert [(e.argument, e.repeat) for e in g.incoming("lstm_cell") if e.loop] == [("hx[0]", 6), ("hx[1]", 6)]
    assert [(e.argument, e.repeat) for e in g.incoming("stack")] == [("tensors[0…6]", 7)]


def test_backward_is_a_graph_too() -> None:
    model = Net(2)
    with sl.trace(model) as t:
        model(torch.ones(2, 8))["logits"].sum().backward()
    forward, backward, both = (made(t, phase=phase) for phase in ("forward", "backward", "both"))
    assert {node.phase for node in forward if node.kind == "call"} == {"forward"}
    assert {node.phase for node in backward if node.kind == "call"} == {"backward"}
    assert "Tensor.backward" not in [node.target for node in both]
    assert len(both) > len(forward)
    assert any("in Block.forward" in node.source for node in backward)
    # a tensor that the forward pass kept is an input of the backward pass alone, and an edge of both
    assert len(backward.nodes_of(kind="input")) > len(both.nodes_of(kind="input"))


def test_several_models_have_paths_of_their_own() -> None:
    one, two = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    with sl.trace() as t:
        two(one(torch.ones(1, 3)))
    g = made(t)
    assert len({node.module for node in g.nodes_of(op="linear")}) == 2


def test_modules_made_on_the_way_keep_no_layers_apart() -> None:
    class Throwaway(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = nn.ReLU()(x)
            return y * 2

    model = nn.Sequential(*(Throwaway() for _ in range(5)))
    g = made(recorded(model, torch.ones(2)), fold=True)
    assert [(node.op, node.module, node.repeat) for node in g if node.kind == "call"] == [
        ("relu", "ReLU", 5), ("*", "0", 5),
    ]  # fmt: skip


def test_a_decode_loop_folds_though_its_cache_grows() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            cache = torch.cat([cache, x], 0)
            return self.fc(cache.mean(0, keepdim=True)), cache

    model = Step()
    with sl.trace(model) as t, torch.no_grad():
        x, cache = torch.ones(1, 4), torch.ones(1, 4)
        for _ in range(6):
            x, cache = model(x, cache)
    g = made(t, fold=True)
    assert g["cat"].repeat == 6
    assert g["cat"].info["varies"] == ["f32[2…7, 4]"]
    assert len([edge for edge in g.edges if edge.loop]) == 2


def test_a_run_that_failed_has_a_graph() -> None:
    with pytest.raises(RuntimeError), sl.trace() as t:
        torch.ones(2, 3).relu() @ torch.ones(2, 3)
    g = made(t)
    assert g["matmul"].info["raised"] is True
    assert "matmul" in g.prune("leaves")


def test_a_parameter_is_one_node_however_often_it_was_updated() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with sl.trace(model) as t:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    g = made(t)
    assert [node.name for node in g.nodes_of(kind="parameter")] == ["weight", "bias"]
    assert [node.repeat for node in made(t, fold=True) if node.op == "linear"] == [3]


def test_statistics_are_in_the_info() -> None:
    g = made(recorded(Net(1), stats=True))
    assert g["linear"].info["statistics"][0]["nans"] == 0


@pytest.mark.parametrize("phase", ["forward", "backward", "both"])
@pytest.mark.parametrize("level", ["api", "aten", "module"])
def test_a_trace_made_by_hand(level: str, phase: str) -> None:
    made(make_trace(3), level=level, phase=phase)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"level": "fx"}, "level='fx' is no level of a graph; choose 'api', 'aten' or 'module'"),
        ({"phase": "optimizer"}, "phase='optimizer' is not shown as a graph; choose 'forward'"),
        ({"depth": -1}, "depth=-1 must be a whole number from 0 up"),
        ({"prune": "stuff"}, "prune='stuff' cannot be left out"),
    ],
)
def test_a_wrong_option_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        graph(make_trace(1).index, **options)


def test_no_ops_at_all() -> None:
    with sl.trace() as t:
        pass
    g = made(t)
    assert len(g) == 0
    assert str(g) == f"{g.name}: 0 nodes, 0 edges"
    assert g.to_dot()
