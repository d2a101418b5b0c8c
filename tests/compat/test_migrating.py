"""The tables of `docs/migrating.md`: every row is run, and a row that names something absent fails.

A row whose first cell is code is executed in a scope of its tool; one in words has a check of its own here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.cli import main
from sightline.compat import dl_backtrace, torchspy
from sightline.compat.dl_backtrace import DLBacktrace, diagnose_model_compatibility
from sightline.compat.torch_code_tracing import TracingMode
from sightline.compat.torchspy import CallTracer, TensorSaver, trace_graph
from sightline.compat.tracy_nn import Color, Tracer, trace_model
from sightline.errors import UsageError

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating.md"
TOOLS = ("torch-code-tracing", "tracy_nn", "torchspy", "DLBacktrace, model tracing")
X = torch.ones(2, 4)
Row = tuple[str, str, str, str]  # tool, first cell, verdict, reason


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        return torch.cat([x, self.down(hidden)], dim=-1)


@cache
def rows() -> list[Row]:
    text = DOCUMENT.read_text("utf-8")
    found: list[Row] = []
    for tool in TOOLS:
        section = text.split(f"\n## {tool}\n")[1].split("\n## ")[0]
        for line in re.findall(r"^\|(?! there |-)(.*)\|$", section, re.MULTILINE):
            name, verdict, reason = (cell.strip() for cell in line.split("|"))
            found.append((tool, name, verdict, reason))
    return found


def code_of(cell: str) -> str | None:
    """The code of a cell that is nothing else."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    return match[1] if match else None


# -- rows of code --------------------------------------------------------------------------------------------


def scope_of(tool: str, folder: Path) -> dict[str, Any]:
    """The names that the rows of a tool use, made as its user would."""
    model = Block().eval()
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "model": model, "x": X, "folder": folder}
    if tool == "torch-code-tracing":
        with torch.no_grad(), TracingMode(quiet=True) as mode:
            model(X)
        return scope | {"TracingMode": TracingMode, "mode": mode, "TorchDispatchMode": TorchDispatchMode}
    if tool == "tracy_nn":
        return scope | {"Tracer": Tracer, "trace_model": trace_model, "Color": Color, "tracer": Tracer("T")}
    if tool == "torchspy":
        tree = trace_graph.build_tree(["layers.0.fc", "layers.1.fc", "head"])
        file = folder / "trace.txt"
        file.write_text("layers.0.fc\nroot")
        saver, tracer = TensorSaver(folder / "tensors"), CallTracer(folder / "traces")
        saver.register_modules(model)
        scope |= {name: getattr(torchspy, name) for name in torchspy.__all__}
        return scope | {"saver": saver, "tracer": tracer, "trace_graph": trace_graph, "tree": tree,
                        "dot": trace_graph.construct_graph(tree), "file": file}  # fmt: skip
    dlb = DLBacktrace(model, X)
    return scope | {"DLBacktrace": DLBacktrace, "diagnose_model_compatibility": diagnose_model_compatibility,
                    "dl_backtrace": dl_backtrace, "dlb": dlb, "node_io": dlb.predict(X)}  # fmt: skip


def run(code: str, scope: dict[str, Any]) -> Any:
    """The value of an expression, or None after a statement."""
    try:
        compiled = compile(code, "migrating.md", "eval")
    except SyntaxError:
        exec(compile(code, "migrating.md", "exec"), scope)
        return None
    return eval(compiled, scope)


#: What rows of code give, where that is what the row is about.
VALUES: dict[str, Callable[[Any], bool]] = {
    "mode.traces": lambda traces: len(traces) == 6,
    "mode.traces[0].op_str": lambda text: text == "t(f32[8, 4]) -> f32[4, 8]",
    "mode.traces[0].stack[0].filename": lambda name: name == __file__,
    "mode.traces[0].stack[0].frame": lambda frame: frame is None,
    "isinstance(mode, TorchDispatchMode)": lambda answer: answer is False,
    "mode.format(color=False, succinct=True)": lambda text: "hidden = self.up(x).relu()  # " in text,
    "Tracer()": lambda tracer: tracer.name == "Neural Network",
    "trace_model(model)": lambda tracer: tracer.name == "Quick Trace",
    "Color.disable()": lambda _: not Color.enabled,
    "saver.get_module_path(model)": lambda path: path == "root",
    'saver.save("q", x, call_idx=3)': lambda path: path.name == "q.call3.pt",
    'DebugContext(saver, module_path_override="here").debugger': lambda saver: isinstance(saver, TensorSaver),
    "get_debug_context()": lambda context: context is None,
    "trace_graph.parse_trace(file)": lambda paths: paths == ["layers.0.fc", "root"],
    'trace_graph.build_tree(["layers.0.fc", "layers.1.fc"]).children["layers"].indices': lambda found: (
        found == {"0", "1"}
    ),
    'trace_graph.build_tree(["layers.0.fc"]).children["layers"].count': lambda count: count == 1,
    'trace_graph.Node("fc", {}, 1, 0, [], set())': lambda node: node != trace_graph.Node("fc"),
    "dot.source": lambda text: 'label="layers x 2"' in text,
    "dlb.predict(torch.ones(7, 4))": lambda node_io: node_io["output"]["output_values"].shape == (7, 8),
    'dlb.graph.nodes["linear"]["layer_name"]': lambda name: name == "linear",
    'node_io["linear"]["input_values"]': lambda value: value is X,
    'node_io["cat"]["input_sources"]': lambda names: names == ["x", "linear_1"],
    'node_io["output"]["output_values"]': lambda value: value.shape == (2, 8),
    "diagnose_model_compatibility(model, x)": lambda found: found["issues"] == [],
    "dlb.debug_execution_differences(x)": lambda found: found["max_difference"] == 0.0,
}


