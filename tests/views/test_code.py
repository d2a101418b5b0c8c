"""Ops under their source lines: the finished view, its folds, and the same lines live."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.api import Trace
from sightline.data.forms import SLOT, Form
from sightline.data.live_events import SourceFrame
from sightline.errors import NothingMatched, UsageError
from sightline.views.code import code, code_lines
from sightline.views.live import CodeOp, LiveCode
from sightline.views.rendering import Line, View
from tests.builders import TORCH, TraceBuilder, make_trace
from tests.conftest import Golden
from tests.views import measured

HOSTILE = "\x1b[31m[bold]evil[/bold]<script>alert(1)</script>\r\n\u202e"


def test_a_transformer_forward_backward_and_step(golden: Golden) -> None:
    golden("code", str(code(make_trace().index, fold=False)))


def test_api_calls_with_names(golden: Golden) -> None:
    golden(
        "code_api_names", str(code(make_trace(1, backward=False).index, level="api", names=True, fold=False))
    )


def test_folded_layers(golden: Golden) -> None:
    golden("code_folded", str(code(make_trace(24).index, fold=True)))


def test_folded_training_steps(golden: Golden) -> None:
    golden("code_folded_steps", str(code(training(3).index, fold=True)))


def test_the_line_in_the_loop_goes_inside_the_bracket() -> None:
    b = TraceBuilder()
    b.source("n.py", "for layer in layers:\n    x = layer(x)\ndef __call__(self, x):\n    return self.f(x)\n")
    x = b.value(2)
    b.op("neg", x, out=(2,), frame=b.frame("n.py", 2, "<module>"))
    for _ in range(3):
        with b.at("n.py", 2, "<module>"), b.call("a", x), b.at("n.py", 4, "__call__"), b.call("a.f", x):
            for name in ("mm", "relu"):
                with b.at("n.py", 9, name):
                    b.op(name, x, out=(2,))
    b.op("neg", x, out=(2,))
    lines = str(code(b.build().index, fold=True)).splitlines()
    assert lines[2:6] == [
        "│ ⬇️",
        "│ ┌ ×3",
        "│ ┊ return self.f(x)  # n.py:4 in __call__:",
        "│ ┊ │ ⬇️",
    ]
    lines = str(code(b.build().index, fold=True, op="[mr]*")).splitlines()
    assert lines[:3] == [
        "┌ ×3  for layer in layers:",
        "┊ x = layer(x)  # n.py:2 in <module>:",
        "┊ │ ⬇️",
    ]


def training(steps: int) -> Trace:
    b = TraceBuilder()
    b.source(
        "train.py", "for step in range(3):\n    loss = net(x).sum()\n    loss.backward()\n    opt.step()\n"
    )
    b.source(
        "net.py",
        "def forward(self, x):\n    for layer in self.layers:\n        x = layer(x).relu()\n    return x\n",
    )
    x = b.value(2, 4)
    for _ in range(steps):
        made = []
        with b.at("train.py", 2, "<module>", "net(x)"):
            for _layer in range(4):
                with b.at("net.py", 3, "forward", "layer(x)"):
                    h = b.op("mm", x, x, out=(2, 4))
                with b.at("net.py", 3, "forward", "layer(x).relu()"):
                    made.append(b.op("relu", h, out=(2, 4)))
        with b.at("train.py", 2, "<module>", "net(x).sum()"):
            b.op("sum", made[-1], out=())
        with b.at("train.py", 3, "<module>", "loss.backward()"), b.phase("backward"):
            for y in reversed(made):
                b.op("threshold_backward", y, out=(2, 4), forward=y)
        with b.at("train.py", 4, "<module>", "opt.step()"), b.phase("optimizer"):
            b.op("add_.Tensor", x, inplace=x)
    return b.build()


def test_consecutive_ops_on_one_line_share_it() -> None:
    b = TraceBuilder()
    b.source("n.py", "y = x.relu() + 1\n")
    x = b.value(2)
    with b.at("n.py", 1, "<module>", "x.relu()"):
        h = b.op("relu", x, out=(2,))
    with b.at("n.py", 1, "<module>", "x.relu() + 1"):
        b.op("add.Tensor", h, 1, out=(2,))
    view = code(b.build().index, fold=False)
    assert str(view).splitlines() == [
        "y = x.relu() + 1  # n.py:1 in <module>:",
        "│ # relu(f32[2]) -> f32[2];",
        "│ # add.Tensor(f32[2], 1) -> f32[2];",
    ]
    assert marked(view) == ["x.relu() + 1"]


def marked(view: View) -> list[str]:
    lines = [block for block in view.blocks if isinstance(block, Line)]
    return [span.text for block in lines for span in block.spans if span.style == "mark"]


@pytest.mark.parametrize(
    ("text", "expr", "wanted"),
    [
        ("    y = f(x)\n", "f(x)", ["f(x)"]),
        ("\tä = f('ö', x) + g(x)\n", "g(x)", ["g(x)"]),
        ("y = f(\n    x)\n", (4, 6), ["f("]),
        ("y = f(x)\n", (50, 60), []),
        ("y = f(x)\n", None, []),
    ],
)
def test_the_expression_is_marked_to_the_column(text: str, expr: Any, wanted: list[str]) -> None:
    b = TraceBuilder()
    b.source("m.py", text)
    with b.at("m.py", 1, "f", expr, end_line=text.count("\n")):
        b.op("relu", b.value(2), out=(2,))
    assert marked(code(b.build().index, fold=False)) == wanted


def test_torch_frames_are_hidden_unless_asked_for() -> None:
    t = make_trace(1)
    assert "Linear.forward" not in str(code(t.index, fold=False))
    assert "# site-packages/torch/nn/modules/linear.py:134 in Linear.forward:" in str(
        code(t.index, torch_frames=True)
    )


def test_what_is_outside_the_users_code_is_left_out() -> None:
    b = TraceBuilder()
    b.source("mine.py", "y = lib.f(x)\n")
    with b.at("/x/lib/python3.11/runpy.py", 5), b.at("/x/site-packages/pytest/a.py", 3):
        with b.at("mine.py", 1, "<module>"), b.at("/x/site-packages/lib/f.py", 9, "f"):
            b.op("relu", b.value(2), out=(2,))
    with b.at("/x/site-packages/other/main.py", 4, "main"):
        b.op("neg", b.value(2), out=(2,))
    assert str(code(b.build().index, fold=False)).splitlines() == [
        "y = lib.f(x)  # mine.py:1 in <module>:",
        "│ ⬇️",
        "│ # site-packages/lib/f.py:9 in f:",
        "│ │ # relu(f32[2]) -> f32[2];",
        "# site-packages/other/main.py:4 in main:",
        "│ # neg(f32[2]) -> f32[2];",
    ]


def test_a_line_that_enters_another_call_is_written_again() -> None:
    assert str(code(make_trace(3, backward=False).index, fold=False)).count("x = block(x)  # net.py:22") == 3


def test_an_op_under_a_line_that_was_gone_into_already() -> None:
    b = TraceBuilder()
    b.source("n.py", "y = f(x) + 1\ndef f(x):\n    return x.relu()\n")
    x = b.value(2)
    with b.at("n.py", 1, "<module>"):
        b.op("neg", x, out=(2,))
        with b.at("n.py", 3, "f"):
            b.op("relu", x, out=(2,))
        b.op("add.Tensor", x, 1, out=(2,))
    assert str(code(b.build().index, fold=False)).splitlines() == [
        "y = f(x) + 1  # n.py:1 in <module>:",
        "│ # neg(f32[2]) -> f32[2];",
        "│ ⬇️",
        "│ return x.relu()  # n.py:3 in f:",
        "│ │ # relu(f32[2]) -> f32[2];",
        "│ # add.Tensor(f32[2], 1) -> f32[2];",
    ]


def test_no_source_no_result_and_an_exception() -> None:
    b = TraceBuilder()
    x = b.value(2)
    b.op("manual_seed", 3)
    with b.at("/gone/net.py", 7, "forward"):
        b.op("mm", x, x, raised=True)
    with b.at(TORCH, 3, "worker"):
        b.op("relu", x, out=(2,))
    assert str(code(b.build().index, fold=False)).splitlines() == [
        "(no Python source)",
        "│ # manual_seed(3);",
        "# net.py:7 in forward:",
        "│ # mm(f32[2], f32[2]) !! raised",
        "(no Python source)",
        "│ # relu(f32[2]) -> f32[2];",
    ]


def test_recompute_has_its_header_and_mark() -> None:
    b = TraceBuilder()
    with b.phase("recompute"):
        b.op("relu", b.value(2), out=(2,))
    header, _, op = str(code(b.build().index, fold=False)).splitlines()
    assert header.startswith("── recompute ─")
    assert op == "│ # ↺ relu(f32[2]) -> f32[2];"


def test_levels_and_filters() -> None:
    t = make_trace()
    assert (
        str(code(t.index, tail=1, fold=False)).splitlines()[-1]
        == "│ │ # _foreach_add_([f32[16, 4]], [f32[16, 4]], alpha=-0.1);"
    )
    assert str(code(t.index, module="embed", phase="forward")).count("embedding(") == 1
    assert "F.embedding(" in str(code(t.index, level="api", op="*embedding"))
    with pytest.raises(NothingMatched):
        code(t.index, module="nope")
    with pytest.raises(UsageError, match="level='c' is no level; choose 'api' or 'aten'"):
        code(t.index, level="c")


def test_a_trace_of_one_level_shows_that_level() -> None:
    b = TraceBuilder()
    b.op("torch.relu", b.value(2), out=(2,), level="api", flavour="function")
    t = b.build()
    assert "torch.relu" in str(code(t.index, fold=False))
    with pytest.raises(
        NothingMatched, match="level='aten': this trace has no aten ops; it has api ops, level='api'"
    ):
        code(t.index, level="aten")


def test_an_empty_trace() -> None:
    assert str(code(TraceBuilder().build().index)) == "(no ops were recorded)"


def test_hostile_strings_stay_text() -> None:
    b = TraceBuilder()
    b.source("evil.py", f"x = '{HOSTILE.splitlines()[0]}'\n")
    with b.at("evil.py", 1, HOSTILE):
        b.op(HOSTILE, HOSTILE, out=(2,))
    view = code(b.build().index, fold=False)
    for color in (True, False):
        out = io.StringIO()
        view.print(color=color, file=out)
        assert "[bold]evil[/bold]" in out.getvalue()
        assert "\x1b[31m" not in out.getvalue()
    assert "\x1b" not in str(view)
    assert "\u202e" not in str(view)
    assert len(str(view).splitlines()) == 2
    assert "<script>" not in view._repr_html_()


# -- live ------------------------------------------------------------------------------------------


def events(trace: Trace) -> list[CodeOp]:
    """The trace's aten ops as a recorder would tell them."""
    made = []
    for op in trace.ops.where(level="aten"):
        shown = op.forward or op
        entered: dict[int, int] = {}
        call = op.call
        while call is not None and call.frame is not None:
            entered.setdefault(call.frame.id, call.id)
            call = call.parent
        frames = shown.frame.chain if shown.frame else []
        chain = [
            SourceFrame(f.file, f.line, f.end_line, f.function, f.code, f.columns, entered.get(f.id, -1), 4)
            for f in frames
        ]
        visible = [place for place in chain if "/torch/" not in place.file]
        innermost = visible[-1]
        chain[chain.index(innermost)] = replace(innermost, call=-1, indent=-1)
        inputs, outputs = [str(v) for v in op.inputs], [str(v) for v in op.outputs]
        made.append(CodeOp(op.name, op.form, inputs, op.result.fill(outputs), chain, op.phase, op.raised))
    return made


