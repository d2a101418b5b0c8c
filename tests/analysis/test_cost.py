"""What modules cost: nothing counted twice, nothing lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sightline.analysis.cost import cost_of, nonfinite_counts, parameters_in
from sightline.analysis.module_tree import OUTSIDE, own_ops, scopes_of
from sightline.api import Trace
from sightline.data.trace_data import ParameterInfo
from tests.builders import TraceBuilder, make_trace
from tests.measured import measured


def parameter(
    path: str, numel: int, key: int, *, trainable: bool = True, buffer: bool = False
) -> ParameterInfo:
    name = path.rpartition(".")[2]
    return ParameterInfo(name, path, (numel,), "float32", numel, 4 * numel, trainable, buffer, key)


def costs(trace: Trace) -> dict[str, dict[str, tuple[int, int]]]:
    """Own and total of every scope, by the path of modules that leads to it."""
    found = cost_of(trace.data)
    made: dict[str, dict[str, tuple[int, int]]] = {}
    for id, scope in enumerate(found.scopes.rows):
        name = "outside" if scope.module == OUTSIDE else trace.modules[scope.module].label
        made[name] = {
            column: (int(getattr(found.own, column)[id]), int(getattr(found.total, column)[id]))
            for column in ("flops", "backward_flops", "recompute_flops", "time", "backward_time", "memory")
        }
    return made


def two_calls() -> Trace:
    """A root that calls ``fc`` twice and adds; the backward of one of the calls."""
    b = TraceBuilder()
    x, w = b.value(2, 4), b.value(4, 4, kind="parameter", name="fc.weight")
    with b.call("", x):
        y = x
        for _ in range(2):
            with b.call("fc", x), b.api("F.linear", x, w, flops=999):
                y = b.op("mm", x, w, out=(2, 4), flops=64, duration=300)
        with b.api("+", y, x, flavour="operator"):
            z = b.op("add.Tensor", y, x, out=(2, 4), duration=50)
    with b.phase("backward"):
        b.op("mm", z, w, out=(2, 4), forward=y, flops=128, duration=70)
    return b.build()


def test_flops_are_those_of_the_lowest_level_only() -> None:
    assert costs(two_calls())["fc"]["flops"] == (128, 128)


def test_flops_of_an_api_trace_are_on_the_api_calls() -> None:
    b = TraceBuilder(ops="api")
    x = b.value(2, 4)
    with b.call("fc", x):
        b.op("F.linear", x, x, level="api", flavour="function", out=(2, 2), flops=32)
    assert costs(b.build())["fc"]["flops"] == (32, 32)


def test_a_container_has_its_submodules_in_its_total_and_not_in_its_own() -> None:
    root = costs(two_calls())["Net"]
    assert root["flops"] == (0, 128)
    assert root["time"] == (50, 650)
    assert root["memory"] == (32, 96)


def test_backward_ops_count_for_the_module_of_their_forward_op() -> None:
    fc = costs(two_calls())["fc"]
    assert fc["backward_flops"] == (128, 128)
    assert fc["backward_time"] == (70, 70)


def test_what_was_computed_again_is_kept_apart() -> None:
    b = TraceBuilder()
    x = b.value(2, 4)
    with b.call("", x), b.call("fc", x):
        b.op("mm", x, x, out=(2, 2), flops=8)
    with b.phase("recompute"), b.call("fc", x):
        b.op("mm", x, x, out=(2, 2), flops=8)
    trace = b.build()
    assert costs(trace)["fc"]["flops"] == (8, 8)
    assert costs(trace)["fc"]["recompute_flops"] == (8, 8)
    assert int(cost_of(trace.data).own.recompute_time.sum()) == 1000
    assert [len(scope.calls) for scope in scopes_of(trace.data).rows] == [1, 1]


def test_a_storage_counts_once_and_only_if_the_forward_made_it() -> None:
    b = TraceBuilder()
    x = b.value(8)
    with b.call("", x), b.call("act", x):
        h = b.op("relu", x, out=(8,))
        b.op("add_.Tensor", h, 1, inplace=h)  # a new value in a storage that was counted
        b.op("mul_.Tensor", x, 2, inplace=x)  # the input's storage is nobody's activation
    with b.phase("backward"):
        b.op("mul.Tensor", h, h, out=(8,), forward=h)
    assert costs(b.build())["act"]["memory"] == (32, 32)


def test_ops_outside_every_module_have_a_scope_of_their_own() -> None:
    trace = make_trace()
    assert costs(trace)["outside"]["time"] == (1000, 1000)
    assert own_ops(trace.data, scopes_of(trace.data))[len(scopes_of(trace.data).rows) - 1].counts == {
        "Tensor.sum": 1
    }


def test_a_holder_that_is_never_called_has_the_sum_of_what_it_holds() -> None:
    trace = make_trace(3)
    assert costs(trace)["blocks"]["flops"] == (0, 3 * costs(trace)["blocks.0"]["flops"][1])


def test_a_module_called_from_another_place_costs_there() -> None:
    b = TraceBuilder()
    x = b.value(2)
    with b.call("", x):
        with b.call("a", x), b.call("a.fc", x):
            b.op("mm", x, x, out=(2,), flops=3)
        with b.call("b", x), b.call("a.fc", x):
            b.op("mm", x, x, out=(2,), flops=3)
    trace = b.build()
    rows = scopes_of(trace.data).rows
    assert [(trace.modules[row.module].label, row.parent) for row in rows] == [
        ("Net", -1), ("a", 0), ("a.fc", 1), ("b", 0), ("a.fc", 3),
    ]  # fmt: skip
    assert cost_of(trace.data).total.flops.tolist() == [6, 3, 3, 3, 3]


def test_shared_parameters_are_counted_once() -> None:
    b = TraceBuilder()
    b.module("wte", "Embedding", parameters=(parameter("wte.weight", 100, 1),))
    b.module("head", "Linear", parameters=(parameter("head.weight", 100, 1), parameter("head.bias", 10, 2)))
    x = b.value(2)
    with b.call("", x):
        for name in ("wte", "head"):
            with b.call(name, x):
                b.op("mm", x, x, out=(2,))
    found = cost_of(b.build().data).parameters
    assert [(row.own, row.total, row.own_new, row.total_new) for row in found] == [
        (0, 110, 0, 110), (100, 100, 100, 100), (110, 110, 10, 10),
    ]  # fmt: skip


def test_frozen_parameters_buffers_and_modules_that_never_ran() -> None:
    b = TraceBuilder()
    b.module(
        "fc",
        parameters=(parameter("fc.weight", 6, 1, trainable=False), parameter("fc.mean", 5, 2, buffer=True)),
    )
    b.module("unused.fc", parameters=(parameter("unused.fc.weight", 4, 3),))
    with b.call("", b.value(1)), b.call("fc", b.value(1)):
        pass
    trace = b.build()
    whole = parameters_in(trace.data, scopes_of(trace.data), [0])
    assert (whole.total, whole.trainable, whole.bytes, whole.buffers) == (10, 4, 40, 5)
    assert [trace.modules[row.module].label for row in scopes_of(trace.data).rows] == [
        "Net", "fc", "unused", "unused.fc",
    ]  # fmt: skip


def test_an_empty_trace_costs_nothing() -> None:
    assert cost_of(TraceBuilder().build().data).scopes.rows == ()


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A trace with calls nested at random, ops between them, and some backward ops."""
    b = TraceBuilder()
    x = b.value(2)
    made = []

    def calls(level: int) -> None:
        for _ in range(draw(st.integers(0, 3))):
            if draw(st.booleans()):
                made.append(b.op("mul.Tensor", x, x, out=(2,), flops=draw(st.integers(-1, 9)), duration=7))
            elif level < 4:
                with b.call(draw(st.sampled_from(["", "a", "a.b", "a.c", "d.e"])), x):
                    calls(level + 1)

    calls(0)
    with b.phase("backward"):
        for y in made[::2]:
            b.op("mul.Tensor", y, x, out=(2,), forward=y, flops=5, duration=3)
    return b.build()


