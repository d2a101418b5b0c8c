from __future__ import annotations

import dataclasses
import logging
import random
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sightline.errors import UsageError
from sightline.graph.exported import ExportedGraph, ExportError, export, exporter, load_graph, torch_export
from sightline.graph.exported.program import _source
from sightline.graph.exported.torch_export import Progress
from sightline.graph.graph import Graph
from tests import leftovers
from tests.graph.exportable import CASES, Case, Convolutional, Keywords, Plain, TwoInputs
from tests.recording.architectures import ZOO

torch.set_num_threads(1)


def assert_same(one: Any, other: Any) -> None:
    """Equal in structure and, within torch's tolerances, in numbers."""
    if dataclasses.is_dataclass(one) and not isinstance(one, dict):
        assert type(one) is type(other)
        one, other = vars(one), vars(other)
    left, left_spec = pytree.tree_flatten(one)
    right, right_spec = pytree.tree_flatten(other)
    assert left_spec == right_spec
    for mine, theirs in zip(left, right, strict=True):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine == theirs


# -- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_equals_the_model_at_the_example_and_at_other_sizes(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build().eval()
    calls = case.calls()
    with leftovers.same_model(model), leftovers.same_rng():
        g = export(model, *calls[0])
    for args, kwargs in calls:
        with torch.no_grad():
            eager = model(*args, **kwargs)
            io = g.run(*args, **kwargs)
        assert_same(io.output, eager)
        assert_same(io["output"].outputs, eager)
    assert g.verify(*calls[0][0], **calls[0][1])
    g.lint()


@pytest.fixture(scope="module")
def transformers() -> None:
    ZOO[0].build()  # the first model built adds a method to nn.Module, for good