def test_live_prints_the_lines_of_the_view() -> None:
    t = make_trace()
    out = io.StringIO()
    live = LiveCode(out)
    for event in events(t):
        live.op(event)
    assert out.getvalue() == str(code(t.index, fold=False)) + "\n"


def test_live_flushes_each_op() -> None:
    flushed: list[int] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            flushed.append(len(self.getvalue()))

    out = Stream()
    live = LiveCode(out, color=False)
    chain = [SourceFrame("net.py", at, at, "f", f"line {at}", None) for at in range(3)]
    live.op(CodeOp("relu", Form((SLOT, 1)), ["f32[2]"], "f32[2]", chain))
    live.op(CodeOp("mm", Form((SLOT,)), ["f32[2]"], chain=chain, raised=True))
    assert len(flushed) == 2
    assert out.getvalue().splitlines()[-2:] == [
        "│ │ │ # relu(f32[2], 1) -> f32[2];",
        "│ │ │ # mm(f32[2]) !! raised",
    ]


def test_live_survives_a_stream_that_cannot_show_it() -> None:
    raw = io.BytesIO()
    live = LiveCode(io.TextIOWrapper(raw, encoding="ascii"))
    live.op(CodeOp("relu", Form(()), output="f32[2]"))
    assert b"relu() -> f32[2];" in raw.getvalue()


