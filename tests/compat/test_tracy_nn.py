"""`Tracer` and `trace_model`: banners, blocks and indentation as they are printed while a model runs."""

from __future__ import annotations

import importlib
import io
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline.compat.tracy_nn as adapter
from sightline.compat.tracy_nn import Tracer, trace_model
from sightline.errors import UsageError
from sightline.views.log import log
from tests.recording.engines import BOTH_ENGINES

torch.set_num_threads(1)

X = torch.ones(2, 3)  # outside the traced block: creating a tensor is an operation, too

#: Every possible line: a rail, a banner, the head of a block, inputs, outputs.
RAILS = r"  (│  )*"
FORMS = [
    RAILS + r"│",
    r"  ● TRACING .+ (STARTED|COMPLETE)",
    RAILS + r"● [\w.]+ \(\w+\)( \(.+\))?",
    RAILS + r"● \S.* @ \[[\w.<>]+\]",
    RAILS + r"[├└]─ (Input|Left|Right|Output|With|Raised)( [\w.\[\]]+)?: \S.*",
    RAILS + r"[├└]─ [A-Z]\S*(\(.*\))?: \S.*",  # a name of the source
]
LINE = re.compile("|".join(f"({form})" for form in FORMS))


class Attention(nn.Module):
    def __init__(self, width: int = 6, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = self.split(self.query(x)), self.split(self.key(x))
        joined: torch.Tensor = self.out(self.join(self.attend(query, key)))
        return joined

    def split(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def attend(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(2, 3)
        return torch.softmax(scores / math.sqrt(4), dim=-1) @ key

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).reshape(5, 4, 6)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.body(x), x], dim=1)


class Doubled(nn.Module):
    """A model without submodules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() * 2


@pytest.fixture(scope="module")
def llama() -> Any:
    """A tiny Llama; made once and early, since transformers leaves things behind while it makes one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def block(head: str, *parts: str) -> list[str]:
    """A block and the rail after it."""
    *most, last = (f"{part} @ cpu" if part.endswith("]") else part for part in parts)
    return [f"  ● {head}", *(f"  ├─ {part}" for part in most), f"  └─ {last}", "  │"]


