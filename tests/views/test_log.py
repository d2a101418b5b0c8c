from __future__ import annotations

import io

import pytest

from sightline.api import Trace
from sightline.data.forms import ONE_TENSOR, SLOT, Form
from sightline.data.trace_data import TensorMeta
from sightline.errors import NothingMatched
from sightline.views.live import LiveLog
from sightline.views.log import log
from sightline.views.log_blocks import RAISED, BlockStyle, LogModule, LogOp, hyperparameters
from tests.builders import TraceBuilder, make_trace
from tests.conftest import Golden
from tests.views.odd_traces import crashed, hostile, nested


def attention() -> Trace:
    """The example of the tool this log comes from."""
    b = TraceBuilder()
    x = q = b.value(10, 20, 6)
    b.module("", "MHA")
    with b.at("mha.py", 40, "<module>"), b.call("", x):
        for name in ("query_weights", "key_weights", "value_weights"):
            b.module(name, "Linear", extra="in_features=6, out_features=6")
            with b.call(name, x):
                q = b.op("addmm", x, out=(10, 20, 6))
        with b.at("mha.py", 12, "MHA.split_heads"):
            with b.api("Tensor.view", q, 10, 20, 3, 2, flavour="method"):
                v = b.op("view", q, [10, 20, 3, 2], out=(10, 20, 3, 2))
        with b.at("mha.py", 20, "MHA.calculate_attention"):
            p, v = b.value(10, 3, 20, 20), b.value(10, 3, 20, 2)
            with b.api("@", p, v, flavour="operator"):
                b.op("bmm", p, v, out=(10, 3, 20, 2))
    return b.build()


DOCUMENTED = """\
  ● TRACING MHA STARTED
  │
  ● query_weights (Linear) (in_features: 6, out_features: 6)
  ├─ Input: Tensor [10, 20, 6] @ cpu
  └─ Output: Tensor [10, 20, 6] @ cpu
  │
  ● key_weights (Linear) (in_features: 6, out_features: 6)
  ├─ Input: Tensor [10, 20, 6] @ cpu
  └─ Output: Tensor [10, 20, 6] @ cpu
  │
  ● value_weights (Linear) (in_features: 6, out_features: 6)
  ├─ Input: Tensor [10, 20, 6] @ cpu
  └─ Output: Tensor [10, 20, 6] @ cpu
  │
  ● Tensor.view(10, 20, 3, 2) @ [MHA.split_heads]
  ├─ Input: Tensor [10, 20, 6] @ cpu
  └─ Output: Tensor [10, 20, 3, 2] @ cpu
  │
  ● Tensor.@ @ [MHA.calculate_attention]
  ├─ Left: Tensor [10, 3, 20, 20] @ cpu
  ├─ Right: Tensor [10, 3, 20, 2] @ cpu
  └─ Output: Tensor [10, 3, 20, 2] @ cpu
  │
  ● TRACING MHA COMPLETE"""


def test_the_documented_form() -> None:
    assert (
        str(log(attention().index, title="MHA", root=False, margin="  ", fold=False, all=True)) == DOCUMENTED
    )


def test_containers_hold_what_ran_inside_them(golden: Golden) -> None:
    golden("log_transformer", str(log(make_trace(1).index, fold=False, all=True)))


def test_nested_inputs_and_outputs_by_name(golden: Golden) -> None:
    golden("log_nested", str(log(nested().index, tail=7, fold=False, all=True)))


def test_a_run_that_crashed(golden: Golden) -> None:
    golden("log_crashed", str(log(crashed().index, fold=False, all=True)))


def test_every_function_has_its_block() -> None:
    text = str(log(nested().index, op="torch.cat", tail=1, fold=False, all=True))
    assert "● torch.cat(dim=-1)" in text
    assert "├─ Input 0: Tensor [1, 7, 8] @ cpu" in text
    assert "├─ Input 1: Tensor [1, 7, 8] @ cpu" in text


def test_a_constant_side_of_an_operator() -> None:
    text = str(log(nested().index, op="[*]", tail=1, fold=False, all=True))
    assert "Left: Tensor [1, 7, 16] @ cpu" in text
    assert "Right: 0.5" in text


def test_what_runs_inside_a_leaf_is_shown_on_request() -> None:
    assert "F.linear" not in str(log(make_trace().index, fold=False, all=True))
    text = str(log(make_trace().index, module="blocks.0.fc", inside=True, fold=False, all=True))
    assert "│  ● F.linear() @ [Block.forward]" in text
    assert "mm(" not in text  # the aten op of an API call is inside its block


