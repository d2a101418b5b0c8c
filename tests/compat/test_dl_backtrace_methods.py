"""The methods of DLBacktrace beyond tracing and predicting: diagnosis, pictures, memory, sizes."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sightline.compat.dl_backtrace import DLBacktrace, diagnose_model_compatibility
from sightline.errors import ExportError, UsageError
from tests.compat.exported_models import Of, Pictures, assert_predicts, output

torch.set_num_threads(1)


def test_input_values_are_the_data_and_weights_are_hyperparameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm, self.out = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            both = torch.cat([self.words(ids), self.norm(x)]) * self.out.weight.sum()
            return self.out(both)  # type: ignore[no-any-return]

    ids, x = torch.tensor([1, 2, 3]), torch.randn(5, 4)
    dlb = DLBacktrace(Mixed().eval(), (ids, x))
    node_io = assert_predicts(dlb, ids, x)
    assert node_io["embedding"]["input_values"] is ids  # second of its arguments
    assert node_io["batch_norm"]["input_values"] is x
    assert node_io["linear"]["input_values"] is node_io["mul"]["output_values"]
    pair = node_io["cat"]["input_values"]
    assert isinstance(pair, tuple)
    assert pair[0] is node_io["embedding"]["output_values"]
    assert node_io["sum_1"]["input_values"] is dlb.model.get_parameter("out.weight")  # it has nothing else
    assert node_io["ids"]["input_values"] == ()
    assert node_io["output"]["input_values"] is node_io["output"]["output_values"]
    assert set(node_io["linear"]["layer_hyperparams"]) == {"weight", "bias"}
    assert node_io["linear"]["input_sources"] == ["mul", "p_out_weight", "p_out_bias"]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({0: torch.export.Dim("batch", min=5, max=9)}, r"4 not in range \[5, 9\]"),
        ({1: torch.export.Dim("width")}, "specialized it to be a constant"),
    ],
)
def test_sizes_that_cannot_be_had_fall_back_with_a_warning(sizes: dict[int, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=rf"dynamic_shapes do not work here: .*{reason}") as caught:
        dlb = DLBacktrace(nn.Linear(3, 2), torch.randn(4, 3), dynamic_shapes={"input": sizes})
    assert caught[0].filename == __file__
    assert_predicts(dlb, torch.randn(7, 3))
    assert dlb.dynamic_shapes == {"input": sizes}


def test_a_model_that_cannot_be_exported_is_not_blamed_on_its_sizes() -> None:
    shapes = {"inputs": ({0: torch.export.Dim("batch")},)}
    with pytest.raises(ExportError, match="depends on the numbers"):
        DLBacktrace(Of(lambda x: x if x.sum() > 0 else -x), torch.randn(3), dynamic_shapes=shapes)


def test_a_diagnosis_before_tracing_names_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return x
            return -x

    found = diagnose_model_compatibility(Branching(), torch.randn(3))
    [issue] = found["issues"]
    assert re.match(
        r"\S*test_dl_backtrace_methods\.py:\d+ in .*forward \(`if x\.sum\(\) > 0:`\): it depends on", issue
    )
    assert (found["model_type"], list(found["forward_params"]), found["warnings"]) == ("Branching", ["x"], [])
    assert capsys.readouterr().out == f"Branching(x) cannot be traced\n  issue: {issue}\n"


def test_a_diagnosis_names_the_limits_of_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    dlb = DLBacktrace(model, torch.randn(4, 3))
    found = dlb.diagnose_model_compatibility()
    assert found["issues"] == []
    assert found["warnings"][0].startswith("input: dimension 1 is fixed at 3 by ")
    assert capsys.readouterr().out.startswith("Sequential(input) can be traced: 6 nodes\n  warning: input")
    before = diagnose_model_compatibility(model, torch.randn(4, 3))
    assert before["warnings"] == found["warnings"]
    assert model.training
    refused = diagnose_model_compatibility(model, torch.randn(4, 3), {"input": {1: torch.export.Dim("w")}})
    assert "specialized" in refused["issues"][0]


def test_the_graph_is_compared_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    dlb = DLBacktrace(Pictures().eval(), torch.randn(2, 3, 8, 8))
    found = dlb.debug_execution_differences(torch.randn(2, 3, 8, 8))
    assert (found["max_difference"], found["final_node_name"]) == (0.0, "output")
    assert found["direct_output"].equal(found["dlb_output"])
    assert "largest difference 0.00e+00" in capsys.readouterr().out


def test_the_last_output_can_be_scaled() -> None:
    dlb, x = DLBacktrace(nn.Linear(3, 2), torch.randn(4, 3)), torch.randn(4, 3)
    with pytest.raises(UsageError, match="call `predict` first"):
        dlb.apply_temperature_scaling(2.0)
    plain = output(dlb.predict(x))
    assert output(dlb.apply_temperature_scaling(1.0)) is plain
    torch.testing.assert_close(output(dlb.apply_temperature_scaling(2.0)), plain / 2)
    with pytest.raises(UsageError, match="greater than 0"):
        dlb.apply_temperature_scaling(-1)


def test_memory_can_be_given_back() -> None:
    dlb, x = DLBacktrace(nn.Linear(3, 2), torch.randn(1, 3)), torch.randn(4, 3)
    dlb.predict(x)
    assert len(dlb._traces) == 2
    dlb.clear_intermediates()
    assert (dlb.node_io, dlb.activation_dict, len(dlb._traces)) == ({}, {}, 2)
    dlb.clear_intermediates(clear_executor_cache=True)
    assert len(dlb._traces) == 1
    assert_predicts(dlb, x)
    model = dlb.model
    dlb.close(unload_model=True)
    assert (dlb.node_io, vars(dlb)["model"]) == ({}, None)
    assert model(x).shape == (4, 2)
    with pytest.raises(UsageError, match="is closed; make another one"):
        dlb.predict(x)


def test_placeholders_and_modules_by_their_names() -> None:
    dlb = DLBacktrace(nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3))
    assert dlb.fx_placeholders == ["p_0_weight", "p_0_bias"]
    assert dlb.placeholder_to_real_name == {"p_0_weight": "0.weight", "p_0_bias": "0.bias"}
    assert dlb.map_fx_nodes_to_modules()["linear"] == ("0", "torch.nn.modules.linear.Linear")


def test_pictures(tmp_path: Path) -> None:
    dlb = DLBacktrace(nn.ReLU(), torch.randn(2, 3))
    dlb.visualize(tmp_path / "g.dot")
    assert (tmp_path / "g.dot").read_text().startswith("digraph")


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_a_picture_without_a_format_in_its_name_is_a_png(tmp_path: Path) -> None:
    DLBacktrace(nn.ReLU(), torch.randn(2, 3)).visualize(tmp_path / "g")
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_verbose_prints_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    dlb = DLBacktrace(nn.ReLU(), torch.randn(2, 3), verbose=True)
    assert "3 nodes" in capsys.readouterr().out
    dlb.predict(torch.randn(2, 3))
    assert "relu: ATen_Operation (relu) of ['input']" in capsys.readouterr().out
    dlb.predict(torch.randn(2, 3), debug=False)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("path", ["", ".pytorch_backtrace", ".pytorch_backtrace.dlbacktrace"])
def test_scripts_find_it_under_the_old_name(path: str) -> None:
    assert importlib.import_module(f"dl_backtrace{path}").DLBacktrace is DLBacktrace


def test_weights_that_were_replaced_are_the_ones_shown() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    dlb = DLBacktrace(model, x)
    dlb.predict(x)
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, assign=True)
    assert dlb.graph.nodes["linear"]["layer_hyperparams"]["weight"] is model.weight
    assert dlb.extracted_weights["p_weight"] is model.weight
    node_io = dlb.predict(x)
    assert node_io["linear"]["layer_hyperparams"]["weight"] is model.weight
    assert torch.equal(node_io["output"]["output_values"], torch.full((4, 2), 3.0))
    assert dlb.exported_program.state_dict["bias"] is model.bias
