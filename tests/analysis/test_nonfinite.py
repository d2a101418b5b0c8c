"""Which op made a NaN or an infinity: the rules, on small traces with statistics put on and on real ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sightline.analysis.nonfinite import NonFiniteOp, carriers, findings, first_nonfinite
from sightline.analysis.nonfinite_spread import Spread
from sightline.api import Trace
from tests.builders import TraceBuilder, make_trace
from tests.measured import FINE, INFS, NANS, measured


def blamed(trace: Trace, **options: Any) -> list[str]:
    return [finding.op.name for finding in findings(trace.index, **options)]


def test_the_op_that_made_it_and_not_those_that_passed_it_on() -> None:
    b = TraceBuilder()
    x = b.value(2, 4)
    h = b.op("relu", x, out=(2, 4))
    y = b.op("log", h, out=(2, 4))
    z = b.op("exp", y, out=(2, 4))
    t = measured(b.build(), {h: FINE, y: NANS, z: NANS})
    assert blamed(t) == ["log"]
    first = first_nonfinite(t.index)
    assert isinstance(first, NonFiniteOp)
    assert (first.value.id, first.nans, first.infs, first.counts) == (int(y), 3, 0, "3 NaN of 8")


@pytest.mark.parametrize(
    ("given", "made", "guilty"),
    [
        (FINE, NANS, True),
        (FINE, INFS, True),
        (INFS, NANS, True),  # inf - inf, or a softmax over nothing but -inf
        (INFS, INFS, False),
        (NANS, NANS, False),
        (NANS, INFS, False),
        (FINE, FINE, False),
        (INFS, FINE, False),
    ],
)
def test_what_counts_as_new(given: dict[str, int], made: dict[str, int], guilty: bool) -> None:
    b = TraceBuilder()
    x = b.value(4)
    y = b.op("sub.Tensor", x, x, out=(4,))
    assert blamed(measured(b.build(), {x: given, y: made})) == ["sub.Tensor"] * guilty


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("masked_fill.Scalar", (-float("inf"),)),
        ("full", ([4], float("inf"))),
        ("where.ScalarOther", (float("inf"),)),
        ("fill_.Scalar", (-float("inf"),)),
        ("clamp", ({"max": [float("inf")]},)),
    ],
)
def test_infinities_made_on_purpose(name: str, arguments: tuple[Any, ...]) -> None:
    b = TraceBuilder()
    x = b.value(4)
    y = b.op(name, x, *arguments, out=(4,))
    p = b.op("_softmax", y, -1, False, out=(4,))
    assert blamed(measured(b.build(), {y: INFS, p: FINE})) == []
    assert blamed(measured(b.build(), {y: INFS, p: NANS})) == ["_softmax"]
    assert blamed(measured(b.build(), {y: NANS})) == [name]


def test_a_nan_made_on_purpose() -> None:
    b = TraceBuilder()
    y = b.op("full", [4], float("nan"), out=(4,))
    assert blamed(measured(b.build(), {y: NANS})) == []


def test_the_purpose_may_stand_in_the_call_the_user_wrote() -> None:
    b = TraceBuilder()
    x = b.value(4)
    with b.api("torch.where", x, -float("inf")):
        y = b.op("where.self", x, out=(4,))
    assert blamed(measured(b.build(), {y: INFS})) == []


@pytest.mark.parametrize(
    "name",
    ["empty.memory_format", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "resize_"],
)
def test_memory_never_written_is_nobodys_fault_until_it_is_read(name: str) -> None:
    b = TraceBuilder()
    x = b.op(name, [4], out=(4,))
    view = b.op("view", x, [2, 2], out=(2, 2))
    filled = b.op("fill_.Scalar", x, 0, inplace=x)
    assert blamed(measured(b.build(), {x: NANS, filled: FINE, view: FINE})) == []
    y = b.op("mul.Tensor", x, 2, out=(4,))
    assert blamed(measured(b.build(), {x: NANS, y: NANS})) == ["mul.Tensor"]


def test_writing_a_part_of_unwritten_memory_leaves_the_rest() -> None:
    b = TraceBuilder()
    x = b.op("empty.memory_format", [4], out=(4,))
    part = b.op("index_put_", x, [b.value(1, dtype="int64")], b.value(1), inplace=x)
    whole = b.op("log.out", b.value(4), out=x, inplace=x)
    t = b.build()
    assert blamed(measured(t, {part: NANS})) == []
    assert blamed(measured(t, {whole: NANS})) == ["log.out"]


def test_a_view_is_never_to_blame() -> None:
    b = TraceBuilder()
    x = b.value(4)
    y = b.op("view", x, [2, 2], out=(2, 2))
    t = b.build()
    bases = t.data.values.base.copy()
    bases[int(y)] = int(x)
    t = Trace(dataclasses.replace(t.data, values=dataclasses.replace(t.data.values, base=bases)))
    assert blamed(measured(t, {y: NANS})) == []


def test_what_was_not_measured_carries_what_went_into_it() -> None:
    b = TraceBuilder()
    x = b.op("log", b.value(4), out=(4,))
    unmeasured = b.op("view", x, [2, 2], out=(2, 2))
    y = b.op("sum", unmeasured, out=())
    assert blamed(measured(b.build(), {x: NANS, y: NANS})) == ["log"]


def test_numbers_that_cannot_hold_a_nan_carry_none() -> None:
    b = TraceBuilder()
    x = b.op("log", b.value(4), out=(4,))
    mask = b.op("isnan", x, out=(4,), dtype="bool")
    y = b.op("div.Tensor", b.value(4), mask, out=(4,))
    assert blamed(measured(b.build(), {x: NANS, y: INFS})) == ["log", "div.Tensor"]


def test_api_calls_where_nothing_else_was_recorded() -> None:
    b = TraceBuilder(ops="api")
    x = b.value(4)
    y = b.op("torch.log", x, level="api", flavour="function", out=(4,))
    assert blamed(measured(b.build(), {y: NANS})) == ["torch.log"]


def test_the_aten_op_and_not_the_call_it_came_from() -> None:
    b = TraceBuilder()
    x = b.value(4)
    with b.api("torch.log", x):
        y = b.op("log", x, out=(4,))
    assert blamed(measured(b.build(), {y: NANS})) == ["log"]


@pytest.mark.parametrize(
    "glob", ["div", "div.*", "*iv*", "torch.div", "blocks.1", "blocks.*", "**.attn", "Net"]
)
def test_what_is_allowed(glob: str) -> None:
    b = TraceBuilder()
    x = b.value(4)
    path = "" if glob == "Net" else "blocks.1.attn"
    with b.call(path, x), b.api("torch.div", x):
        y = b.op("div.Tensor", x, out=(4,))
    z = b.op("exp", y, out=(4,))
    t = measured(b.build(), {y: INFS, z: INFS})
    assert blamed(t) == ["div.Tensor"]
    assert blamed(t, allow=["nothing", glob]) == []


def test_a_module_is_allowed_by_whole_segments() -> None:
    b = TraceBuilder()
    x = b.value(4)
    with b.call("blocks.10", x):
        y = b.op("div.Tensor", x, out=(4,))
    t = measured(b.build(), {y: INFS})
    assert blamed(t, allow=["blocks.1"]) == ["div.Tensor"]


def test_a_backward_op_is_told_where_its_forward_op_is_written() -> None:
    b = TraceBuilder()
    b.source("net.py", "y = x.sqrt()\n")
    x = b.value(4)
    with b.at("net.py", 1, "Net.forward"), b.call("fc", x), b.api("Tensor.sqrt", x, flavour="method"):
        y = b.op("sqrt", x, out=(4,))
    with b.phase("backward"):
        g = b.op("div.Tensor", y, out=(4,), forward=y)
    (found,) = findings(measured(b.build(), {y: FINE, g: INFS}).index)
    assert found.headline() == (
        "div.Tensor (backward of sqrt) made 2 Inf of 4 in f32[4], net.py:1 in Net.forward (fc)"
    )
    assert (found.module, found.place) == ("fc", "net.py:1 in Net.forward (fc)")


def test_the_message() -> None:
    b = TraceBuilder()
    b.source("net.py", "h = torch.relu(x)\ny = torch.log(h)\n")
    x, w = b.value(2, 4), b.value(4, kind="parameter", name="fc1.scale")
    with b.call("", x):
        with b.at("net.py", 1, "Net.forward", "torch.relu(x)"), b.api("torch.relu", x):
            h = b.op("relu", x, out=(2, 4))
        with b.at("net.py", 2, "Net.forward"), b.call("fc1", h), b.api("torch.log", h):
            y = b.op("log", h, w, [x], b.value(2, dtype="int64", kind="constant"), out=(2, 4))
    t = measured(b.build(), {h: {"min": -1.2, "max": 3.4, "mean": 0.1}, y: {"nans": 3, "infs": 1}})
    data = dataclasses.replace(t.data, schemas={"log": ("self", "scale")})
    (found,) = findings(Trace(data).index)
    assert found.text().splitlines() == [
        "log made 3 NaN and 1 -Inf of 8 in f32[2, 4], net.py:2 in Net.forward (fc1)",
        "  self f32[2, 4] = relu, net.py:1 in Net.forward (Net); -1.2 … 3.4, mean 0.1, std 1",
        "  scale f32[4] = parameter fc1.scale; not measured",
        "  argument 2[0] f32[2, 4] = input; not measured",
        "  argument 3 i64[2] = constant",
    ]
    assert [step.name for step in found.lineage.steps] == ["torch.log", "torch.relu"]


def test_an_op_without_line_and_module_is_told_all_the_same() -> None:
    b = TraceBuilder()
    y = b.op("log", b.value(2), out=(2,))
    (found,) = findings(measured(b.build(), {y: {"nans": 2}}).index)
    assert found.headline() == "log made 2 NaN of 2 in f32[2]"


def test_where_it_went() -> None:
    b = TraceBuilder()
    x = b.op("log", b.value(2), out=(2,))
    y = b.op("exp", x, out=(2,))
    b.op("exp", b.value(2), out=(2,))
    z = b.op("neg", y, out=(2,))
    b.op("where", z, out=(2,))
    bad = {each: {"nans": 1} for each in (x, y, z)}
    assert carriers(measured(b.build(), bad | {z + 1: FINE}).index, int(x)) == {int(x), int(y), int(z)}


def test_an_op_that_reads_only_the_shape_passes_nothing_on() -> None:
    b = TraceBuilder()
    loss = b.op("mse_loss", b.value(2), out=())
    ones = b.op("ones_like", loss, out=())
    grad = b.op("mm", ones, out=(2,), phase="backward")
    data = measured(b.build(), {loss: {"infs": 1}, ones: FINE, grad: {"infs": 2}})
    assert carriers(data.index, int(loss)) == {int(loss)}
    first, second = findings(data.index)
    assert (first.op.name, second.op.name) == ("mse_loss", "mm")
    assert not Spread(data.index, first).includes(second)


def test_nothing_measured_nothing_found() -> None:
    assert first_nonfinite(make_trace().index) is None
    assert findings(measured(make_trace(), {1: FINE}).index) == []
