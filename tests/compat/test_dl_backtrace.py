from __future__ import annotations

import importlib
import inspect
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sightline.compat.dl_backtrace import DLBacktrace
from sightline.errors import ExportError, UsageError
from tests import leftovers
from tests.compat.exported_models import Of, PictureAndTable, Pictures, Sequences, assert_predicts, output
from tests.recording.architectures import ZOO

torch.set_num_threads(1)

KEYS = [
    "input_sources", "input_values", "output_values", "layer_type", "node_type", "method_args", "layer",
    "layer_name", "func_name", "func_module", "output_children", "layer_hyperparams",
]  # fmt: skip
ATTRIBUTES = {
    "parents", "children", "method_args", "node_type", "layer", "layer_type", "layer_name", "func_name",
    "func_module", "layer_hyperparams",
}  # fmt: skip


# -- the uses of the document ----------------------------------------------------------------------


def test_the_nodes_of_a_traced_model_have_their_types() -> None:
    dlb = DLBacktrace(model=Pictures().eval(), input_for_graph=(torch.randn(1, 3, 16, 16),))
    found = {name: data["node_type"] for name, data in dlb.graph.nodes(data=True)}
    assert [name for name in found if found[name] == "call_function"] == [
        "conv2d", "batch_norm", "relu", "adaptive_avg_pool2d", "flatten", "linear",
    ]  # fmt: skip
    assert found["x"] == "placeholder"
    assert found["output"] == "output"
    assert dlb.graph.nodes["conv2d"]["layer"] is torch.ops.aten.conv2d.default
    types = {name: data["layer_type"] for name, data in dlb.graph.nodes(data=True)}
    assert types["x"] == "Placeholder"
    assert types["conv2d"] == "ATen_Operation"
    assert types["output"] == "Output"
    assert types["p_conv_weight"] == "Weight"
    assert types["p_conv_bias"] == "Bias"
    assert types["b_norm_running_mean"] == "Running_Mean"


def test_the_graph_is_a_digraph_with_attributes_in_topological_order() -> None:
    dlb = DLBacktrace(Pictures().eval(), torch.randn(2, 3, 8, 8))
    assert type(dlb.graph) is nx.DiGraph
    assert nx.is_directed_acyclic_graph(dlb.graph)
    assert list(dlb.graph) == dlb.layer_stack
    place = {name: position for position, name in enumerate(dlb.layer_stack)}
    assert all(place[one] < place[other] for one, other in dlb.graph.edges)
    for name, data in dlb.graph.nodes(data=True):
        assert set(data) == ATTRIBUTES
        assert data["parents"] == list(dlb.graph.predecessors(name)) or len(data["parents"]) > 1
        assert set(data["children"]) == set(dlb.graph.successors(name))
    assert dlb.graph.nodes["conv2d"]["func_name"] == "conv2d"
    assert dlb.graph.nodes["conv2d"]["func_module"] == "torch._ops.aten"
    assert dlb.graph.nodes["conv2d"]["layer_name"] == "conv2d"


def test_a_simple_cnn_is_traced_on_the_cpu_with_the_document_s_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Pictures().eval()
    dlb = DLBacktrace(model=model, input_for_graph=(torch.randn(1, 3, 224, 224),), device="cpu")
    assert capsys.readouterr().out == ""
    assert_predicts(dlb, torch.randn(1, 3, 224, 224))


