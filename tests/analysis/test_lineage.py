"""The lineage of a value: which steps are listed, in which order, and which are only counted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.lineage import Lineage, lineage_of
from sightline.analysis.value_names import find_value
from sightline.api import Trace
from sightline.data.index import Index, Value
from sightline.data.trace_data import CaptureInfo
from sightline.errors import NothingMatched, UsageError
from tests.builders import Ref, TraceBuilder, make_trace
from tests.growth import assert_grows_in_line
from tests.views.odd_traces import crashed, hostile, nested


class Residual(nn.Module):
    """A residual stream with a branch, a view and a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h.relu_()
        turned = h.transpose(0, 1)
        back: Tensor = turned.transpose(0, 1)
        return x + back


def recorded(ops: Any = "both") -> Trace:
    model = Residual()
    with sl.trace(model, ops=ops) as t:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
    return t


def found_value(index: Index, reference: object) -> Value:
    return find_value(index, reference).value


def told(trace: Trace, value: object, **options: object) -> Lineage:
    row = found_value(trace.index, value)
    return lineage_of(row._data, row.id, **options)  # type: ignore[arg-type]


def names(trace: Trace, value: object, **options: object) -> list[str]:
    return [step.name for step in told(trace, value, **options).steps]


def test_steps_are_the_calls_the_user_wrote() -> None:
    assert names(recorded(), "Residual") == [
        "+", "Tensor.transpose", "Tensor.transpose", "Tensor.relu_", "F.linear", "torch.ones",
    ]  # fmt: skip


def test_aten_ops_when_asked_for() -> None:
    t = recorded()
    assert names(t, "Residual", level="aten") == [
        "add.Tensor", "transpose.int", "transpose.int", "relu_", "addmm", "t", "ones",
    ]  # fmt: skip
    assert names(t, "Residual", level="aten") == names(recorded("aten"), "Residual")


def test_api_calls_alone_and_module_calls_alone() -> None:
    assert names(recorded("api"), "Residual") == names(recorded(), "Residual")
    t = recorded("none")
    (whole,) = told(t, "Residual").steps
    assert (whole.name, whole.call, whole.op) == ("Residual", 0, -1)
    assert [t.values[value].kind for value in whole.leaves] == ["input"]


def test_each_step_has_its_line_and_module() -> None:
    linear = told(recorded(), "fc").steps[0]
    assert (linear.code, linear.function, linear.module) == ("h = self.fc(x)", "Residual.forward", "fc")
    assert linear.file == __file__


def test_the_trunk_comes_after_what_branched_off() -> None:
    """``x`` went into the sum directly and through the branch: it is told once, below both."""
    steps = told(recorded(), "Residual").steps
    assert steps[0].children == (1, 5)
    assert [steps[at].children for at in range(1, 5)] == [(2,), (3,), (4,), ()]
    assert steps[4].sources == steps[5].values


def test_a_gradient_is_told_by_the_backward_passes_that_made_it() -> None:
    t = recorded()
    steps = told(t, "fc.weight.grad").steps
    assert [step.name for step in steps] == [
        "F.linear backward", "Tensor.relu_ backward", "Tensor.transpose backward",
        "Tensor.transpose backward", "Tensor.sum backward",
    ]  # fmt: skip
    assert steps[0].code == "h = self.fc(x)"
    assert {step.phase for step in steps} == {"backward"}
    (saved,) = steps[0].saved
    maker = t.values[saved].producer
    assert maker is not None
    assert maker.name == "ones"  # the input, not the view of it inside the linear


def test_a_backward_op_has_the_line_of_its_forward_op() -> None:
    for step in told(recorded(), "fc.weight.grad", level="aten").steps[:3]:
        assert (step.code, step.phase) == ("h = self.fc(x)", "backward")


def test_a_parameter_that_was_updated_is_told_by_its_update() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model) as t:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert names(t, "weight") == ["Tensor.add_", "F.linear backward", "Tensor.sum backward"]
    assert told(t, t.values.where(name="bias", kind="parameter")[0]).steps == ()


def test_depth_counts_steps_and_says_how_many_are_left() -> None:
    t = recorded()
    steps = told(t, "Residual", depth=2).steps
    assert [step.name for step in steps] == ["+", "Tensor.transpose", "torch.ones"]
    assert (steps[1].before, len(steps[1].cut)) == (3, 1)  # ``x`` itself is told
    assert told(t, "Residual", depth=1).steps[0].before == 5
    assert all(step.before == 0 for step in told(t, "Residual").steps)


