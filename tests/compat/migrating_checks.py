"""The rows of `docs/migrating.md` that are in words: a check of each, by its tool and its words."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from sightline.cli import main
from sightline.compat.dl_backtrace import DLBacktrace, diagnose_model_compatibility
from sightline.compat.torch_code_tracing import TracingMode
from sightline.compat.torchspy import CallTracer, trace_graph
from sightline.compat.tracy_nn import Tracer
from sightline.errors import UsageError

X = torch.ones(2, 4)
Check = Callable[[pytest.CaptureFixture[str]], None]
CHECKS: dict[tuple[str, str], Check] = {}


def row(tool: str, words: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[tool, words] = check
        return check

    return register


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        return torch.cat([x, self.down(hidden)], dim=-1)


def traced(run: Callable[[], Any], **options: Any) -> list[str]:
    with TracingMode(quiet=True) as mode:
        run()
    return mode.format(**options).splitlines()


@row("torch-code-tracing", "files")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    layer = transformers.models.llama.modeling_llama.LlamaRMSNorm(4)
    lines = traced(lambda: layer(X))
    assert any("# site-packages/transformers/models/llama/" in line for line in lines)


@row("torch-code-tracing", "ops of a backward pass")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.ones(3, requires_grad=True)
    lines = traced(lambda: w.exp().sum().backward())
    header = next(at for at, line in enumerate(lines) if line.startswith("── backward"))
    assert any("w.exp().sum()" in line for line in lines[header:])
    assert any("# ⟵ mul" in line for line in lines[header:])


@row("torch-code-tracing", "the arrow `⬇️`")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    lines = traced(lambda: nn.Sequential(Block())(X))
    deeper = [at for at, line in enumerate(lines) if at and line.count("│ ") > lines[at - 1].count("│ ")]
    assert deeper
    assert all("⬇️" in lines[at] or "# " in lines[at] for at in deeper)
    assert sum("return torch.cat" in line for line in lines) == 1


@row("torch-code-tracing", "the end of an op")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    lines = traced(lambda: X.neg().exp())
    assert [line.endswith(";") for line in lines if "# neg" in line or "# exp" in line] == [True, True]


@row("torch-code-tracing", "symbolic sizes")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    environment = ShapeEnv()
    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = FakeTensorMode(shape_env=environment)
    x = fake.from_tensor(torch.ones(5, 4), symbolic_context=context)
    with fake:
        lines = traced(lambda: x * 2)
    assert re.search(r"mul\.Tensor\(f32\[s\d+, 4\], 2\) -> f32\[s\d+, 4\];", lines[-1])
    assert environment.guards == []


def blocks(model: nn.Module, *inputs: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with torch.no_grad(), Tracer("M").trace(model):
        model(*inputs)
    return capsys.readouterr().out


class Options(nn.Module):
    """A module that is given more than tensors."""

    def forward(self, x: torch.Tensor, mask: Any, count: int, mode: str) -> torch.Tensor:
        return x


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Linear(4, 4, bias=False)
        self.body = nn.Sequential(nn.Sequential(nn.ReLU()))
        self.options = Options()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = k = self.bare(x)
        scores = q @ k.mT
        self.options(scores[:20, :20], None, 3, "a")
        rest = 1 - scores
        index = torch.ones(2, dtype=torch.int64)
        return torch.cat([self.body(rest), scores[index]])


#: For each row in words of tracy_nn, a line that `Mixed` makes.
LINES = {
    "`torch.cat` and other functions": r"● torch\.cat\(.*\) @ \[Mixed\.forward\]",
    "the settings of a module": r"● bare \(Linear\) \(in_features: 4, out_features: 4, bias: False\)",
    "nested modules": r"\n  │  │  ● body\.0\.0 \(ReLU\)",
    "a module of your own": r"● Tensor\.@ @ \[Mixed\.forward\]",
    "a module of torch": r"● bare \(Linear\) .*\n  ├─ Input: .*\n  └─ Output: .*\n  │\n  ● Tensor\.mT",
    "None, numbers, strings": r"Input: \[Tensor \[.*\] @ cpu, None, int, str\]",
    "subscripts": r"● Tensor\[:20, :20\] @ \[Mixed\.forward\]",
    "operators": r"● Tensor\.- @ .*\n  ├─ Left: 1\n",
    "names of operands": r"├─ Q: .*\n  ├─ K\.mT: .*\n  └─ Scores: ",
    "dtypes": r"Tensor \[2\] int64 @ cpu",
    "tensors that are made": r"● torch\.ones\(2, dtype=torch\.int64\) @ \[Mixed\.forward\]",
}


def _line_check(pattern: str) -> Check:
    def check(capsys: pytest.CaptureFixture[str]) -> None:
        shown = blocks(Mixed(), X, capsys=capsys)
        assert re.search(pattern, shown), shown

    return check


for _words, _pattern in LINES.items():
    row("tracy_nn", _words)(_line_check(_pattern))


@row("tracy_nn", "starting an active tracer")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    model, tracer = Block(), Tracer("A")
    with tracer.trace(model):
        tracer.start(model)
        assert "Tracer A is already active" in capsys.readouterr().out
        assert tracer.active


class MHA(nn.Module):
    """The attention of tracy_nn's document, by its output."""

    def __init__(self) -> None:
        super().__init__()
        self.query_weights, self.key_weights, self.value_weights, self.out_projection = (
            nn.Linear(6, 6) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query_weights(x), self.key_weights(x), self.value_weights(x)
        heads = [self.split_heads(one) for one in (q, k, v)]
        out: torch.Tensor = self.out_projection(self.combine_heads(self.calculate_attention(*heads)))
        return out

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(10, 20, 3, 2).transpose(1, 2)

    def calculate_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(2, 3)).softmax(-1) @ v

    def combine_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().view(10, 20, 6)