def test_hyperparameters_are_bound_by_the_schema() -> None:
    model = Pictures().eval()
    dlb = DLBacktrace(model, torch.randn(2, 3, 8, 8))
    found = dlb.graph.nodes["conv2d"]["layer_hyperparams"]
    assert found.pop("weight") is model.conv.weight
    assert found.pop("bias") is model.conv.bias
    assert found == {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    norm = dlb.graph.nodes["batch_norm"]["layer_hyperparams"]
    assert norm["running_mean"] is model.norm.running_mean
    assert norm["eps"] == 1e-5
    assert dlb.graph.nodes["x"]["layer_hyperparams"] is None


def test_several_inputs() -> None:
    dlb = DLBacktrace(
        model=PictureAndTable().eval(), input_for_graph=(torch.randn(1, 3, 32, 32), torch.randn(1, 5))
    )
    node_io = assert_predicts(dlb, torch.randn(1, 3, 32, 32), torch.randn(1, 5))
    assert node_io["cat"]["input_sources"] == ["linear", "linear_1"]
    assert len(node_io["cat"]["input_values"]) == 2


def test_other_sequence_lengths_need_no_option() -> None:
    dlb = DLBacktrace(model=Sequences().eval(), input_for_graph=(torch.randn(1, 12, 16),))
    for length in (24, 5, 12):
        node_io = assert_predicts(dlb, torch.randn(1, length, 16))
        assert output(node_io).shape == (1, length, 16)


def test_trace_once_and_predict_a_whole_loader() -> None:
    dlb = DLBacktrace(model=Pictures().eval(), input_for_graph=(torch.randn(1, 3, 16, 16),))
    pictures: Any = [torch.randn(3, 16, 16) for _ in range(9)]
    loader: Any = torch.utils.data.DataLoader(pictures, batch_size=4)
    sizes = [output(assert_predicts(dlb, batch)).shape[0] for batch in loader]
    assert sizes == [4, 4, 1]
    assert len(dlb._traces) == 2


# -- other models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers() -> None:
    ZOO[0].build()  # the first model built adds a method to nn.Module, for good


@pytest.mark.usefixtures("transformers")
def test_bert_at_another_size() -> None:
    model, kwargs = next(one for one in ZOO if one.name == "bert").build()
    model.eval()
    example = {key: kwargs[key] for key in ("input_ids", "attention_mask")}
    dlb = DLBacktrace(model, example)
    other: dict[str, Any] = {
        "input_ids": torch.randint(3, 60, (3, 9)),
        "attention_mask": torch.ones(3, 9, dtype=torch.long),
    }
    for call in (example, other):
        with torch.no_grad():
            torch.testing.assert_close(output(dlb.predict(call)).logits, model(**call).logits)
    node_io = dlb.predict(**other)
    assert output(node_io).logits.shape[0] == 3
    assert {"embedding", "scaled_dot_product_attention", "linear"} <= {
        one["layer_name"] for one in node_io.values()
    }


@pytest.mark.usefixtures("transformers")
def test_bert_traced_with_one_sentence_takes_batches_of_any_length() -> None:
    model, kwargs = next(one for one in ZOO if one.name == "bert").build()
    model.eval()
    ids, mask = kwargs["input_ids"][:1], torch.ones_like(kwargs["input_ids"][:1])
    dlb = DLBacktrace(model=model, input_for_graph=(ids, mask), device="cpu")
    for rows, length in ((1, 9), (4, 5), (1, 3), (2, 8)):
        batch = torch.randint(3, 60, (rows, length)), torch.ones(rows, length, dtype=torch.long)
        found = output(dlb.predict(*batch))
        with torch.no_grad():
            torch.testing.assert_close(found.logits, model(*batch).logits)
    assert len(dlb._traces) == 2  # one sentence, and any more
    with pytest.raises(UsageError, match="attention_mask is missing"):
        dlb.predict(ids)


def test_a_cnn_at_other_sizes() -> None:
    dlb = DLBacktrace(Pictures().eval(), torch.randn(2, 3, 16, 16))
    for shape in ((5, 3, 24, 20), (2, 3, 9, 31)):
        assert_predicts(dlb, torch.randn(shape))
    assert len(dlb._traces) == 1


# -- contents of a prediction ----------------------------------------------------------------------


def test_every_node_has_its_twelve_keys_in_the_order_of_the_graph() -> None:
    dlb = DLBacktrace(Pictures().eval(), torch.randn(2, 3, 8, 8))
    node_io = dlb.predict(torch.randn(2, 3, 8, 8))
    assert list(node_io) == dlb.layer_stack
    for values in node_io.values():
        assert list(values) == KEYS
    assert node_io["relu"]["input_sources"] == ["batch_norm"]
    assert node_io["relu"]["output_children"] == ["adaptive_avg_pool2d"]
    assert node_io["relu"]["input_values"] is node_io["batch_norm"]["output_values"]
    assert dlb.node_io is node_io


def test_nodes_know_their_module() -> None:
    dlb = DLBacktrace(PictureAndTable().eval(), (torch.randn(2, 3, 8, 8), torch.randn(2, 5)))
    assert dlb.fx_node_to_module["conv2d"] == ("picture.conv", "torch.nn.modules.conv.Conv2d")


def test_a_parameter_is_told_by_the_signature_not_by_its_name() -> None:
    class Named(nn.Module):
        def forward(self, p_weight: Tensor, bias: Tensor) -> Tensor:
            return p_weight + bias

    dlb = DLBacktrace(Named(), (torch.randn(3), torch.randn(3)))
    assert {dlb.graph.nodes[name]["layer_type"] for name in ("p_weight", "bias")} == {"Placeholder"}


def test_constants_and_ops_of_other_libraries_have_a_type_of_their_own() -> None:
    with torch.library._scoped_library("sightline_compat_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        twice: Any = torch.ops.sightline_compat_test.twice
        dlb = DLBacktrace(Of(lambda x: twice(x) + torch.tensor([1.0, 2.0])), torch.randn(4, 2))
        node_io = assert_predicts(dlb, torch.randn(3, 2))
        types = {name: values["layer_type"] for name, values in node_io.items()}
        assert (types["twice"], node_io["twice"]["layer_name"]) == ("CustomOp", "twice")
        assert [name for name in types if types[name] == "Constant"] == ["c_lifted_tensor_0"]


def test_values_carry_no_gradients() -> None:
    dlb = DLBacktrace(nn.Linear(3, 2), torch.randn(4, 3))
    node_io = dlb.predict(torch.randn(4, 3, requires_grad=True))
    assert not node_io["linear"]["output_values"].requires_grad
    assert torch.is_grad_enabled()


def test_arguments_that_are_easily_lost() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return torch.add(F.gelu(y, approximate="tanh"), x, alpha=3)

    dlb = DLBacktrace(Of(function), torch.randn(2, 2, 6, 4))
    node_io = assert_predicts(dlb, torch.randn(2, 2, 7, 4))
    assert node_io["scaled_dot_product_attention"]["layer_hyperparams"]["is_causal"] is True
    assert node_io["gelu"]["layer_hyperparams"] == {"approximate": "tanh"}
    assert node_io["add"]["layer_hyperparams"] == {"alpha": 3}
    assert node_io["scaled_dot_product_attention"]["input_sources"] == ["inputs_0"] * 3

    pool = DLBacktrace(Of(lambda x: F.max_pool2d(x, 2)), torch.randn(2, 3, 8, 8))
    assert pool.graph.nodes["max_pool2d"]["layer_hyperparams"]["stride"] == (2, 2)
    assert_predicts(pool, torch.randn(2, 3, 10, 8))


def test_sizes_are_symbols_in_the_graph_and_numbers_in_a_run() -> None:
    dlb = DLBacktrace(Of(lambda x: x.new_zeros(x.shape[0], 3)), torch.randn(4, 2))
    assert dlb.graph.nodes["new_zeros"]["layer_hyperparams"]["size"][0].startswith("s")
    assert dlb.predict(torch.randn(6, 2))["new_zeros"]["layer_hyperparams"]["size"] == (6, 3)


def test_all_outputs_are_kept_in_the_model_s_structure() -> None:
    dlb = DLBacktrace(Of(lambda x: {"both": x.split(2, dim=1), "sum": x.sum()}), torch.randn(3, 4))
    node_io = assert_predicts(dlb, torch.randn(5, 4))
    assert len(node_io["split"]["output_values"]) == 2
    assert node_io["getitem"]["layer_type"] == "Operation"


def test_lists_dicts_and_keywords_as_inputs() -> None:
    listed = DLBacktrace(Of(lambda pair: pair[0] * pair[1]), ([torch.randn(3), torch.randn(3)],))
    assert_predicts(listed, [torch.randn(5), torch.randn(5)])
    mapped = DLBacktrace(Of(lambda batch: batch["a"] + 1), ({"a": torch.randn(3)},))
    assert_predicts(mapped, {"a": torch.randn(4)})
    named = DLBacktrace(
        PictureAndTable().eval(), {"image": torch.randn(2, 3, 8, 8), "metadata": torch.randn(2, 5)}
    )
    assert_predicts(named, metadata=torch.randn(3, 5), image=torch.randn(3, 3, 8, 8))


def test_torch_s_own_dynamic_shapes_can_be_given() -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    dlb = DLBacktrace(nn.Linear(3, 2), torch.randn(4, 3), dynamic_shapes={"input": {0: batch}})
    assert_predicts(dlb, torch.randn(6, 3))
    with pytest.raises(UsageError):
        dlb.predict(torch.randn(9, 3))


def test_temperature_divides_the_output() -> None:
    dlb, x = DLBacktrace(nn.Linear(3, 2), torch.randn(4, 3)), torch.randn(4, 3)
    torch.testing.assert_close(output(dlb.predict(x, temperature=2.0)), output(dlb.predict(x)) / 2)
    with pytest.raises(UsageError, match="greater than 0"):
        dlb.predict(x, temperature=0)


# -- manners ---------------------------------------------------------------------------------------


def test_nothing_is_changed_and_the_model_is_seen_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    model[2].eval()
    x = torch.randn(4, 3)
    with leftovers.same_model(model), leftovers.same_rng():
        dlb = DLBacktrace(model, x)
        found = output(dlb.predict(x))
    assert torch.is_grad_enabled()
    assert model[0].weight.requires_grad
    torch.testing.assert_close(found, model.eval()(x).detach())


def test_errors_raise() -> None:
    def fails(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    dlb = DLBacktrace(Of(fails), (torch.randn(4), torch.tensor([0, 1])))
    with pytest.raises(IndexError) as caught:
        dlb.predict(torch.randn(4), torch.tensor([0, 9]))
    assert "In the node 'index'" in caught.value.__notes__[0]
    with pytest.raises(UsageError, match="convert it with"):
        dlb.predict(torch.randn(4), torch.tensor([0.0, 1.0]))
    with pytest.raises(ExportError):
        DLBacktrace(Of(lambda x: x if x.sum() > 0 else -x), torch.randn(3))


def test_a_size_that_the_model_cannot_have_is_refused_in_words() -> None:
    dlb = DLBacktrace(nn.Linear(1, 2), torch.randn(4, 1))
    with pytest.raises(UsageError, match="must be"):
        dlb.predict(torch.randn(4, 3))


def test_the_arguments_have_the_other_tool_s_names_and_defaults() -> None:
    found = {name: one.default for name, one in inspect.signature(DLBacktrace).parameters.items()}
    assert list(found)[:5] == ["model", "input_for_graph", "dynamic_shapes", "device", "verbose"]
    assert (found["dynamic_shapes"], found["device"], found["verbose"]) == (None, "cpu", False)
    assert inspect.signature(DLBacktrace.visualize).parameters["save_path"].default == "graph.png"


def test_wrong_calls_get_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module"):
        DLBacktrace("resnet", torch.randn(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'cpu' or 'cuda'"):
        DLBacktrace(nn.ReLU(), torch.randn(2), device="tpu")


RELEVANCE = [
    "evaluation", "run_task", "print_all_relevance_info", "visualize_dlbacktrace",
    "visualize_dlbacktrace_with_modules", "visualize_tokenwise_relevance_map",
    "visualize_input_heatmap_for_token", "all_wt", "layer_implementation", "get_layer_implementation",
]  # fmt: skip


@pytest.mark.parametrize("name", RELEVANCE)
def test_relevance_is_not_offered(name: str) -> None:
    dlb = DLBacktrace(nn.ReLU(), torch.randn(2, 3))
    with pytest.raises(UsageError, match="computes no relevance: use `predict`"):
        getattr(dlb, name)(mode="default")
    assert not hasattr(dlb, name)


def test_text_is_generated_by_the_model() -> None:
    dlb = DLBacktrace(nn.ReLU(), torch.randn(2, 3))
    with pytest.raises(UsageError, match=r"call `model\.generate\(\.\.\.\)`"):
        dlb.sample_auto(tokenizer=None, input_ids=torch.zeros(1, 2))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dlb.nonsense


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("path", ["", ".pytorch_backtrace", ".pytorch_backtrace.dlbacktrace"])
def test_names_about_relevance_say_so(path: str) -> None:
    module = importlib.import_module(f"dl_backtrace{path}")
    with pytest.raises(UsageError, match="activation_master is about relevance"):
        _ = module.activation_master
    with pytest.raises(UsageError, match="MoEBacktrace is about relevance"):
        exec(f"from dl_backtrace{path} import MoEBacktrace")
    with pytest.raises(AttributeError, match="it has DLBacktrace"):
        _ = module.nonsense
