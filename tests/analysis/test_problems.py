"""The checks on hand-built traces: devices, which a CPU cannot show, odd recordings, merging, and speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sightline.analysis.problems import CHECKS, KINDS, Problem, Severity, find, gap_texts
from sightline.api import Trace
from sightline.data.forms import Symbol
from sightline.data.trace_data import UNFINISHED, OpColumns, ParameterInfo, StatColumns, TraceData
from tests.builders import Ref, TraceBuilder, make_trace
from tests.growth import assert_grows_in_line
from tests.views.odd_traces import crashed, hostile, nested

GPU = "cuda:0"


def found(b: TraceBuilder) -> list[Problem]:
    return find(b.build().index)


def on_gpu(b: TraceBuilder, *shape: int, **settings: Any) -> Ref:
    return b.value(*shape, device=GPU, **settings)


# -- devices -----------------------------------------------------------------------------------------------


def reading(b: TraceBuilder, x: Ref) -> None:
    with b.api("Tensor.item", x, flavour="method"):
        b.op("_local_scalar_dense", x)


def masking(b: TraceBuilder, x: Ref) -> None:
    b.op("index.Tensor", x, [on_gpu(b, 4, dtype="bool")], out=on_gpu(b, 2, kind="activation"))


def copying(b: TraceBuilder, x: Ref) -> None:
    b.op("_to_copy", x, device=Symbol("cpu"), out=b.value(4, kind="activation"))


def finding(b: TraceBuilder, x: Ref) -> None:
    b.op("nonzero", x, out=on_gpu(b, 2, 1, dtype="int64", kind="activation"))


WAITS = {
    reading: "Tensor.item of f32[4]@cuda:0: a tensor is read as a Python number",
    masking: "index.Tensor of f32[4]@cuda:0: the shape of x[mask] depends on the data",
    copying: "_to_copy of f32[4]@cuda:0: a tensor is copied to the CPU",
    finding: "nonzero of f32[4]@cuda:0: the shape of nonzero depends on the data",
}


@pytest.mark.parametrize(("act", "title"), WAITS.items(), ids=[act.__name__ for act in WAITS])
def test_a_wait_for_the_device_inside_a_module(act: Callable[..., None], title: str) -> None:
    b = TraceBuilder()
    x = on_gpu(b, 4)
    with b.call("router", x), b.at("net.py", 7, "Router.forward"):
        act(b, x)
    (problem,) = found(b)
    assert (problem.kind, problem.severity, problem.title) == ("host-sync", Severity.NOTE, title)
    assert (problem.module, problem.place) == ("router", "net.py:7 in Router.forward")


@pytest.mark.parametrize("act", WAITS, ids=[act.__name__ for act in WAITS])
def test_outside_every_module_a_wait_is_the_users_choice(act: Callable[..., None]) -> None:
    b = TraceBuilder()
    x = on_gpu(b, 4)
    act(b, x)
    assert found(b) == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_there_is_no_wait_for_a_cpu(device: str) -> None:
    b = TraceBuilder()
    x = b.value(4, device=device)
    with b.call("", x):
        reading(b, x)
        finding_there = b.value(2, 1, dtype="int64", device=device, kind="activation")
        b.op("nonzero", x, out=finding_there)
    assert found(b) == []


def test_a_copy_that_nobody_waits_for() -> None:
    b = TraceBuilder()
    x = on_gpu(b, 4)
    with b.call("", x):
        b.op("_to_copy", x, device=Symbol("cpu"), non_blocking=True, out=b.value(4, kind="activation"))
    assert found(b) == []


def test_tensors_of_one_op_on_two_devices() -> None:
    b = TraceBuilder(exception="RuntimeError: Expected all tensors to be on the same device")
    x, y = on_gpu(b, 4), b.value(4)
    with b.call("", x, raised=True), b.at("net.py", 3, "Net.forward"):
        b.op("add.Tensor", x, y, raised=True)
    failure, problem = found(b)
    assert failure.kind == "failure"
    assert problem.severity is Severity.ERROR
    assert problem.title == "add.Tensor failed on tensors of cuda:0 and cpu: f32[4]@cuda:0, f32[4]"


def test_an_index_on_the_cpu_is_accepted_and_copied() -> None:
    b = TraceBuilder()
    b.value(4, kind="parameter", name="fc.weight", device=GPU)
    x, rows = on_gpu(b, 4), b.value(2, dtype="int64")
    with b.call("", x), b.api("[]", x, rows, flavour="operator"):
        b.op("index.Tensor", x, [rows], out=on_gpu(b, 2, kind="activation"))
    (problem,) = found(b)
    assert (problem.kind, problem.severity) == ("device-copy", Severity.NOTE)
    assert problem.title == "[] copies i64[2] to cuda:0"


def test_a_scalar_on_the_cpu_may_join_any_device() -> None:
    b = TraceBuilder()
    x, scale = on_gpu(b, 4), b.value()
    with b.call("", x):
        b.op("mul.Tensor", x, scale, out=on_gpu(b, 4, kind="activation"))
    assert found(b) == []


def copied(*homes: str) -> list[Problem]:
    """A forward that copies a table from the CPU to the device, in a model that lives on ``homes``."""
    b = TraceBuilder()
    for at, device in enumerate(homes):
        b.value(4, kind="parameter", name=f"fc{at}.weight", device=device)
    x, table = on_gpu(b, 4), b.value(4, kind="constant", name="table")
    with b.call("", x), b.at("net.py", 5, "Net.forward"):
        b.op("_to_copy", table, device=Symbol(GPU), out=on_gpu(b, 4, kind="activation"))
    return found(b)


def test_a_copy_to_the_device_in_every_forward() -> None:
    (problem,) = copied(GPU)
    assert (problem.kind, problem.title) == ("device-copy", "_to_copy copies f32[4] to cuda:0")


def test_a_model_that_lives_on_both_devices_copies_on_purpose() -> None:
    assert copied(GPU, "cpu") == []


def copied_outside(sources: int, copies: int, steps: int = 2) -> list[Problem]:
    """A loop that copies from the CPU outside every module: some tensors, so many times in all."""
    rows = [[0, at, 1, 0.1, 0.1] for at in range(steps)]
    optimizer = {"type": "SGD", "parameters": 1, "names": [], "steps": steps, "place": []}
    b = TraceBuilder(training={"optimizers": [optimizer], "steps": rows})
    tables = [b.value(4, kind="constant") for _ in range(sources)]
    with b.at("train.py", 12, "main"):
        for at in range(copies):
            b.op("_to_copy", tables[at % sources], device=Symbol(GPU), out=on_gpu(b, 4, kind="activation"))
    return found(b)


def test_the_same_tensor_copied_in_every_step() -> None:
    (problem,) = copied_outside(1, 5)
    assert (problem.kind, problem.place) == ("copied-in-loop", "train.py:12 in main")
    assert problem.title == "the same f32[4] is copied to cuda:0 5 times"


def test_many_small_copies_in_a_step() -> None:
    (problem,) = copied_outside(40, 40)
    assert problem.title == "40 small tensors such as f32[4] are copied to cuda:0 in 2 steps"


def test_a_copy_of_each_batch_is_healthy() -> None:
    assert copied_outside(6, 6) == []


# -- numbers -----------------------------------------------------------------------------------------------


def measured(trace: Trace, **of_value: dict[str, float]) -> Trace:
    """The trace with statistics of some values: ``v3={"nans": 2}``."""
    ids = np.array(sorted(int(name[1:]) for name in of_value), dtype=np.int32)
    rows = [{"min": -1.0, "max": 1.0, "mean": 0.0, "std": 1.0, "l2": 1.0, **of_value[f"v{id}"]} for id in ids]

    def column(name: str, dtype: Any) -> Any:
        return np.array([row.get(name, 0) for row in rows], dtype=dtype)

    floats = {name: column(name, np.float64) for name in ("min", "max", "mean", "std", "l2")}
    counts = {name: column(name, np.int64) for name in ("zeros", "nans", "infs")}
    stats = StatColumns(ids, **floats, **counts, fingerprint=column("fingerprint", np.uint64))
    return Trace(replace(trace.data, stats=stats))


def divided(*arguments: float) -> Trace:
    b = TraceBuilder()
    x = b.value(2, 3)
    with b.call("", x), b.at("net.py", 4, "Net.forward"):
        y = b.op("div.Tensor", x, *arguments, out=(2, 3))
        b.op("mul.Tensor", y, 2.0, out=(2, 3))
    return b.build()


def test_the_first_infinity_is_the_problem_and_not_what_comes_of_it() -> None:
    trace = measured(divided(0.0), v0={}, v1={"infs": 2}, v2={"infs": 2})
    (problem,) = find(trace.index)
    assert problem.title == "div.Tensor made 2 Inf of 6 in f32[2, 3] out of f32[2, 3] (-1 … 1, mean 0, std 1)"
    assert (problem.op, problem.value) == (0, 1)


def test_an_infinite_argument_asks_for_infinities() -> None:
    assert find(measured(divided(float("-inf")), v0={}, v1={"infs": 2}, v2={"infs": 2}).index) == []


def test_an_infinity_that_goes_away_is_none() -> None:
    assert find(measured(divided(0.0), v0={}, v1={"infs": 2}, v2={}).index) == []


def test_a_constant_layer() -> None:
    b = TraceBuilder()
    b.module("act", "Softmax")
    x = b.value(8, 8)
    with b.at("net.py", 2, "Net.forward"), b.call("act", x):
        b.op("_softmax", x, -1, out=(8, 8))
    (problem,) = find(measured(b.build(), v0={}, v1={"min": 1.0, "max": 1.0}).index)
    assert problem.title == "the output f32[8, 8] is 1 everywhere, though its input varies"
    assert (problem.module, problem.place) == ("act", "net.py:2 in Net.forward")


def test_a_layer_whose_input_says_nothing_cannot_help_it() -> None:
    b = TraceBuilder()
    x = b.value(8, 8)
    with b.call("act", x):
        b.op("relu", x, out=(8, 8))
    flat = {"min": 0.0, "max": 0.0}
    assert find(measured(b.build(), v0=flat, v1=flat).index) == []


# -- merging -----------------------------------------------------------------------------------------------


def test_repeats_at_one_line_are_one_problem_and_the_most_serious_comes_first() -> None:
    b = TraceBuilder()
    x, away = b.value(4), on_gpu(b, 4)
    for at in range(12):
        b.module(f"layers.{at}", "Layer")
        with b.at("net.py", 9, "Net.forward"), b.call(f"layers.{at}", away):
            with b.at("net.py", 3, "Layer.forward"):
                reading(b, away)
    with b.at("net.py", 11, "Net.forward"):
        b.op("add.Tensor", x, away, raised=True)
    error, note = found(b)
    assert (error.kind, error.module, error.count) == ("mixed-devices", "", 1)
    assert (note.kind, note.module, note.count) == ("host-sync", "layers.0 … layers.11", 12)
    assert note.op == 1
    assert note.modules == tuple(f"layers.{at}" for at in range(12))


def test_every_check_says_why_it_matters() -> None:
    assert set(KINDS) == {check.kind for check in CHECKS}
    for check in CHECKS:
        assert check.why.endswith(".")
        assert check.kind.replace("-", "").isalpha()


# -- odd recordings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_trace, nested, crashed, hostile, TraceBuilder().build])
def test_odd_traces_are_no_reason_to_fail(make: Callable[[], Trace]) -> None:
    trace = make()
    for problem in find(trace.index):
        assert problem.kind in KINDS
    assert gap_texts(trace.index)


def test_an_unfinished_backward_says_nothing_about_gradients() -> None:
    b = TraceBuilder()
    owned = ParameterInfo("weight", "fc.weight", (4,), "float32", 4, 16, True, False, 1)
    b.module("fc", "Linear", parameters=(owned,))
    b.module("other", "Linear", parameters=(replace(owned, path="other.weight", key=2),))
    x = b.value(4)
    weight = b.value(4, kind="parameter", name="fc.weight", requires_grad=True)
    with b.call("", x), b.call("fc", x):
        y = b.op("mul.Tensor", x, weight, out=(4,))
    with b.phase("backward"):
        b.op("mul.Tensor", x, x, out=(4,), forward=y)
    trace = b.build()
    assert [problem.module for problem in find(trace.index)] == ["other"]
    flags = trace.data.ops.flags.copy()
    flags[-1] |= UNFINISHED
    running = Trace(replace(trace.data, ops=replace(trace.data.ops, flags=flags)))
    assert find(running.index) == []
    assert "the recording ended inside an op or a call: parameters without" in gap_texts(running.index)[0]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("layers.0", "layers.1"), False),  # a layer that was dropped
        (("experts.expert_0", "experts.expert_1", "experts.expert_2", "experts.expert_3"), False),
        (("fc1", "fc2"), True),
        (("wte", "wpe"), True),
    ],
)
def test_only_one_of_a_list_may_be_passed_over(names: tuple[str, ...], problem: bool) -> None:
    b = TraceBuilder()
    for key, path in enumerate(names):
        owned = ParameterInfo("weight", f"{path}.weight", (4,), "float32", 4, 16, True, False, key)
        b.module(path, "Layer", parameters=(owned,))
    x = b.value(4)
    with b.call("", x):
        y = x
        for path in names[:-1]:
            weight = b.value(4, kind="parameter", name=f"{path}.weight", requires_grad=True)
            with b.call(path, x):
                y = b.op("mul.Tensor", y, weight, out=(4,))
    with b.phase("backward"):
        b.op("mul.Tensor", x, x, out=(4,), forward=y)
        for path in names[:-1]:
            b.value(4, kind="gradient", name=f"{path}.weight.grad")
    assert [each.module for each in found(b)] == ([names[-1]] if problem else [])


# -- speed -------------------------------------------------------------------------------------------------


def test_a_long_recording_is_looked_through_without_a_loop_over_loops() -> None:
    data = make_trace(12).data

    def make(times: int) -> Callable[[], object]:
        trace = Trace(_repeated(data, times))
        return lambda: find(trace.index)

    assert_grows_in_line(make, 10)


def _repeated(data: TraceData, times: int) -> TraceData:
    """The ops of a recording over and over, on the same values."""
    ops = data.ops
    columns = {name: np.tile(getattr(ops, name), times) for name in OpColumns.__dataclass_fields__}
    for name in ("input_offsets", "output_offsets"):
        counts = np.tile(np.diff(getattr(ops, name)), times)
        columns[name] = np.concatenate([[0], np.cumsum(counts)])
    return replace(data, ops=OpColumns(**columns))