OUTPUT = [
    "● TRACING M STARTED",
    *(f"● {name}_weights (Linear) (in_features: 6, out_features: 6)" for name in ("query", "key", "value")),
    "● Tensor.view(10, 20, 3, 2) @ [MHA.split_heads]",
    "├─ Input: Tensor [10, 20, 6] @ cpu",
    "└─ Output: Tensor [10, 20, 3, 2] @ cpu",
    "● Tensor.@ @ [MHA.calculate_attention]",
    "├─ Left: Tensor [10, 3, 20, 20] @ cpu",
    "├─ Right: Tensor [10, 3, 20, 2] @ cpu",
    "└─ Output: Tensor [10, 3, 20, 2] @ cpu",
    "● Tensor.transpose(1, 2) @ [MHA.combine_heads]",
    "├─ Input: Tensor [10, 3, 20, 2] @ cpu",
    "└─ Output: Tensor [10, 20, 3, 2] @ cpu",
    "● Tensor.view(10, 20, 6) @ [MHA.combine_heads]",
    "● out_projection (Linear) (in_features: 6, out_features: 6)",
    "● TRACING M COMPLETE",
]


@row("tracy_nn", "the document's output")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(line.strip() for line in blocks(MHA(), torch.rand(10, 20, 6), capsys=capsys).splitlines())
    assert all(wanted in lines for wanted in OUTPUT)  # each after the one before


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


@row("tracy_nn", "a fused encoder layer")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    shown = blocks(nn.Sequential(encoder()), torch.ones(1, 3, 8), capsys=capsys)
    assert "torch._transformer_encoder_layer_fwd" in shown
    assert "set_fastpath_enabled(False) shows inside" in shown


def _calls(model: nn.Module, *inputs: torch.Tensor) -> list[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        tracer = CallTracer(folder)
        tracer.register_hooks(model)
        with torch.no_grad(), tracer:
            model(*inputs)
        return tracer.call_trace


@row("torchspy", "another thread")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    from threading import Thread

    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = Thread(target=self.inner, args=(x,))
            thread.start()
            thread.join()
            return x

    assert _calls(Elsewhere(), X) == ["inner", "root"]


@row("torchspy", "compiled code")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.ReLU(), Block())
    model[1].compile(backend="eager", fullgraph=True)
    assert _calls(model, X) == ["0", "1.up", "1.down", "1", "root"]
    torch._dynamo.reset()


@row("torchspy", "a call that raises")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("x")

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Raising()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(KeyError):
                self.inner(x)
            return x

    assert _calls(Catching(), X) == ["root"]


@row("torchspy", "a fused encoder layer")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    assert _calls(encoder(), torch.ones(1, 3, 8)) == ["root"]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert len(_calls(encoder(), torch.ones(1, 3, 8))) == 9
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@row("torchspy", "the logger `torchspy`")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.Handler()
    seen: list[str] = []
    handler.emit = lambda record: seen.append(f"{record.name}: {record.msg}")  # type: ignore[method-assign]
    logger = logging.getLogger("torchspy")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        _calls(nn.ReLU(), X)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert seen == ["torchspy.tracer: Registered hook on: %s"]


@row("torchspy", "the script `trace_to_graph.py`")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    text = CliRunner().invoke(main, ["trace-graph", "--help"]).output
    for option in ("trace-file", "out", "show-repetition", "no-show-repetition", "prune-leaves",
                   "no-prune-leaves", "squash-name", "dpi", "figwidth", "figheight", "save-json",
                   "verbose"):  # fmt: skip
        assert f"--{option}" in text


@row("torchspy", "the line `root`")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(trace_graph.build_tree(["fc", "root"]).children) == ["fc"]


def branching() -> nn.Module:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    return Branching()


@row("DLBacktrace, model tracing", "Multi-input models")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    class Two(nn.Module):
        def forward(self, image: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
            return torch.cat([image, metadata], dim=1)

    node_io = DLBacktrace(model=Two(), input_for_graph=(X, X)).predict(X, X)
    assert node_io["output"]["output_values"].shape == (2, 8)


@row("DLBacktrace, model tracing", "Use Representative Inputs")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="convert it with"):
        DLBacktrace(nn.ReLU(), X).predict(X.int())


@row("DLBacktrace, model tracing", "Trace Once")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    dlb = DLBacktrace(Block().eval(), X)
    assert [dlb.predict(torch.ones(n, 4))["cat"]["output_values"].shape[0] for n in (2, 5, 9)] == [2, 5, 9]


@row("DLBacktrace, model tracing", "Check Compatibility")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    [issue] = diagnose_model_compatibility(branching(), X)["issues"]
    assert "migrating_checks.py:" in issue
    assert "return x if x.sum() > 0 else -x" in issue


@row("DLBacktrace, model tracing", "Eval Mode Required")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
    output = DLBacktrace(model, X).predict(X)["output"]["output_values"]
    assert output.equal(X)
    assert [one.training for one in model] == [True, False]
