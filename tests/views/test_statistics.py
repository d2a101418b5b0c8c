"""Statistics in the views: how they are written, pooled and asked for, and the example with them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.data.forms import ONE_TENSOR
from sightline.errors import UsageError
from sightline.views.code import code
from sightline.views.log import log
from sightline.views.rendering import View, width
from sightline.views.source import source
from sightline.views.statistics_text import StatisticsIndex, ValueStatistics, _pooled
from sightline.views.summary import summary
from tests.builders import TraceBuilder, make_trace
from tests.conftest import Golden
from tests.measured import INFS, NANS, measured
from tests.views.measured import steady, tiny_transformer

NAN = math.nan
VIEWS: list[Callable[..., View]] = [sl.Trace.code, sl.Trace.log, sl.Trace.summary, sl.Trace.source]


# -- the example -----------------------------------------------------------------------------------


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="The golden files have the ops of torch 2.13."
)
@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("statistics_code", lambda t: code(t.index, fold=True)),
        ("statistics_log", lambda t: log(t.index, module="blocks.0", inside=True, fold=False, all=True)),
        ("statistics_source", lambda t: source(t.index)),
        ("statistics_summary", summary),
    ],
)
def test_the_example(name: str, view: Callable[[sl.Trace], View], golden: Golden) -> None:
    golden(name, steady(str(view(tiny_transformer()))))


@pytest.mark.parametrize("view", [sl.Trace.summary, sl.Trace.source])
def test_it_fits_a_hundred_columns(view: Callable[..., View]) -> None:
    assert max(map(width, str(view(tiny_transformer())).splitlines())) <= 100


# -- asked for, or not -----------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_without_statistics_nothing_is_different(view: Callable[..., View]) -> None:
    plain, given = make_trace(), measured_trace()
    assert str(view(plain)) == str(view(given, stats=False)) == str(view(plain, stats=False))
    assert str(view(given)) != str(view(plain))
    assert str(view(given)) == str(view(given, stats=True))


@pytest.mark.parametrize("view", VIEWS)
def test_asking_for_what_was_not_taken_is_one_sentence(view: Callable[..., View]) -> None:
    with pytest.raises(
        UsageError, match=r"^stats=True: this trace has no statistics; record it with stats=True\.$"
    ):
        view(make_trace(), stats=True)
    with pytest.raises(UsageError, match="stats='yes' must be True, False or None"):
        view(make_trace(), stats="yes")


def measured_trace(**reading: Any) -> sl.Trace:
    """The small transformer, every result of an op measured."""
    t = make_trace()
    made = t.values.where(lambda value: value.producer is not None)
    return measured(t, {value.id: reading for value in made})


# -- how they are written --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (ValueStatistics(0.0, 1.42, 0.406, 0.467, size=16), "0 … 1.42, mean 0.406, std 0.467"),
        (ValueStatistics(-1.0, 1.0, 0.0, 1.0, 3, 2, size=16), "-1 … 1, mean 0, std 1, 3 NaN, 2 Inf"),
        (ValueStatistics(1.0, 1.0, 1.0, 0.0, size=16), "all 1"),
        (ValueStatistics(1.0, 1.0, 1.0, 0.0, 3, size=16), "1, 3 NaN"),
        (ValueStatistics(3.472, 3.472, 3.472, NAN), "3.47"),
        (ValueStatistics(NAN, NAN, NAN, NAN, 16, size=16), "all NaN"),
        (ValueStatistics(NAN, NAN, NAN, NAN, 0, 1), "Inf"),
        (ValueStatistics(NAN, NAN, NAN, NAN, 10, 6, size=16), "10 NaN, 6 Inf"),
        (ValueStatistics(NAN, NAN, NAN, NAN, 2000, size=16000), "2,000 NaN"),
        (ValueStatistics(NAN, NAN, NAN, NAN, size=16), ""),
        (ValueStatistics(-3.0, 2.0, 0.5, 1.0, 1, size=32, values=2), "-3 … 2, 1 NaN"),
    ],
)
def test_a_reading(reading: ValueStatistics, text: str) -> None:
    assert reading.text == text


@pytest.mark.parametrize(
    ("reading", "cell"),
    [
        (ValueStatistics(-3, 3, 0.01234, 0.467, size=9), ("0.01", "0.47")),
        (ValueStatistics(-3, 3, -1e-9, 0.996, size=9), ("0", "1")),
        (ValueStatistics(0, 9000, 1234.5, 12.0, size=9), ("1.23e+03", "12")),
        (ValueStatistics(2, 2, 2.0, 0.0, size=9), ("2", "")),
        (ValueStatistics(2, 2, 2.0, NAN), ("2", "")),
        (ValueStatistics(NAN, NAN, NAN, NAN, 9, size=9), ("NaN", "")),
        (ValueStatistics(NAN, NAN, NAN, NAN, 0, 9, size=9), ("Inf", "")),
    ],
)
def test_a_reading_in_a_cell(reading: ValueStatistics, cell: tuple[str, str]) -> None:
    assert reading.spread == cell


def test_several_values_taken_together() -> None:
    parts = [torch.randn(7), torch.randn(3, 5) * 4 + 2, torch.tensor([1.0])]
    with sl.trace(stats=True) as t:
        made = [part + 0 for part in parts]
    known = [value.id for value in t.values.where(lambda value: value.stats is not None)]
    found, whole = StatisticsIndex(t.data).of(known), torch.cat([part.flatten() for part in made]).double()
    assert found is not None
    assert (found.low, found.high) == (whole.min().item(), whole.max().item())
    assert found.mean == pytest.approx(whole.mean().item(), rel=1e-5)
    assert found.std == pytest.approx(whole.std().item(), rel=1e-5)
    assert (found.size, found.values) == (23, 3)


def test_what_is_not_finite_stands_out() -> None:
    b = TraceBuilder()
    x, y = b.op("log", b.value(4), out=(4,)), b.op("exp", b.value(4), out=(4,))
    t = measured(b.build(), {x: NANS, y: INFS})
    for view in (code(t.index, fold=False), log(t.index, fold=False, all=True)):
        out = io.StringIO()
        view.print(color=True, file=out)
        assert "\x1b[1;31m3 NaN\x1b[0m" in out.getvalue()
        assert "\x1b[33m2 Inf\x1b[0m" in out.getvalue()
        assert '<span style="color:#c92a2a;font-weight:bold">3 NaN</span>' in view._repr_html_()


# -- code ------------------------------------------------------------------------------------------


def loop(runs: int = 3) -> tuple[sl.Trace, list[int]]:
    b = TraceBuilder()
    b.source("n.py", "for _ in range(3):\n    x = f(x)\n    y = g(x)\n")
    made = []
    for _ in range(runs):
        for at, name in ((2, "mm"), (3, "native_layer_norm")):
            with b.at("n.py", at, "<module>"):
                made.append(b.op(name, b.value(4), out=(4,)))
    return b.build(), made


def test_a_folded_op_has_the_range_of_all_its_runs() -> None:
    t, made = loop()
    readings = {id: {"min": -1.0 * at, "max": 10.0 + at, "nans": at == 4} for at, id in enumerate(made)}
    lines = str(code(measured(t, readings).index, fold=True)).splitlines()
    assert lines[0] == "┌ ×3  for _ in range(3):"
    assert lines[2] == "┊ │ # mm(f32[4]) -> f32[4]; -4 … 14, 1 NaN"
    assert lines[4] == "┊ │ # native_layer_norm(f32[4]) -> f32[4]; -5 … 15"


def test_one_op_that_ran_often_has_one_range() -> None:
    b = TraceBuilder()
    made = [b.op("neg", b.value(4), out=(4,)) for _ in range(5)]
    t = measured(b.build(), {id: {"max": 1.0 + at} for at, id in enumerate(made)})
    assert str(code(t.index, fold=True)).splitlines()[1] == "│ # neg(f32[4]) -> f32[4]; ×5 -1 … 5"


def test_numbers_of_neighbours_stand_below_each_other() -> None:
    b = TraceBuilder()
    x = b.value(4)
    wide = b.op("cat", [b.value(size) for size in range(1, 10)], out=(36,))
    made = [b.op("relu", x, out=(4,)), b.op("add.Tensor", x, 1, out=(4,)), wide]
    b.op("size", x)
    lines = str(code(measured(b.build(), {id: {} for id in made}).index, fold=False)).splitlines()
    assert lines[2:] == [
        "│ # relu(f32[4]) -> f32[4];          -1 … 3, mean 0.5, std 1",
        "│ # add.Tensor(f32[4], 1) -> f32[4]; -1 … 3, mean 0.5, std 1",
        "│ # size(f32[4]);",
    ]
    assert lines[1].endswith("-> f32[36]; -1 … 3, mean 0.5, std 1")


def test_of_several_results_the_first_that_was_measured() -> None:
    b = TraceBuilder()
    made = b.op("topk", b.value(4), out=[(2,), (2,)])
    t = measured(b.build(), {made[1]: {"max": 7.0}})
    assert (
        str(code(t.index, fold=False)).splitlines()[1]
        == "│ # topk(f32[4]) -> (f32[2], f32[2]); -1 … 7, mean 0.5, std 1"
    )
    t = measured(b.build(), {made[0]: {}, made[1]: {"nans": 1}})
    assert str(code(t.index, fold=False)).endswith("; -1 … 3, mean 0.5, std 1, 1 NaN in result 1")


# -- log, source, summary --------------------------------------------------------------------------


def test_the_log_has_them_after_every_tensor() -> None:
    b = TraceBuilder()
    x = b.op("relu", b.value(2, 3), out=(2, 3))
    with b.api("+", x, 1, flavour="operator"):
        y = b.op("add.Tensor", x, 1, out=(2, 3))
    t = measured(b.build(), {x: {"max": 2.0}, y: NANS})
    assert str(log(t.index, op="+", fold=False, all=True)).splitlines()[1:] == [
        "├─ Left: Tensor [2, 3] @ cpu    -1 … 2, mean 0.5, std 1",
        "├─ Right: 1",
        "└─ Output: Tensor [2, 3] @ cpu  -1 … 3, mean 0.5, std 1, 3 NaN",
    ]


def test_blocks_that_look_alike_keep_their_own_numbers() -> None:
    b = TraceBuilder()
    x = b.value(4)
    made = [b.op("neg", x, out=(4,)) for _ in range(2)]
    text = str(
        log(measured(b.build(), {made[0]: {"max": 1.0}, made[1]: {"max": 2.0}}).index, fold=False, all=True)
    )
    assert "-1 … 1, mean" in text
    assert "-1 … 2, mean" in text


def test_the_source_has_the_range_of_what_a_line_made() -> None:
    b = TraceBuilder()
    b.source("s.py", "y = f(x).view(-1)\n")
    with b.at("s.py", 1, "<module>"):
        x, y = (b.op("mm", b.value(4), out=(4,)) for _ in range(2))
        view = b.value(4, base=x, producer=0)
        b.op("view", x, out=view)
    t = measured(b.build(), {x: {"min": -7.0}, y: NANS, view: {"max": 99.0}})
    assert "# mm ×2, view -> f32[4]; -7 … 3, 3 NaN" in str(source(t.index))


def test_the_summary_has_what_came_out_and_what_is_not_finite() -> None:
    b = TraceBuilder()
    x = b.value(4)
    with b.call("", x):
        with b.call("a", x):
            y = b.op("mm", x, out=(4,))
        with b.call("b", y):
            z = b.op("log", y, out=(4,))
    with b.phase("backward"):
        g = b.op("div.Tensor", z, out=(4,), forward=y)
    t = measured(b.build(), {y: {}, z: {**NANS, "mean": NAN, "min": NAN}, g: NANS})
    lines = str(summary(t)).splitlines()
    assert lines[0].split()[-4:] == ["mean", "±", "std", "NaN/Inf"]
    assert "0.5 ± 1" in lines[3]
    assert "NaN" not in lines[3]  # the one of the backward pass: it began before
    assert lines[4].split()[-3:] == ["NaN", "3", "NaN"]
    assert "NaN/Inf: in the results of forward ops" in lines[-1]
    assert "3 NaN" in str(summary(t, phase="backward")).splitlines()[3]


def test_without_anything_wrong_there_is_no_column_for_it() -> None:
    assert "NaN" not in str(summary(measured_trace()))


def test_of_several_calls_the_summary_has_all() -> None:
    b = TraceBuilder()
    x = b.value(4)
    made = []
    for _ in range(2):
        with b.call("a", x) as out:
            made.append(b.op("mm", x, out=(4,)))
            out += [x, made[-1]]
    t = measured(b.build(), {made[0]: {"mean": 1.0, "std": 0.0}, made[1]: {"mean": 3.0, "std": 0.0}})
    assert "2 ± 1.1" in str(summary(t))


class _LossOrLogits(nn.Module):
    def forward(self, x: torch.Tensor, kind: str) -> Any:
        return {"loss": x.sum()} if kind == "loss" else x if kind == "bare" else {kind: x}


@pytest.mark.parametrize(
    ("kinds", "mean"),
    [("loss loss logits", "12"), ("logits loss logits", "2"), ("logits hidden", "2"), ("bare bare", "2.5")],
)
def test_outputs_of_several_kinds_have_no_mean_together(kinds: str, mean: str) -> None:
    model = _LossOrLogits()
    with sl.trace(model, stats=True) as t:
        for number, kind in enumerate(kinds.split()):
            model(torch.full((2, 3), 2.0 + (number == 1 and kind != "loss")), kind)
    table = str(t.summary(width=None))
    row = next(line for line in table.splitlines() if line.startswith("_LossOrLogits"))
    assert row.partition(" ± ")[0].split()[-1] == mean
    assert ("calls like the first" in table) == (kinds != "bare bare")


def test_an_event_without_numbers_is_written_as_before() -> None:
    from sightline.data.trace_data import TensorMeta
    from sightline.views.log_blocks import BlockStyle, LogOp

    x = TensorMeta((2,), None, "float32", "cpu")
    event = LogOp("torch.relu", "function", "f", 0, ONE_TENSOR, (x,), ONE_TENSOR, (x,))
    assert [made.text for made in BlockStyle().op(event)][1:] == [
        "├─ Input: Tensor [2] @ cpu",
        "└─ Output: Tensor [2] @ cpu",
    ]


def test_numbers_that_no_tensor_has_are_no_traceback() -> None:
    odd = [
        ValueStatistics(-1.0, 1.0, 1e308, 1e308, 0, 0, size=4),
        ValueStatistics(-1e-300, 1e-300, 1e308, -1e308, 1 << 62, 1 << 62, size=4),
        ValueStatistics(0.0, 0.0, math.inf, math.nan, -5, -7, size=1 << 80),
    ]
    for parts in (odd, odd[:2], odd[1:]):
        assert _pooled(parts).nans == sum(part.nans for part in parts)