def test_a_long_loop_folds_into_its_body() -> None:
    b = TraceBuilder()
    b.source("big.py", "for i in range(n):\n    x = f(x)\n    y = x.relu()\n")
    x = b.value(2, 3)
    for _ in range(5_000):
        with b.at("big.py", 2, "<module>", "f(x)"):
            b.op("mm", x, x, out=(2, 3))
        with b.at("big.py", 3, "<module>", "x.relu()"):
            b.op("relu", x, out=(2, 3))
    t = b.build()
    assert str(code(t.index, fold=False)).count("\n") == 20_000 - 1
    assert str(code(t.index, fold=True)).splitlines() == [
        "┌ ×5000  for i in range(n):",
        "┊ x = f(x)  # big.py:2 in <module>:",
        "┊ │ # mm(f32[2, 3], f32[2, 3]) -> f32[2, 3];",
        "┊ y = x.relu()  # big.py:3 in <module>:",
        "┊ │ # relu(f32[2, 3]) -> f32[2, 3];",
        "└",
    ]


@pytest.mark.parametrize("window", [1, 2, 7, 1000])
def test_lines_in_windows_are_those_of_the_view(window: int) -> None:
    every: list[dict[str, Any]] = [{}, {"phase": "backward"}, {"tail": 5}, {"fold": True}, {"stats": False}]
    for trace in (make_trace(3), measured.tiny_transformer()):
        for options in every:
            lines = [line.text for line in code_lines(trace.index, window=window, **options)]
            assert lines == str(code(trace.index, **options)).splitlines()


