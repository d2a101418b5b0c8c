"""How a lineage is written: one line a step at 100 columns, everything said once."""

from __future__ import annotations

import re

import torch

import sightline as sl
from sightline.views.lineage import lineage
from sightline.views.rendering import width
from tests.builders import TraceBuilder, make_trace
from tests.conftest import Golden
from tests.measured import NANS, measured
from tests.recording.nets import Net
from tests.views.odd_traces import crashed, hostile, nested


def test_a_transformer(golden: Golden) -> None:
    golden("lineage", str(lineage(make_trace().index, "Net")))


def test_a_gradient_names_the_forward_lines(golden: Golden) -> None:
    t = make_trace()
    gradient = t.ops.where(name="embedding_dense_backward")[0]
    golden("lineage_gradient", str(lineage(t.index, gradient)))


def test_aten_ops_with_numbers_and_a_short_depth(golden: Golden) -> None:
    t = make_trace(backward=False)
    numbers = {"min": -3.14, "max": 2.5, "mean": 0.01, "std": 1.02}
    t = measured(t, {value.id: NANS if value.shape == () else numbers for value in t.values})
    golden("lineage_aten", str(lineage(t.index, t.values[-1], level="aten", depth=4)))


def test_at_most_a_screen_and_never_wider(golden: Golden) -> None:
    for trace in (make_trace(12), nested(), crashed(), hostile(), recorded()):
        for value in trace.values:
            lines = str(lineage(trace.index, value)).splitlines()
            assert len(lines) <= 60
            assert max(width(line) for line in lines) <= 100
    assert len(str(lineage(make_trace(12).index, "Net")).splitlines()) <= 42


def recorded() -> sl.Trace:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with sl.trace(model) as t:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return t


class Frames(torch.nn.Module):
    """Cuts a wave into frames, in low precision, and takes the logarithm of what may be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 5)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        frames = wave.unfold(1, 16, 8)
        low = torch.relu(self.project(frames).to(torch.bfloat16))
        return (low - 1000).log() + 1


def test_it_begins_with_where_a_nan_a_dtype_and_a_size_come_from() -> None:
    torch.manual_seed(0)
    model = Frames()
    with sl.trace(model, stats=True) as t:
        out = model(torch.randn(2, 128))
    assert out.shape == (2, 15, 5)
    nan, dtype, size, *steps = str(lineage(t.index, t.values[-1])).splitlines()
    line = Frames.forward.__code__.co_firstlineno
    place = "test_lineage.py"
    assert re.fullmatch(rf"NaN first appears at {place}:{line + 3}, Tensor.log of bf16.*: \$\d+ ← \$\d+", nan)
    assert dtype.startswith(f"bf16 first appears at {place}:{line + 2}, Tensor.to of f32[2, 15, 5]: $")
    assert size.startswith(f"size 15 first appears at {place}:{line + 1}, Tensor.unfold of f32[2, 128]: $")
    assert steps[0].startswith(f"${t.values[-1].id} ")


def test_the_line_number_is_never_cut() -> None:
    for trace in (make_trace(), recorded(), nested()):
        for value in trace.values:
            for row in str(lineage(trace.index, value)).splitlines():
                assert not re.search(r"\.py(:\d*)?…", row), row


def test_an_update_says_what_it_replaced() -> None:
    text = str(lineage(recorded().index, "fc1.weight"))
    assert "in place on fc1.weight" in text
    assert "F.linear backward" in text
    assert "saved " in text


def test_memory_shared_is_said() -> None:
    with sl.trace() as t:
        x = torch.ones(4)
        x[1:].add_(1)
        x.sum()
    text = str(lineage(t.index, t.values.where(shape=())[0]))
    assert "in place on $0" in text
    assert "view of $0" in text


def test_a_value_used_twice_is_written_once_and_referred_to() -> None:
    b = TraceBuilder()
    x = b.op("exp", b.value(2), out=(2,))
    y = b.op("add.Tensor", b.op("neg", x, out=(2,)), x, out=(2,))
    assert str(lineage(b.build().index, int(y))).splitlines() == [
        "$3 f32[2]    add.Tensor",
        "├ $2 f32[2]  neg",
        "│      ↓ $1",
        "$1 f32[2]    exp",
        "     input $0 f32[2]",
    ]


def test_what_is_further_back_is_counted() -> None:
    b = TraceBuilder()
    x = b.value(2)
    for _ in range(50):
        x = b.op("exp", x, out=(2,))
    lines = str(lineage(b.build().index, int(x))).splitlines()
    assert len(lines) == 9
    assert lines[-1].strip() == "… 42 ops before $42"
    assert str(lineage(b.build().index, int(x), depth=49)).splitlines()[-1].strip() == "… 1 op before $1"


def test_many_inputs_are_not_all_named() -> None:
    b = TraceBuilder()
    many = [b.op("exp", b.value(2), out=(2,)) for _ in range(30)] + [b.value(2) for _ in range(30)]
    y = b.op("cat", many, out=(120,))
    lines = str(lineage(b.build().index, int(y), depth=1)).splitlines()
    assert lines[1].strip().startswith("inputs $60 f32[2], $61 f32[2], $62 f32[2], $63 f32[2], 26 more;")
    assert lines[-1].endswith("… 30 ops before $1, $3, $5, $7 and 26 more")


def test_what_nothing_made_is_one_line() -> None:
    t = make_trace()
    assert str(lineage(t.index, "embed.weight")) == "$0 f32[16, 4]  parameter embed.weight"
    tokens = t.values.where(kind="input")[0]
    assert str(lineage(t.index, tokens)) == f"${tokens.id} i64[2, 8]  input"


def test_the_view_is_a_graph_too() -> None:
    view = lineage(make_trace().index, "blocks.0")
    assert len(view.nodes) == len(view.to_networkx())
    assert view.edges[0]["target"] == view.lineage.value
    assert repr(view) == str(view)


def test_module_calls_stand_in_where_no_ops_were_recorded() -> None:
    model = Net()
    with sl.trace(model, ops="none") as t:
        model(torch.ones(2, 4))
    assert [line.split()[:4] for line in str(lineage(t.index, "fc1")).splitlines()] == [
        ["$5", "f32[2,", "8]", "fc1"],
        ["input", "$4", "f32[2,", "4]"],
    ]


def test_hostile_names_stay_text() -> None:
    t = hostile()
    for value in t.values:
        view = lineage(t.index, value)
        assert "\x1b" not in str(view)
        assert "\u202e" not in str(view)
        assert "<script>" not in view._repr_html_()


def test_a_variable_of_a_script_is_told_with_its_line() -> None:
    with sl.trace() as t:
        total = torch.ones(2).exp()
    head, first, *_ = str(t.lineage("total")).splitlines()
    assert re.fullmatch(r"total was last set at \S+\.py:\d+: total = torch\.ones\(2\)\.exp\(\)", head)
    assert "Tensor.exp" in first
    assert str(t.lineage(f"${t.values[-1].id}")) == str(t.lineage("total")).removeprefix(f"{head}\n")
    assert total.shape == (2,)
