from __future__ import annotations

import io

from sightline.views.outline import width
from sightline.views.overview import overview
from tests.builders import TraceBuilder, make_trace
from tests.conftest import Golden
from tests.views.odd_traces import crashed, hostile, nested


def test_a_small_transformer(golden: Golden) -> None:
    golden("overview_transformer", str(overview(make_trace())))


def test_a_run_that_crashed(golden: Golden) -> None:
    golden("overview_crashed", str(overview(crashed())))


def test_it_is_one_screen() -> None:
    for trace in (make_trace(48), nested(), crashed(), hostile()):
        lines = str(overview(trace)).splitlines()
        assert len(lines) <= 40
        assert max(map(width, lines)) <= 100


def test_print_and_str_of_a_trace_are_the_overview() -> None:
    trace = make_trace()
    assert str(trace) == str(overview(trace))
    assert trace._repr_html_() == overview(trace)._repr_html_()


def test_trouble_is_said_in_red() -> None:
    b = TraceBuilder(faults=["KeyError: 3 in after_op"], fault_count=12, exception="ValueError: no")
    b.op("ones", out=(2,))
    view = overview(b.build())
    assert "the recorder failed 12 times" in str(view)
    assert "KeyError: 3 in after_op" in str(view)
    out = io.StringIO()
    view.print(color=True, file=out)
    assert "\x1b[1;31mValueError: no\x1b[0m" in out.getvalue()


def test_external_values_are_counted() -> None:
    b = TraceBuilder()
    b.op("relu", b.value(2, kind="external"), out=(2,))
    assert "1 external" in str(overview(b.build()))
    assert "external" not in str(overview(make_trace()))


def test_repeated_blocks_are_one_row() -> None:
    assert "0 … 47 (Block ×48)" in str(overview(make_trace(48)))


def test_an_empty_trace() -> None:
    assert "modules   0 called, 0 calls" in str(overview(TraceBuilder().build()))


def test_hostile_names_stay_text() -> None:
    view = overview(hostile())
    assert "\x1b" not in str(view)
    assert "<script>" not in view._repr_html_()
