from __future__ import annotations

import pytest
import torch

import sightline as sl
from sightline.api import Trace
from sightline.errors import NothingMatched, UsageError
from sightline.views.call_order import call_order
from tests.builders import TraceBuilder, make_trace
from tests.conftest import Golden
from tests.views.odd_traces import crashed, hostile, nested


def names(trace: Trace, **options: object) -> list[str]:
    return [text.split()[0] for text in str(call_order(trace.index, **options)).splitlines()]  # type: ignore[arg-type]


def test_entry_order(golden: Golden) -> None:
    golden("call_order_entry", str(call_order(make_trace().index)))


def test_completion_order_has_children_before_their_parent(golden: Golden) -> None:
    golden("call_order_completion", str(call_order(make_trace().index, order="completion")))


def test_both_orders_hold_the_same_calls() -> None:
    trace = nested()
    assert sorted(names(trace, fold=False)) == sorted(names(trace, fold=False, order="completion"))
    calls = sorted(trace.module_calls, key=lambda call: call.order)
    assert names(trace, fold=False, order="completion") == [call.module.label for call in calls]


def test_repeats_that_follow_each_other_are_one_line(golden: Golden) -> None:
    golden("call_order_repeats", str(call_order(nested().index)))


def test_calls_that_did_something_else_inside_are_not_taken_together() -> None:
    b = TraceBuilder()
    x = b.value(2)
    for inner in ("a", "a", "b"):
        with b.call("", x), b.call(inner, x):
            pass
    assert str(call_order(b.build().index)).splitlines() == [
        "Net #0…#1 ×2", "  a (A) #0", "Net #2", "  b (B) #0",
    ]  # fmt: skip


def test_filters() -> None:
    assert names(make_trace(), module="blocks.1") == [
        "blocks.1", "blocks.1.norm", "blocks.1.attn.qkv", "blocks.1.fc",
    ]  # fmt: skip
    assert names(make_trace(), depth=1) == ["Net", "embed"]
    assert names(make_trace(), tail=1) == ["blocks.1.fc"]
    assert names(make_trace(), order="completion", tail=1) == ["Net"]


def test_wrong_calls_get_one_sentence() -> None:
    with pytest.raises(UsageError, match="order='up' is no order of calls; choose 'entry' or 'completion'"):
        call_order(make_trace().index, order="up")
    with pytest.raises(NothingMatched, match="module='nope' matches no module"):
        call_order(make_trace().index, module="nope")


def test_calls_that_raised_are_marked() -> None:
    assert str(call_order(crashed().index)).splitlines()[-1] == "  fc2 (Linear) #0 raised"


def test_a_call_in_another_phase_says_so() -> None:
    b = TraceBuilder()
    x = b.value(2)
    for phase in ("forward", "recompute"):
        with b.phase(phase), b.call("fc", x):
            pass
    assert str(call_order(b.build().index)).splitlines() == ["fc (Fc) #0", "fc (Fc) #1 recompute"]


def test_a_trace_without_modules_says_so() -> None:
    assert str(call_order(TraceBuilder().build().index)) == "This trace has no module calls."


def test_hostile_names_stay_text() -> None:
    view = call_order(hostile().index)
    assert "\x1b" not in str(view)
    assert "<script>" not in view._repr_html_()


def test_training_and_evaluation_are_not_taken_together() -> None:
    model = torch.nn.Linear(2, 1)
    with sl.trace(model) as t:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))
            model(torch.ones(1, 2))
    assert str(t.call_order()).splitlines() == ["Linear #0…#2 ×3", "Linear #3…#4 ×2 without gradients"]
    with sl.trace(model) as t, torch.no_grad():
        model(torch.ones(1, 2))
    assert str(t.call_order()).splitlines() == ["Linear #0", "# all calls are without gradients"]
    assert "gradients" not in str(make_trace().call_order())