def test_what_is_behind_two_cuts_counts_for_both() -> None:
    b = TraceBuilder()
    x = b.op("relu", b.op("exp", b.value(2), out=(2,)), out=(2,))
    one, other = b.op("sin", x, out=(2,)), b.op("cos", x, out=(2,))
    y = b.op("add.Tensor", b.op("neg", one, out=(2,)), b.op("abs", other, out=(2,)), out=(2,))
    steps = told(b.build(), int(y), depth=2).steps
    assert [(step.name, step.before) for step in steps] == [("add.Tensor", 0), ("abs", 3), ("neg", 3)]


def test_only_the_most_recent_when_there_are_too_many() -> None:
    steps = told(make_trace(), "Net", most=3).steps
    assert len(steps) == 3
    assert sum(step.before for step in steps) > 0


def test_an_op_with_several_results_is_one_step() -> None:
    t = make_trace(1, backward=False)
    chunks = [step for step in told(t, "Net").steps if step.name == "Tensor.chunk"]
    assert [len(step.values) for step in chunks] == [3]


def test_what_was_read_inside_a_call_without_being_passed_is_a_source() -> None:
    b = TraceBuilder()
    x = b.value(2)
    cache = b.op("exp", x, out=(2,))
    with b.api("F.cached", x):
        y = b.op("add.Tensor", x, cache, out=(2,))
    assert names(b.build(), int(y)) == ["F.cached", "exp"]


# -- which value ---------------------------------------------------------------------------------------


def test_the_ways_to_name_a_value() -> None:
    t = recorded()
    linear = t.ops.where(name="F.linear")[0]
    value = linear.outputs[0]
    for wanted in (value, value.id, f"${value.id}", linear, "fc", t.module_calls.where(module="fc")[0],
                   t.modules.where(path="fc")[0], "h", "Residual.h"):  # fmt: skip
        assert found_value(t.index, wanted).id in (value.id, value.consumers[0].outputs[0].id), wanted
    assert found_value(t.index, "fc.weight").kind == "parameter"
    assert found_value(t.index, "loss").shape == ()
    assert found_value(t.index, "turned").shape == (4, 2)


def test_a_variable_in_a_module() -> None:
    t = make_trace(2, backward=False)
    found = found_value(t.index, "blocks.1.scores")
    assert (found.shape, found.producer and found.producer.name) == ((2, 8, 8), "bmm")
    assert found.id > found_value(t.index, "blocks.0.scores").id


def test_a_capture_by_its_key() -> None:
    t = make_trace()
    info = CaptureInfo("step0", "blocks.0", "output", 0, 0, "output", "", 7, (2, 8), "float32")
    kept = Trace(dataclasses.replace(t.data, captures=[info]))
    assert found_value(kept.index, "step0/blocks.0/output/0/0").id == 7


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (
            "blocks.0.atn",
            r"'blocks.0.atn' names no value, module or variable .*; did you mean 'blocks.0.attn.qkv'",
        ),
        ("$9999", r"There is no value \$9999 in this trace; its values are \$0 … \$\d+\."),
        (-1, r"There is no value \$-1 in this trace"),
        (1.5, r"1.5 is no value of a trace; give a row of t.values or t.ops, an id like '\$12' or a name\."),
        (True, r"True is no value of a trace"),
        ("", r"'' names no value|returned"),
    ],
)
def test_what_is_no_value_is_one_sentence(wanted: object, sentence: str) -> None:
    t = make_trace()
    if wanted == "":  # the model itself
        assert found_value(t.index, wanted).id == t.module_calls[0].outputs[0].id
        return
    with pytest.raises(UsageError, match=sentence) as caught:
        found_value(t.index, wanted)
    assert "\n" not in str(caught.value)


def test_an_op_that_returned_nothing() -> None:
    t = recorded()
    with pytest.raises(NothingMatched, match="returned no tensor"):
        found_value(t.index, t.ops.where(name="Tensor.backward")[0])


def test_wrong_options_are_one_sentence() -> None:
    t = recorded("aten")
    with pytest.raises(UsageError, match="depth=0 must be a whole number from 1 up"):
        told(t, "fc", depth=0)
    with pytest.raises(UsageError, match="level='both' is no level; choose 'api' or 'aten'"):
        told(t, "fc", level="both")
    with pytest.raises(NothingMatched, match="level='api': this trace has no api ops; it has aten ops"):
        told(t, "fc", level="api")


def test_a_row_of_an_earlier_snapshot_is_looked_up_there() -> None:
    with sl.trace() as t:
        h = torch.ones(2).exp()
        row = t.values[-1]
        h.add_(1)
        assert names(t, row) == ["Tensor.exp", "torch.ones"]
    assert names(t, row) == ["Tensor.exp", "torch.ones"]