def test_backward_ops_come_when_asked_for_and_say_their_module() -> None:
    assert "gelu_backward" not in str(log(make_trace().index, fold=False, all=True))
    text = str(log(make_trace().index, phase="backward", op="gelu_backward", tail=1, fold=False, all=True))
    assert text.startswith("● gelu_backward() @ [Block.forward] (backward of blocks.0)")


def test_depth_makes_a_block_of_a_container() -> None:
    text = str(log(make_trace().index, depth=2, fold=False, all=True))
    assert "blocks.0 (Block)" in text
    assert "blocks.0.norm" not in text
    assert "softmax" not in text


def test_tail_keeps_the_containers_around() -> None:
    lines = str(log(make_trace().index, tail=2, fold=False, all=True)).splitlines()
    assert [line.strip("│ ") for line in lines if "●" in line] == [
        "● Net", "● blocks.1 (Block)", "● Tensor.+ @ [Block.forward]", "● Tensor.sum() @ [train]",
    ]  # fmt: skip


def test_an_aten_trace_shows_aten_ops() -> None:
    b = TraceBuilder(ops="aten")
    x = b.value(2)
    with b.call("", x), b.at("net.py", 3, "run.<locals>.Net.forward"):
        b.op("mul.Tensor", x, 2, out=(2,))
    assert "● mul.Tensor(2) @ [Net.forward]" in str(log(b.build().index, fold=False, all=True))


def test_another_notation() -> None:
    assert "Input: i64[2, 8]" in str(log(make_trace().index, tensor=str, fold=False, all=True))


def test_a_filter_that_matches_nothing() -> None:
    with pytest.raises(NothingMatched, match="op='conv' matches no op"):
        log(make_trace().index, op="conv", fold=False, all=True)
    with pytest.raises(NothingMatched, match="module='nope' matches no module"):
        log(make_trace().index, module="nope", fold=False, all=True)


def test_hostile_names_stay_text() -> None:
    view = log(hostile().index, inside=True, fold=False, all=True)
    assert "\x1b" not in str(view)
    assert "<script>" not in view._repr_html_()
    assert "● [bold]x[/bold]<script>" in str(view)


def test_settings_with_brackets_and_lines() -> None:
    assert hyperparameters("(8,), eps=1e-05,\n  affine=True") == ["(8,)", "eps: 1e-05", "affine: True"]


X = TensorMeta((2, 6), None, "float32", "cpu")


def events(live: LiveLog, state: str = "") -> None:
    """A container with a leaf, an op inside the leaf, and an op outside."""
    net = LogModule("Net", "Net", "", 0, False, ONE_TENSOR, [X], outputs=[X], state=state, root=True)
    fc = LogModule("fc", "Linear", "in_features=6", 1, True, ONE_TENSOR, [X], outputs=[X], state=state)
    op = LogOp("Tensor.view", "method", "Net.forward", 1, Form((SLOT, 3, 4)), [X], outputs=[X])
    live.start()
    live.enter(net)
    live.op(op)
    live.enter(fc)
    live.op(op)
    live.exit(fc)
    live.exit(net)
    live.stop()


def test_live_and_finished_logs_look_the_same() -> None:
    b = TraceBuilder()
    x = b.value(2, 6)
    b.module("fc", "Linear", extra="in_features=6")
    with b.at("net.py", 1, "Net.forward"), b.call("", x):
        with b.api("Tensor.view", x, 3, 4, flavour="method"):
            y = b.op("view", x, [3, 4], out=(2, 6))
        with b.call("fc", y):
            b.op("addmm", y, out=(2, 6))
    out = io.StringIO()
    events(LiveLog(file=out))
    assert out.getvalue().rstrip("\n") == str(log(b.build().index, fold=False, all=True))


def test_a_live_log_without_its_root(golden: Golden) -> None:
    out = io.StringIO()
    events(LiveLog(title="Net", root=False, style=BlockStyle(margin="  "), file=out))
    golden("log_live", out.getvalue())


def test_a_live_log_is_flushed_and_says_what_raised() -> None:
    class Stream(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    out = Stream()
    events(LiveLog(file=out), state=RAISED)
    assert out.flushed == out.getvalue()
    assert "└─ Raised: it ended in an exception" in out.flushed


def test_a_long_list_of_tensors_that_look_alike_is_one_line() -> None:
    b = TraceBuilder()
    x, y = b.value(8), b.value(4)
    b.op("torch.stack", [*[x] * 64, y], out=(64, 8), level="api")
    assert str(log(b.build().index, fold=False, all=True)).splitlines() == [
        "● torch.stack()",
        "├─ Input 0…63: Tensor [8] @ cpu ×64",
        "├─ Input 64: Tensor [4] @ cpu",
        "└─ Output: Tensor [64, 8] @ cpu",
    ]
