"""What is said about a NaN: who made it, what else did, and how far it went."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl
from sightline.views.nonfinite import nonfinite
from sightline.views.rendering import width
from tests.builders import TraceBuilder, make_trace
from tests.conftest import Golden
from tests.measured import FINE, INFS, NANS, measured
from tests.views.odd_traces import hostile


def poisoned(*, backward: bool = True) -> sl.Trace:
    """The small transformer with a NaN out of the softmax of its second block."""
    t = make_trace(backward=backward)
    softmax = t.ops.where(name="_softmax")[-1]
    floats = t.values.where(lambda value: value.dtype == "float32" and value.producer is not None)
    readings = {value.id: NANS if (value.producer.id if value.producer else -1) >= softmax.id else FINE
                for value in floats}  # fmt: skip
    return measured(t, readings)


def test_the_first_in_full(golden: Golden) -> None:
    golden("nonfinite", str(nonfinite(poisoned(backward=False))))


def test_it_reached_the_loss() -> None:
    b = TraceBuilder()
    x = b.op("log", b.value(4), out=(4,))
    loss = b.op("sum", x, out=())
    with b.phase("backward"), b.api("Tensor.backward", loss, flavour="method"):
        g = b.op("ones_like", loss, out=())
        n = b.op("mul.Tensor", g, x, out=(4,), forward=x)
    t = measured(b.build(), {x: NANS, loss: NANS, g: FINE, n: NANS})
    assert str(nonfinite(t)).splitlines()[-1] == "then in 2 of 3 later values, up to the loss"


def test_later_ones_that_made_their_own() -> None:
    b = TraceBuilder()
    readings: dict[int, dict[str, int]] = {}
    for number in range(9):
        with b.call(f"blocks.{number % 8}", b.value(4)):
            readings[b.op("log", b.value(4), out=(4,))] = NANS
    readings[0] = FINE
    lines = str(nonfinite(measured(b.build(), readings))).splitlines()
    assert lines[0] == "log made 3 NaN of 4 in f32[4] (blocks.0)"
    at = lines.index("8 more ops made one later, not out of this one:")
    assert lines[at + 1] == "  log made 3 NaN of 4 in f32[4] (blocks.1)"
    assert lines[at + 7] == "  … 2 more"
    assert lines[-1] == "it went no further: none of the 8 values measured later has it from there"


def test_alike_ones_are_one_line() -> None:
    b = TraceBuilder()
    readings = {b.op("log", b.value(4), out=(4,)): INFS for _ in range(5)}
    assert "  log made 2 -Inf of 4 in f32[4] ×4" in str(nonfinite(measured(b.build(), readings))).splitlines()


def test_nothing_found_and_nothing_measured() -> None:
    t = make_trace()
    assert str(nonfinite(t)) == 'Nothing was measured: record with stats=True or check="nonfinite".'
    assert str(nonfinite(measured(t, {1: FINE, 2: FINE}))) == "no NaN or Inf in 2 measured values"


def test_infinities_on_purpose_are_mentioned() -> None:
    b = TraceBuilder()
    y = b.op("masked_fill.Scalar", b.value(4), -float("inf"), out=(4,))
    assert str(nonfinite(measured(b.build(), {y: INFS}))) == (
        "no NaN or Inf in 1 measured value but 1 given, meant or allowed, the first from masked_fill.Scalar"
    )


def test_what_came_in_with_a_nan() -> None:
    b = TraceBuilder()
    x = b.value(4)
    y = b.op("exp", x, out=(4,))
    assert str(nonfinite(measured(b.build(), {x: NANS, y: NANS}))).splitlines() == [
        "input $0 came with 3 NaN of 4 in f32[4]",
        "no op made a NaN or Inf in 2 measured values",
    ]


def test_allow_takes_one_glob_or_several() -> None:
    t = poisoned()
    for allow in ("_softmax", ["nothing", "*softmax"], "blocks.1"):
        assert str(nonfinite(t, allow=allow)).startswith("no NaN or Inf in")


def test_it_keeps_to_100_columns() -> None:
    assert max(width(line) for line in str(nonfinite(poisoned())).splitlines()) <= 100


def test_hostile_names_stay_text() -> None:
    t = hostile()
    view = nonfinite(measured(t, {value.id: NANS for value in t.values if value.producer is not None}))
    assert "made 3 NaN" in str(view)
    assert "\x1b" not in str(view)
    assert "<script>" not in view._repr_html_()


# -- recorded ------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A softmax over scores that are masked, for one row completely where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.fc(x)
        scores = (h @ h.T).masked_fill(mask, -float("inf"))
        mixed: Tensor = F.softmax(scores, dim=-1) @ h
        return mixed


def attended(mask: Tensor, ops: Any = "both") -> sl.Trace:
    model = Attention()
    with sl.trace(model, ops=ops, stats=True) as t:
        model(torch.ones(3, 4), mask).sum().backward()
    return t


def test_a_mask_is_no_fault_unless_it_covers_a_row() -> None:
    causal = torch.ones(3, 3).triu(1).bool()
    assert str(nonfinite(attended(causal))).startswith("no NaN or Inf in")
    causal[1] = True
    for ops, name in (("both", "_softmax"), ("aten", "_softmax"), ("api", "F.softmax")):
        first = str(nonfinite(attended(causal, ops))).splitlines()[0]
        assert first.startswith(f"{name} made 3 NaN of 9 in f32[3, 3], ")
        assert first.endswith("in Attention.forward (Attention)")


def test_a_gradient_that_is_infinite() -> None:
    x = torch.zeros(3, requires_grad=True)
    with sl.trace(stats=True) as t:
        torch.sqrt(x).sum().backward()
    first = str(nonfinite(t)).splitlines()[0]
    assert first.startswith("div.Tensor (backward of sqrt) made 3 Inf of 3 in f32[3], ")


def test_module_calls_alone_name_the_module() -> None:
    t = attended(torch.ones(3, 3).bool(), "none")
    assert str(nonfinite(t)) == (
        "Attention returned 12 NaN of 12 in f32[3, 4], out of inputs without; "
        'ops="both" records the op that made it'
    )


def test_a_check_alone_keeps_only_what_is_not_finite() -> None:
    with sl.trace(check=sl.Check(on="report")) as t:
        h = torch.log(torch.tensor([1.0, -1.0])) * torch.ones(2)
        h.sum()
    lines = str(nonfinite(t)).splitlines()
    assert lines[0].startswith("log made 1 NaN of 2 in f32[2], ")
    assert "not measured" not in lines[1]
    assert lines[4].strip().startswith("0, 1 NaN; constant ")
    assert lines[-1].startswith("then in 2 later values, up to ")


def test_an_infinity_that_becomes_a_nan_is_told_as_one_story() -> None:
    with sl.trace(stats=True) as t:
        large = torch.full((2,), 300.0, dtype=torch.float16) * 300
        (large - large).sum()
    text = str(nonfinite(t))
    assert text.startswith("mul.Tensor made 2 Inf of 2 in f16[2], ")
    assert "  float16 ends at 65,504: compute this in float32, or use bfloat16" in text.splitlines()
    assert "the first NaN that came of it:\n  sub.Tensor made 2 NaN of 2 in f16[2], " in text
    assert "not out of this one" not in text


def test_a_nan_that_was_hidden_since_is_not_what_a_later_one_came_of() -> None:
    with sl.trace(stats=True) as t:
        logs = torch.tensor([-1.0, 1.0]).log()
        hidden = torch.where(logs.isnan(), torch.zeros(2), logs)
        (hidden - 1).sqrt()
    text = str(nonfinite(t))
    assert text.startswith("log made 1 NaN of 2")
    assert "one more op made one later, not out of this one:\n  sqrt made 2 NaN of 2 in f32[2], " in text
    assert "came of it" not in text