# -- as a graph ----------------------------------------------------------------------------------------


def test_nodes_and_edges_are_plain_data() -> None:
    found = told(recorded(), "Residual")
    nodes = {node["id"]: node for node in json.loads(json.dumps(found.nodes))}
    edges = json.loads(json.dumps(found.edges))
    assert nodes[found.value]["op"] == "+"
    assert {node["name"] for node in nodes.values()} >= {"fc.weight", "fc.bias"}
    assert all(edge["source"] in nodes and edge["target"] in nodes for edge in edges)
    graph = found.to_networkx()
    assert sorted(graph.nodes) == sorted(nodes)
    assert graph.nodes[found.value]["module"] == "Residual"
    assert len(graph.edges) == len(edges)


def test_what_a_gradient_read_is_marked_in_the_graph() -> None:
    found = told(recorded(), "fc.weight.grad")
    assert {edge["saved"] for edge in found.edges} == {True, False}


def test_a_value_that_nothing_made_is_one_node() -> None:
    found = told(recorded(), "fc.bias")
    assert ([node["kind"] for node in found.nodes], found.edges, found.steps) == (["parameter"], [], ())


# -- size and oddity -----------------------------------------------------------------------------------


def long_run(count: int, *, residual: bool) -> tuple[Trace, Ref]:
    b = TraceBuilder()
    x = before = b.value(2)
    for at in range(count):
        after = b.op("add.Tensor", x, before, out=(2,)) if residual and at % 2 else b.op("exp", x, out=(2,))
        before, x = x, after
    return b.build(), x


@pytest.mark.parametrize("residual", [False, True])
def test_a_chain_of_100000_ops_is_counted(residual: bool) -> None:
    t, last = long_run(100_000, residual=residual)
    steps = told(t, int(last), depth=8).steps
    assert sum(step.before for step in steps[-1:]) + len(steps) == 100_000
    assert len(told(t, int(last), depth=100_001).steps) == 100_000  # no recursion


@pytest.mark.parametrize("residual", [False, True])
def test_a_long_chain_is_walked_once(residual: bool) -> None:
    def make(size: int) -> Callable[[], object]:
        t, last = long_run(size, residual=residual)
        return lambda: told(t, int(last), depth=size + 1)

    assert_grows_in_line(make, 2000)


@pytest.mark.parametrize("make", [hostile, nested, crashed, make_trace])
@pytest.mark.parametrize("ops", ["api", "aten"])
def test_every_value_of_an_odd_trace_has_a_lineage(make: object, ops: str) -> None:
    t = make()  # type: ignore[operator]
    for value in t.values:
        found = told(t, value, level=ops)
        positions = [child for step in found.steps for child in step.children]
        assert sorted(positions) == list(range(1, len(found.steps)))  # each is told once
        assert all(step.values for step in found.steps)


def test_a_view_that_no_recorded_op_made() -> None:
    b = TraceBuilder()
    base = b.op("exp", b.value(4), out=(4,))
    view = b.value(2, kind="activation", base=base)
    steps = told(b.build(), int(view)).steps
    assert [(step.name, step.sources) for step in steps] == [("", (int(base),)), ("exp", ())]


def test_a_module_that_was_never_called_is_not_offered_again() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    model = Holding()
    with sl.trace(model) as t:
        model(torch.ones(1, 2))
    sentence = r"^'unused' is a module that was never called in this recording: there is no value of it\.$"
    with pytest.raises(NothingMatched, match=sentence):
        found_value(t.index, "unused")
    with pytest.raises(NothingMatched, match=r"did you mean 'used'(, [^u]| or [^u]|\?)"):
        found_value(t.index, "unsed")


def returning(x: Tensor) -> Tensor:
    inner = x * 2
    for _ in range(2):
        inner = nn.functional.mse_loss(inner.expand(2), torch.zeros(2))
    return inner


def test_a_variable_anywhere_means_the_last_value_it_had() -> None:
    model = Residual()
    with sl.trace(model) as t:
        outer = returning(torch.ones(2))
        outer = returning(outer.expand(2))
        model(torch.ones(2, 4))
    assert found_value(t.index, "inner").producer.name == "mse_loss"  # type: ignore[union-attr]
    assert found_value(t.index, "outer").id == found_value(t.index, "inner").id
    assert find_value(t.index, "inner").set_by.code.startswith("inner = nn.functional")  # type: ignore[union-attr]
    assert find_value(t.index, "outer").set_by.code == "outer = returning(outer.expand(2))"  # type: ignore[union-attr]
    assert found_value(t.index, "turned").shape == (4, 2)
    assert find_value(t.index, "fc.weight").set_by is None
    assert outer.shape == ()