TRANSFORMERS: dict[str, dict[str, tuple[int, ...]]] = {
    "gpt2": {"input_ids": (2, 9)},
    "bert": {"input_ids": (3, 9), "attention_mask": (3, 9)},
    "llama": {"input_ids": (3, 9), "attention_mask": (3, 9)},
    "vit": {"pixel_values": (3, 3, 16, 16)},
    "t5": {"input_ids": (3, 9), "attention_mask": (3, 9), "decoder_input_ids": (3, 4)},
    "whisper": {"input_features": (3, 8, 24)},
    "mixtral": {"input_ids": (3, 9)},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.usefixtures("transformers")
def test_transformers(name: str) -> None:
    torch.manual_seed(0)
    model, kwargs = next(one for one in ZOO if one.name == name).build()
    model.eval()
    kwargs = {key: value for key, value in kwargs.items() if key in TRANSFORMERS[name]}
    if name == "t5":
        kwargs["decoder_input_ids"] = kwargs["input_ids"][:, :5]
    if name == "whisper":
        model = model.model.encoder  # type: ignore[union-attr, assignment]
    g = export(model, (), kwargs)
    other = {
        key: torch.randn(shape)
        if key.startswith(("pixel", "input_feat"))
        else torch.ones(shape, dtype=torch.long)
        if "mask" in key
        else torch.randint(3, 60, shape)
        for key, shape in TRANSFORMERS[name].items()
    }
    eager: Any = None
    io: Any = None
    for call in (kwargs, other):
        with torch.no_grad():
            eager = model(**call)
            io = g.run(**call)
        assert type(io.output) is type(eager)
        for key, value in io.output.items():
            assert_same(value, eager[key])
        assert set(eager) - set(io.output) <= {"past_key_values"}
    if "past_key_values" in eager:
        assert [text.partition(" ")[0] for text in g.info["left_out"]] == ["output['past_key_values']"]
        assert repr(io).endswith(f"nodes, without {g.info['left_out'][0]}>")
        assert f", without {g.info['left_out'][0]}, which it leaves out." in str(g.verify(**kwargs))
    for one in g.dynamic.fixed:  # the line is named, in the file of the model
        assert "/modeling_" in one.by, one


# -- the graph -----------------------------------------------------------------------------------


def test_nodes_know_their_arguments_module_and_line() -> None:
    g = export(Convolutional().eval(), torch.randn(2, 3, 8, 8))
    conv = g["conv2d"]
    assert (conv.kind, conv.op) == ("call", "conv2d")
    assert conv.target == "aten.conv2d.default"
    assert list(conv.args) == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    assert conv.args["padding"] == [1, 1]
    assert conv.args["groups"] == 1  # a default, from the schema
    assert conv.module == "conv"
    assert conv.source.startswith("tests/graph/exportable.py:")
    assert conv.source.endswith(" in Convolutional.forward")
    assert str(conv.outputs[0]) == "f32[2, 8, 8, 8]"
    assert conv.info["symbolic"].startswith("f32[s")
    assert g["p_fc_weight"].kind == "parameter"
    assert g["p_fc_weight"].op == "fc.weight"
    assert g.modules == {
        "": "Convolutional",
        "conv": "Conv2d",
        "relu": "ReLU",
        "pool": "AdaptiveAvgPool2d",
        "fc": "Linear",
    }
    assert [edge.argument for edge in g.incoming("conv2d")] == ["input", "weight", "bias"]


def test_defaults_and_keywords_are_bound_by_the_schema() -> None:
    g = export(Keywords(), torch.randn(2, 3, 6, 6))
    assert g["add"].args["alpha"] == 3
    assert g["gelu"].args["approximate"] == "tanh"
    assert g["max_pool2d"].args["stride"] == []
    assert [edge.argument for edge in g.incoming("mul")] == ["self", "other"]  # x * x


def test_the_pieces_of_a_tuple_know_their_slot() -> None:
    g = export(nn.LSTM(4, 5), torch.randn(3, 2, 4))
    assert [(edge.slot, g.by_id[edge.target].args["index"]) for edge in g.outgoing("lstm")] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert len(g["lstm"].outputs) == 3


class Clashing(nn.Module):
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("bias", torch.ones(3))

    def forward(self, output: Tensor, linear: Tensor, p_fc_weight: Tensor, keep: Tensor) -> Any:
        return self.fc(output) + linear * self.bias, p_fc_weight * keep


@pytest.mark.parametrize("by_name", [False, True])
def test_inputs_named_like_nodes(by_name: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Clashing().eval()
    given = {name: torch.randn(2, 3) for name in ("output", "linear", "p_fc_weight", "keep")}
    args, kwargs = ((), given) if by_name else (tuple(given.values()), {})
    g = export(model, args, kwargs)
    assert [node.op for node in g.lint().nodes_of(kind="input")] == list(given)
    g.save(tmp_path / "m.pt2")
    for each in (g, load_graph(tmp_path / "m.pt2", model=model)):
        io = each.run(*given.values())  # by position: `keep=` by name is an option of run
        assert_same(io.output, model(**given))
        assert io["output"].outputs is given["output"]
        assert each[list(io)[-1]].kind == "output"
        assert each.verify(*given.values())


# -- sizes -----------------------------------------------------------------------------------


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = self.fc(x)
        if x.shape[0] > 5:
            z = z * 2
        return z.sum() + y.sum()


def test_the_report_says_which_line_fixed_a_size(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        g = export(Asks().eval(), (torch.randn(8, 8), torch.randn(1, 6)))
    assert capfd.readouterr() == ("", "")  # nothing is printed
    line = Asks.forward.__code__.co_firstlineno
    symbol = g.dynamic.dimensions[0].symbol
    assert str(g.dynamic).splitlines() == [
        f"x  f32[{symbol}, 8]",
        f"  dimension 0 is dynamic ({symbol}; 8 in the example)",
        f"  dimension 1 is fixed at 8 by tests/graph/test_exported.py:{line + 1} in Asks.forward",
        f"y  f32[1, {g.dynamic.dimensions[3].symbol}]",
        f"  {g.dynamic.dimensions[2]}",
        f"  dimension 1 is dynamic ({g.dynamic.dimensions[3].symbol}; 6 in the example)",
        "valid for",
        f"  x.shape[0] > 5  (tests/graph/test_exported.py:{line + 2} in Asks.forward)",
    ]
    assert [(one.input, one.dim) for one in g.dynamic.dynamic] == [("x", 0), ("y", 1)]
    assert str(g.dynamic.dimensions[2]) == (
        "dimension 0 is fixed at 1: torch fixes the sizes 0 and 1 of an example; export with a size of 2 or "
        "more to have it dynamic"
    )


def test_a_condition_of_the_model_is_kept() -> None:
    g = export(Asks().eval(), (torch.randn(8, 8), torch.randn(2, 6)))
    with pytest.raises(
        UsageError, match=r"valid only for x\.shape\[0\] > 5 \(.*\), not for x of shape \(3, 8\)"
    ):
        g.run(torch.randn(3, 8), torch.randn(2, 6))


def test_sizes_that_must_agree() -> None:
    g = export(TwoInputs().eval(), (torch.randn(2, 3, 8, 8), torch.randn(2, 5)))
    with pytest.raises(
        UsageError, match=r"table\.shape\[0\] must equal image\.shape\[0\], which is 3, but is 4"
    ):
        g.run(torch.randn(3, 3, 8, 8), torch.randn(4, 5))


def test_fixed_sizes_and_torchs_own_description() -> None:
    x = torch.randn(2, 3)
    fixed = export(nn.ReLU(), x, dynamic=None)
    assert not fixed.dynamic.dynamic
    with pytest.raises(
        UsageError, match=r"input must be f32\[2, 3\], but is f32\[4, 3\]: dimension 0 is fixed at 2"
    ):
        fixed.run(torch.randn(4, 3))
    assert str(fixed.dynamic.fixed[0]) == "dimension 0 is fixed at 2 by dynamic=None, as requested"
    ranged = export(nn.ReLU(), x, dynamic=({0: torch.export.Dim("batch", min=2, max=6)},))
    assert ranged.run(torch.randn(6, 3)).output.shape == (6, 3)
    with pytest.raises(UsageError, match=r"valid only for input\.shape\[0\] <= 6"):
        ranged.run(torch.randn(7, 3))


@pytest.mark.parametrize("how", ["disable", "config"])
def test_lines_are_named_where_logging_is_turned_off(how: str) -> None:
    guards = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = guards.disabled
    try:
        if how == "disable":
            logging.disable(logging.CRITICAL)
        else:
            guards.disabled = True  # as `logging.config.dictConfig` leaves loggers that it does not name
        g = export(Convolutional().eval(), torch.randn(2, 3, 8, 8))
        assert (logging.root.manager.disable, guards.disabled) == (
            (logging.CRITICAL, before) if how == "disable" else (0, True)
        )
        assert guards.manager is logging.root.manager
    finally:
        logging.disable(logging.NOTSET)
        guards.disabled = before
    (fixed,) = g.dynamic.fixed
    assert "exportable.py" in fixed.by


def test_an_export_that_takes_long_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    said = threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Any:
            assert said.wait(60)
            return x + 1

    class Watching(Progress):
        def _print(self, seconds: float) -> None:
            super()._print(seconds)
            said.set()

    with Watching("Slow", True, period=0.05):
        Slow()(torch.ones(2))
    line = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(
        r"exporting Slow: 0 s, 0 s of it at \S+test_exported.py:\d+ in \S+Slow.forward; "
        r"fixed sizes are faster: dynamic=None",
        line,
    )
    export(nn.ReLU(), torch.ones(2, 3))
    assert capsys.readouterr().err == ""  # a quick export prints nothing


def test_fixed_sizes_where_dynamic_ones_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_if_dynamic(model: Any, args: Any, kwargs: Any, shapes: Any, strict: bool) -> Any:
        if shapes is not None:
            raise ExportError("The model cannot be exported: no. A recorded run has a graph too.")
        return torch_export.run_export(model, args, kwargs, shapes, strict)

    monkeypatch.setattr(exporter, "run_export", fails_if_dynamic)
    g = export(nn.ReLU().eval(), torch.randn(2, 3))
    assert not g.dynamic.dynamic
    assert str(g.dynamic).endswith(
        "note: With dynamic sizes: The model cannot be exported: no. All sizes are fixed."
    )


# -- failures -----------------------------------------------------------------------------------


class DependsOnNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.random()
        torch.set_grad_enabled(False)
        torch.rand(3)
        if x.sum() > 0:
            return x
        return -x


def test_one_error_names_the_line_and_nothing_is_left_changed(capfd: pytest.CaptureFixture[str]) -> None:
    model = DependsOnNumbers()
    configuration = dynamo_configuration()
    line = DependsOnNumbers.forward.__code__.co_firstlineno + 5
    x = torch.randn(2, 3)
    with leftovers.same_rng(), leftovers.same_model(model), pytest.raises(ExportError) as caught:
        export(model, x)
    assert str(caught.value) == (
        f"The model cannot be exported: tests/graph/test_exported.py:{line} in forward (`if x.sum() > 0:`): "
        "it depends on the numbers in a tensor, which an export does not have. A recorded "
        "run has a graph too: `with sl.trace(model) as t: model(…)`, then `t.graph()`."
    )
    assert caught.value.__cause__ is not None
    assert capfd.readouterr() == ("", "")
    assert torch.is_grad_enabled()
    assert dynamo_configuration() == configuration


def dynamo_configuration() -> Any:
    from torch.fx.experimental import _config

    return torch._dynamo.config.get_config_copy(), _config.get_config_copy()  # type: ignore[attr-defined]


def test_a_failure_leaves_no_marks_on_the_inputs_and_speaks_of_the_sizes_given() -> None:
    x = torch.randn(2, 4, 8, 8)
    x.mine = 1  # type: ignore[attr-defined]
    with pytest.raises(ExportError, match=r"expected input\[2, 4, 8, 8\] to have 3 channels, but got 4"):
        export(nn.Conv2d(3, 8, 3).eval(), x)
    assert vars(x) == {"mine": 1}


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = torch.zeros(3), torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.last + self.first
        self.last, self.first = x * 2, x
        return y


def test_what_forward_leaves_on_the_model_is_said_in_a_sentence() -> None:
    model = Remembers().eval()
    with leftovers.same_model(model):
        g = export(model, torch.ones(2, 3))
    (note,) = g.dynamic.notes
    assert note == (
        "forward sets first and 1 more on the model, which a graph does not: state that one call leaves "
        "for the next must be a buffer (register_buffer)."
    )


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return iter([x])


def test_an_output_torch_does_not_know() -> None:
    with pytest.raises(ExportError, match="forward returns list_iterator, which torch cannot take apart"):
        export(Opaque(), torch.randn(2, 3))


def test_an_error_of_the_model_is_the_reason() -> None:
    with pytest.raises(ExportError, match=r"RuntimeError: .*\[.*\] X \[.*\]|RuntimeError: .*mat"):
        export(nn.Linear(3, 4), torch.randn(2, 5))


def test_wrong_calls() -> None:
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module, not a builtin_function_or_method"):
        export(torch.relu, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="kwargs must be a dict"):
        export(nn.ReLU(), (), [1])  # type: ignore[arg-type]


def test_train_mode_is_said_once_and_seen_as_it_is() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    with pytest.warns(UserWarning, match="exported in train mode") as said:
        g = export(model, torch.randn(4, 3))
    assert len(said) == 1
    assert g.info["training"] is True
    assert all(module.training for module in model.modules())
    before = model[0].running_mean.clone()  # type: ignore[operator]
    io = g.run(torch.randn(4, 3) + 5)
    assert not torch.equal(model[0].running_mean, before)  # type: ignore[arg-type] # the model's own buffer
    assert torch.equal(io["b_0_running_mean"].outputs, before)  # recorded as it was
    assert g.verify(torch.randn(4, 3))


def test_it_is_a_graph() -> None:
    g = export(Convolutional().eval(), torch.randn(2, 3, 8, 8))
    assert isinstance(g, ExportedGraph)
    assert [node.name for node in g.ancestors("relu") if node.kind == "call"] == ["conv2d"]
    assert repr(g) == f"<ExportedGraph Convolutional: {len(g.nodes)} nodes, {len(g.edges)} edges>"


def test_pictures_of_it() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))).eval()
    g = export(model, torch.randn(2, 4))
    for picture in (g.fold(), g.collapse(1), g.prune("parameters"), g.subgraph("1")):
        assert type(picture) is Graph
        assert len(picture.lint()) < len(g)
    assert "relu" in g.to_dot()
    assert set(g.to_networkx()) == set(g.keys())
    assert Graph.from_json(g.to_json()).nodes == g.nodes
    assert "relu_3" in str(g)


def test_strict_mode() -> None:
    model = Convolutional().eval()
    x = torch.randn(2, 3, 8, 8)
    assert export(model, x, strict=True).verify(x)


def test_a_dataclass_comes_back() -> None:
    from tests.graph.exportable import Dataclass

    out = export(Dataclass(), torch.ones(2, 3)).run(torch.ones(4, 3)).output
    assert isinstance(out, Plain)
    assert out.label == "plain"


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (["/me/torch/net.py", "/other/lib/python3.12/site-packages/torch/nn/functional.py"], "net.py:1"),
        (["/other/lib/python3.12/site-packages/torch/nn/functional.py"], "functional.py:1"),
        (["/me/torch/nn/.venv/lib/site-packages/torch/fx/node.py"], ""),
    ],
)
def test_the_line_of_a_node_wherever_torch_was_when_it_was_exported(files: list[str], line: str) -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = "\n".join(f'File "{file}", line 1, in forward' for file in files)
    found = _source(node, [])
    assert found.partition(" in ")[0].rpartition("/")[2] == line