def test_each_level_of_nested_loops_has_its_own_header() -> None:
    b = TraceBuilder()
    b.source(
        "nest.py",
        "for i in range(2):\n    for j in range(3):\n        x = x + 1\n        x = x.relu()\n"
        "    x = x * 2\n",
    )
    x = b.value(2)
    for _ in range(2):
        for _ in range(3):
            b.op("add", x, out=(2,), frame=b.frame("nest.py", 3, "<module>"))
            b.op("relu", x, out=(2,), frame=b.frame("nest.py", 4, "<module>"))
        b.op("mul", x, out=(2,), frame=b.frame("nest.py", 5, "<module>"))
    assert str(code(b.build().index, fold=True)).splitlines() == [
        "┌ ×2  for i in range(2):",
        "┊ ┌ ×3  for j in range(3):",
        "┊ ┊ x = x + 1  # nest.py:3 in <module>:",
        "┊ ┊ │ # add(f32[2]) -> f32[2];",
        "┊ ┊ x = x.relu()  # nest.py:4 in <module>:",
        "┊ ┊ │ # relu(f32[2]) -> f32[2];",
        "┊ └",
        "┊ x = x * 2  # nest.py:5 in <module>:",
        "┊ │ # mul(f32[2]) -> f32[2];",
        "└",
    ]


def test_a_subscript_reads_as_it_is_written() -> None:
    x = torch.ones(4, 5)
    with sl.trace() as t:
        x[:2, 1:][torch.tensor([0, 1])]
        x[0] = 1
    texts = [str(op) for op in t.ops.where(level="api") if op.name.startswith("[]")]
    assert texts == [
        "f32[4, 5][:2, 1:] -> f32[2, 4]",
        "f32[2, 4][i64[2]] -> f32[2, 4]",
        "f32[4, 5][0] = 1",
    ]
    code = str(t.code(level="api"))
    assert all(f"# {text};" in code for text in texts)