@pytest.fixture
def colours() -> Iterator[None]:
    yield
    Color.enable()


@pytest.mark.usefixtures("colours")
@pytest.mark.parametrize("row", [row for row in rows() if code_of(row[1])], ids=lambda row: row[1][:60])
def test_every_row_of_code_runs(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, cell, verdict, _ = row
    code = code_of(cell)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    scope = scope_of(tool, tmp_path)
    try:
        if verdict == "not offered":
            with pytest.raises(UsageError, match=r"relevance|model\.generate") as caught:
                run(code, scope)
            assert str(caught.value).endswith(".")
            return
        value = run(code, scope)
    finally:
        for one in (scope.get("tracer"),):
            if isinstance(one, Tracer):
                one.stop()
            elif isinstance(one, CallTracer):
                one.remove_hooks()
    if code in VALUES:
        assert VALUES[code](value), value


def test_every_value_is_of_a_row() -> None:
    assert VALUES.keys() <= {code_of(cell) for _, cell, _, _ in rows()}


# -- rows in words -------------------------------------------------------------------------------------------

Check = Callable[[pytest.CaptureFixture[str]], None]
CHECKS: dict[tuple[str, str], Check] = {}


def row(tool: str, words: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[tool, words] = check
        return check

    return register


@pytest.mark.parametrize("key", [r[:2] for r in rows() if not code_of(r[1])], ids=lambda key: key[1])
def test_every_row_in_words_holds(key: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert key in CHECKS, f"{key} has no check"
    CHECKS[key](capsys)


def test_every_check_is_of_a_row() -> None:
    assert CHECKS.keys() == {r[:2] for r in rows() if not code_of(r[1])}


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


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Linear(4, 4, bias=False)
        self.body = nn.Sequential(nn.Sequential(nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = k = self.bare(x)
        scores = q @ k.mT
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
    assert "test_migrating.py:" in issue
    assert "return x if x.sum() > 0 else -x" in issue


@row("DLBacktrace, model tracing", "Eval Mode Required")
def _(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
    output = DLBacktrace(model, X).predict(X)["output"]["output_values"]
    assert output.equal(X)
    assert [one.training for one in model] == [True, False]


# -- the tables as such --------------------------------------------------------------------------------------

#: Every name and option in the documents of the tools.
NAMES = {
    "torch-code-tracing": "TracingMode succinct color quiet traces op_str stack print format",
    "tracy_nn": "Tracer start stop trace trace_model",
    "torchspy": "BaseDebugger TensorSaver DebugContext CallTracer spy_save get_debug_context "
    "register_modules target_classes target_names exclude_names save call_idx norm_only prefix "
    "module_path_override register_hooks call_trace hooks get_trace reset_trace remove_hooks "
    "save_trace reset_counts get_module_path module_paths enabled parse_trace build_tree "
    "render_graph construct_graph prune_leaves squash_numeric_indices apply_graph_render_options "
    "save_tree_json show_repetition prune_leaves_flag squash_name dpi figwidth figheight",
    "DLBacktrace, model tracing": "DLBacktrace model input_for_graph dynamic_shapes device verbose predict "
    "graph layer_stack node_type layer_hyperparams layer_name input_values output_values evaluation "
    "run_task sample_auto visualize diagnose_model_compatibility Dim clear_intermediates close",
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_every_name_of_a_tool_has_a_row(tool: str) -> None:
    cells = " ".join(cell for row_tool, cell, _, _ in rows() if row_tool == tool)
    words = set(re.findall(r"\w+", cells))
    assert [name for name in NAMES[tool].split() if name not in words] == []


def test_every_row_has_a_verdict_and_every_difference_a_reason() -> None:
    assert {verdict for _, _, verdict, _ in rows()} == {"same", "better", "different", "not offered"}
    assert [row for row in rows() if row[2] != "same" and not row[3]] == []
    assert len(rows()) == len({row[:2] for row in rows()})


@pytest.mark.parametrize("code", ["mode.trace", "TracingMode(loud=True)", "tracer.begin(model)"])
def test_a_row_that_names_something_absent_fails(code: str, tmp_path: Path) -> None:
    tool = "tracy_nn" if code.startswith("tracer") else "torch-code-tracing"
    with pytest.raises((AttributeError, TypeError)):
        run(code, scope_of(tool, tmp_path))