def test_start_a_forward_pass_and_stop(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.rand(5, 4, 6)
    attention = Attention()
    tracer = Tracer("Attention")
    tracer.start(attention)
    output = attention(x)
    tracer.stop()
    shown = capsys.readouterr().out
    whole, split, heads = "Tensor [5, 4, 6]", "Tensor [5, 4, 3, 2]", "Tensor [5, 3, 4, 2]"
    turned, scores = "Tensor [5, 3, 2, 4]", "Tensor [5, 3, 4, 4]"
    settings = "in_features: 6, out_features: 6"
    halves = [
        *block("Tensor.view(5, 4, 3, 2) @ [Attention.split]", f"Input: {whole}", f"Output: {split}"),
        *block("Tensor.transpose(1, 2) @ [Attention.split]", f"Input: {split}", f"Output: {heads}"),
    ]
    assert shown.splitlines() == [
        "  ● TRACING Attention STARTED",
        "  │",
        *block(f"query (Linear) ({settings})", f"Input: {whole}", f"Output: {whole}"),
        *halves,
        *block(f"key (Linear) ({settings}, bias: False)", f"Input: {whole}", f"Output: {whole}"),
        *halves,
        *block("Tensor.transpose(2, 3) @ [Attention.attend]", f"Input: {heads}", f"Output: {turned}"),
        *block(
            "Tensor.@ @ [Attention.attend]",
            f"Query: {heads}",
            f"Key.transpose(2, 3): {turned}",
            f"Scores: {scores}",
        ),
        *block("Tensor./ @ [Attention.attend]", f"Left: {scores}", "Right: 2.0", f"Output: {scores}"),
        *block("torch.softmax(dim=-1) @ [Attention.attend]", f"Input: {scores}", f"Output: {scores}"),
        *block("Tensor.@ @ [Attention.attend]", f"Left: {scores}", f"Right: {heads}", f"Output: {heads}"),
        *block("Tensor.transpose(1, 2) @ [Attention.join]", f"Input: {heads}", f"Output: {split}"),
        *block("Tensor.reshape(5, 4, 6) @ [Attention.join]", f"Input: {split}", f"Output: {whole}"),
        *block(f"out (Linear) ({settings})", f"Input: {whole}", f"Output: {whole}"),
        "  ● TRACING Attention COMPLETE",
    ]
    assert output.shape == x.shape
    kept = str(log(tracer.recording.index, root=False, title="Attention", margin="  ")) + "\n"
    for name, label in (("Query", "Left"), ("Key.transpose(2, 3)", "Right"), ("Scores", "Output")):
        shown = shown.replace(f"─ {name}: ", f"─ {label}: ")  # the log has no names of the source
    assert shown == kept.replace(", bias: True", "")


class Operands(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT
        rest = 1 - scores
        both = scores * rest + self.scale(rest)
        both += rest
        return both / rest

    def scale(self, weights: torch.Tensor) -> torch.Tensor:
        """Assigns calls that are no operators, and several operators."""
        half, weights = weights / 2, weights.exp()
        return half * 2 if half.shape else weights


@BOTH_ENGINES
def test_operands_have_the_names_of_the_line_that_assigns_the_result(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIGHTLINE_ENGINE", engine)
    with Tracer("Operands").trace(model := Operands()):
        model(X, X)
    labels = re.findall(r"[●─] (Tensor\.\S+(?= @)|[^:●]+(?=: ))", capsys.readouterr().out)
    operators = " ".join(labels).split("Tensor.")[1:]
    assert [line.strip() for line in operators if not line[0].isalpha()] == [
        "@ Q K.mT Scores",
        "- Left Scores Rest",
        "* Left Right Output",
        "/ Left Right Output",
        "* Left Right Output",
        "+ Left Scale(rest) Both",
        "+= Left Right Output",
        "/ Left Right Output",
    ]


def test_a_block_with_a_tracer_that_was_used_before(capsys: pytest.CaptureFixture[str]) -> None:
    model, tracer, shown = Nested(), Tracer("Nested"), []
    for _ in range(2):
        with tracer.trace(model) as entered:
            output = model(X)
            assert output.shape == (2, 6)
            assert entered is tracer
            assert "not tracing" not in repr(tracer)
        assert "not tracing" in repr(tracer)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].splitlines() == [
        "  ● TRACING Nested STARTED",
        "  │",
        "  ● body (Sequential)",
        "  ├─ Input: Tensor [2, 3] @ cpu",
        "  │",
        "  │  ● body.0 (Linear) (in_features: 3, out_features: 3)",
        "  │  ├─ Input: Tensor [2, 3] @ cpu",
        "  │  └─ Output: Tensor [2, 3] @ cpu",
        "  │  │",
        "  │  ● body.1 (Sequential)",
        "  │  ├─ Input: Tensor [2, 3] @ cpu",
        "  │  │",
        "  │  │  ● body.1.0 (ReLU)",
        "  │  │  ├─ Input: Tensor [2, 3] @ cpu",
        "  │  │  └─ Output: Tensor [2, 3] @ cpu",
        "  │  │",
        "  │  └─ Output: Tensor [2, 3] @ cpu",
        "  │",
        "  └─ Output: Tensor [2, 3] @ cpu",
        "  │",
        "  ● torch.cat(dim=1) @ [Nested.forward]",
        "  ├─ Input 0: Tensor [2, 3] @ cpu",
        "  ├─ Input 1: Tensor [2, 3] @ cpu",
        "  └─ Output: Tensor [2, 6] @ cpu",
        "  │",
        "  ● TRACING Nested COMPLETE",
    ]


def test_trace_model_makes_a_tracer_that_waits(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    tracer = trace_model(model, "A model")
    model(X)
    assert capsys.readouterr().out == ""
    with tracer.trace(model):
        model(X)
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("  ● TRACING A model STARTED", "  ● TRACING A model COMPLETE")
    assert lines[2] == "  ● 0 (Linear) (in_features: 3, out_features: 2)"


def test_starting_twice_says_so_and_stopping_twice_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    tracer, model, other = Tracer("Net"), nn.ReLU(), nn.Linear(2, 2)
    tracer.stop()
    assert capsys.readouterr().out == ""
    tracer.start(model)
    recording = tracer.recording
    capsys.readouterr()
    tracer.start(other)
    with tracer.trace(model):
        pass
    assert capsys.readouterr().out.splitlines() == ["  ● Tracer Net is already active"] * 2
    assert tracer.active
    model(X)
    tracer.stop()
    assert capsys.readouterr().out.splitlines()[1] == "  ● ReLU"
    tracer.stop()
    assert capsys.readouterr().out == ""
    assert [call.module.type for call in recording.module_calls] == ["ReLU"]


def test_a_model_without_submodules_shows_its_operations(capsys: pytest.CaptureFixture[str]) -> None:
    model = Doubled()
    with Tracer("Doubled").trace(model):
        model(X)
    heads = [line for line in capsys.readouterr().out.splitlines() if "●" in line][1:-1]
    assert heads == ["  ● Tensor.relu() @ [Doubled.forward]", "  ● Tensor.* @ [Doubled.forward]"]


def test_operators_have_their_sides_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    class Written(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (1 - x) + 2**x / (3 / x) - (4 < x) * (x % 5) + (6 // x)  # noqa: SIM300  # as people do

    model = Written()
    with Tracer("Written").trace(model):
        model(X)
    text = re.sub(r"Tensor \[2, 3\]( bool)? @ cpu", "x", capsys.readouterr().out)
    found = re.findall(r"● Tensor\.(\S+) @.*\n  ├─ Left: (.*)\n  ├─ Right: (.*)\n", text)
    assert [one for one in found if one[1:] != ("x", "x")] == [
        ("-", "1", "x"), ("**", "2", "x"), ("/", "3", "x"),
        (">", "x", "4"), ("%", "x", "5"), ("//", "6", "x"),
    ]  # fmt: skip


def test_modules_show_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Conv1d(3, 2, 3, bias=False))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with Tracer("Settings").trace(model):
        nn.functional.softmax(model(ids), dim=-1)
    heads = [line for line in capsys.readouterr().out.splitlines() if "●" in line][1:-1]
    assert heads == [
        "  ● 0 (Embedding) (num_embeddings: 9, embedding_dim: 4)",
        "  ● 1 (LayerNorm) (normalized_shape: (4,), eps: 1e-05, elementwise_affine: True)",
        "  ● 2 (Conv1d) (in_channels: 3, out_channels: 2, kernel_size: (3,), stride: (1,), bias: False)",
        "  ● F.softmax(dim=-1) @ [test_modules_show_their_settings]",
    ]


def test_an_exception_passes_and_the_calls_before_it_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model, tracer, wrong = Nested(), Tracer("Nested"), torch.ones(2, 4)
    with pytest.raises(RuntimeError), tracer.trace(model):
        model(wrong)
    lines = capsys.readouterr().out.splitlines()
    assert "  │  └─ Raised: it ended in an exception" in lines
    assert lines[-1] == "  ● TRACING Nested COMPLETE"
    assert not tracer.active


def test_nothing_in_torch_is_replaced_and_training_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    view, matmul, call = torch.Tensor.view, torch.Tensor.__matmul__, nn.Module.__call__
    model = nn.Sequential(nn.Linear(3, 2))
    with Tracer("Net").trace(model):
        loss = model(X).sum()
        loss.backward()
        assert torch.Tensor.view is view
        assert torch.Tensor.__matmul__ is matmul
        assert nn.Module.__call__ is call
    assert capsys.readouterr().out.count("●") == 4


def test_an_object_that_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module"):
        trace_model(3, "three")
    tracer = Tracer("three")
    with pytest.raises(UsageError, match="has not been started"):
        _ = tracer.recording


def test_a_tiny_llama(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tracer = trace_model(llama, "Llama")
    with torch.no_grad(), tracer.trace(llama):
        output = llama(input_ids=torch.tensor([[1, 2, 3]]))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert not [line for line in lines if not LINE.fullmatch(line)]
    assert "  │  │  ● model.layers.1.self_attn (LlamaAttention)" in lines
    settings = "(in_features: 16, out_features: 8, bias: False)"
    assert f"  │  │  │  ● model.layers.1.self_attn.k_proj (Linear) {settings}" in lines
    assert any(re.fullmatch(r"  (│  )+● torch\.cat\(.*\) @ \[rotate_half\]", line) for line in lines)
    assert output.logits.shape == (1, 3, 32)
    assert not tracer.recording.info["fault_count"]


def test_the_other_packages_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tracy_nn", adapter)
    module = importlib.import_module("tracy_nn")
    assert (module.Tracer, module.trace_model) == (Tracer, trace_model)


def test_a_script_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import sightline.compat.tracy_nn
            sys.modules["tracy_nn"] = sightline.compat.tracy_nn
            import torch
            from tracy_nn import Tracer
            model = torch.nn.Dropout(0.5)
            tracer = Tracer("Dropout")
            tracer.start(model)
            y = model(torch.zeros(2, dtype=torch.float64))
            tracer.stop()
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines()[-6:] == [
        "  │",
        "  ● Dropout (p: 0.5, inplace: False)",
        "  ├─ Input: Tensor [2] float64 @ cpu",
        "  └─ Output: Tensor [2] float64 @ cpu",
        "  │",
        "  ● TRACING Dropout COMPLETE",
    ]


def test_a_module_of_the_users_own_shows_the_calls_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Doubled())
    with trace_model(model):
        model(X)
    out = capsys.readouterr().out
    assert "● TRACING Quick Trace STARTED" in out
    assert "● 0 (Doubled)" in out
    assert "● Tensor.relu() @ [Doubled.forward]" in out
    assert "● Tensor.* @ [Doubled.forward]" in out


def test_a_tracer_without_a_model_traces_everything(capsys: pytest.CaptureFixture[str]) -> None:
    linear = nn.Linear(3, 2)
    with Tracer() as tracer:
        linear(X)
    out = capsys.readouterr().out
    assert out.startswith("  ● TRACING Neural Network STARTED")
    assert "  ● Linear (in_features: 3, out_features: 2)\n  ├─ Input: Tensor [2, 3] @ cpu\n  └─" in out
    assert not tracer.active


def test_a_block_inside_a_block_leaves_the_tracer_on(capsys: pytest.CaptureFixture[str]) -> None:
    linear = nn.Linear(3, 2)
    tracer = trace_model(linear)
    active = []
    with tracer:
        with tracer:
            linear(X)
        active.append(tracer.active)
    assert [*active, tracer.active] == [True, False]
    out = capsys.readouterr().out
    assert out.count("● Tracer Quick Trace is already active") == 1
    assert out.count("COMPLETE") == 1


def test_layers_of_torch_name_all_they_are_set_to(capsys: pytest.CaptureFixture[str]) -> None:
    heads = {
        nn.LSTM(3, 4, num_layers=2): "LSTM (input_size: 3, hidden_size: 4, num_layers: 2)",
        nn.BatchNorm1d(3, affine=False): "BatchNorm1d (num_features: 3, eps: 1e-05, momentum: 0.1, ",
        nn.GroupNorm(1, 3): "GroupNorm (num_groups: 1, num_channels: 3, eps: 1e-05, ",
        nn.ReflectionPad1d(1): "ReflectionPad1d (padding: (1, 1))",
        nn.Softshrink(): "Softshrink (lambd: 0.5)",
        nn.LSTMCell(3, 4): "LSTMCell (input_size: 3, hidden_size: 4)",
        nn.Tanh(): "Tanh\n",
    }
    for layer, head in heads.items():
        with Tracer():
            layer(X)
        assert f"  ● {head}" in capsys.readouterr().out


def test_a_layer_derived_from_one_of_torchs_shows_the_calls_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(Scaled(3, 2))
    with trace_model(model):
        model(X)
    heads = [line.strip(" │") for line in capsys.readouterr().out.splitlines() if "●" in line][1:-1]
    assert heads == [
        "● 0 (Scaled) (in_features: 3, out_features: 2)",
        "● F.linear() @ [Linear.forward]",
        "● Tensor.* @ [Scaled.forward]",
    ]


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_fused_op_says_how_to_see_inside(
    engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGHTLINE_ENGINE", engine)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    x = torch.ones(1, 3, 8)
    with torch.no_grad(), trace_model(model):
        model(x)
    out = capsys.readouterr().out
    assert out.count("one fused op") == 1
    assert re.search(
        r"● torch\._transformer_encoder_layer_fwd\(.*\) @ \[TransformerEncoderLayer\.forward\] "
        r"\(torch ran the whole module as one fused op; .*set_fastpath_enabled\(False\) shows inside\)",
        out,
    )
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), trace_model(model):
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    out = capsys.readouterr().out
    assert "● 0.linear1 (Linear)" in out
    assert "● F.multi_head_attention_forward(" in out
    assert "fused" not in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    linear, written = nn.Linear(3, 2), []
    for switch in (adapter.Color.disable, adapter.Color.enable):
        switch()
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        with trace_model(linear) as tracer:
            tracer.start(linear)  # says that it is active
            linear(X)
        written.append(terminal.getvalue())
    assert "\x1b" not in written[0]
    assert "\x1b" in written[1]
    assert "already active" in written[0]