@given(traces())
def test_the_owns_add_up_to_the_whole_and_the_parts_to_their_parent(trace: Trace) -> None:
    found = cost_of(trace.data)
    data, scopes = trace.data, found.scopes
    aten = data.ops.flops >= 0
    assert found.own.flops.sum() == data.ops.flops[aten & (data.ops.phase == 0)].sum()
    assert found.own.backward_time.sum() == data.ops.duration[data.ops.phase == 1].sum()
    assert found.own.time.sum() == data.ops.duration[data.ops.phase == 0].sum()
    for column in ("flops", "time", "backward_time", "memory"):
        own, total = getattr(found.own, column), getattr(found.total, column)
        for id in range(len(scopes.rows)):
            assert total[id] == own[id] + sum(total[child] for child in scopes.children(id))
        assert own.sum() == sum(total[top] for top in scopes.children(-1))


@given(traces())
def test_scopes_are_nested_ranges_in_the_order_they_ran(trace: Trace) -> None:
    scopes = scopes_of(trace.data)
    for id, scope in enumerate(scopes.rows):
        assert scope.parent < id < scope.end
        if scope.parent >= 0:
            assert scope.end <= scopes.rows[scope.parent].end
            assert scope.depth == scopes.rows[scope.parent].depth + 1
    called = [scopes.rows[scope].module for scope in scopes.of_call.tolist()]
    assert np.array_equal(called, trace.data.calls.module)


def test_what_is_not_finite_adds_up_and_belongs_to_a_phase() -> None:
    b = TraceBuilder()
    x = b.value(4)
    with b.call("", x):
        with b.call("a", x):
            y = b.op("log", x, out=(4,))
        z = b.op("neg", y, out=(4,))
    with b.phase("backward"):
        g = b.op("div.Tensor", z, out=(4,), forward=y)
    readings = {x: {"nans": 9}, y: {"nans": 3}, z: {"nans": 1, "infs": 2}, g: {"infs": 4}}
    data = measured(b.build(), readings).data
    scopes = cost_of(data).scopes
    forward, backward = (nonfinite_counts(data, scopes, phase) for phase in ("forward", "backward"))
    assert [forward.in_scopes([scope]) for scope in (0, 1)] == [(4, 2), (3, 0)]
    assert [forward.in_scopes([scope], own=True) for scope in (0, 1)] == [(1, 2), (3, 0)]
    assert [backward.in_scopes([scope]) for scope in (0, 1)] == [(0, 4), (0, 4)]
    assert backward.in_scopes([0], own=True) == (0, 0)
