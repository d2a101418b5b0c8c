"""The examples of the four tools' documents, with their own imports: sightline takes the tool's place.

Each test is one block of code of a document. The parts that they leave open (a model, inputs) are here.
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.migrating_checks import MHA, OUTPUT

TOOLS = ("dl_backtrace", "torch_code_tracing", "torchspy", "tracy_nn")


@pytest.fixture(autouse=True)
def in_their_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each front door under the name of its tool, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in TOOLS:
        sys.modules[name] = importlib.import_module(f"sightline.compat.{name}")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in TOOLS]:
        del sys.modules[name]


def execute(code: str, **scope: Any) -> dict[str, Any]:
    """Run a block; returns its names."""
    exec(compile(textwrap.dedent(code), "document.md", "exec"), scope)
    return scope


# -- torch-code-tracing --------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    """As the embedding in the document's output: its parent's, times a scale."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * self.weight.new_ones(())


def test_torch_code_tracing_usage(capsys: pytest.CaptureFixture[str]) -> None:
    model = Scaled(9, 4, padding_idx=0).to(torch.bfloat16)
    execute(
        """
        from torch_code_tracing import TracingMode

        with TracingMode(succinct=True, color=True):
            out = model(*args, **kwargs)
        """,
        model=model, args=(torch.ones(2, 3, dtype=torch.int64),), kwargs={},
    )  # fmt: skip
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    # the form of the document's output: a line, a call below it, an op below that
    assert re.search(r"^│ ⬇️$", shown, re.MULTILINE)
    lines = [line.lstrip("│ ") for line in shown.splitlines()]
    at = next(at for at, line in enumerate(lines) if line.startswith("return super().forward(input_ids) * "))
    assert re.fullmatch(r".*  # \S+:\d+ in forward:", lines[at])
    assert lines[at + 1] == "# embedding(bf16[9, 4], i64[2, 3], 0) -> bf16[2, 3, 4];"
    assert lines[-1] == "# mul.Tensor(bf16[2, 3, 4], bf16[]) -> bf16[2, 3, 4];"


# -- tracy_nn: its readme and its page -----------------------------------------------------------------------


def test_tracy_nn_start_and_stop(capsys: pytest.CaptureFixture[str]) -> None:
    """Both documents begin with it; the page shows its output."""
    execute(
        """
        import torch
        import torch.nn as nn
        from tracy_nn import Tracer

        x = torch.rand(batch_size, seq_len, d_in)
        mha = MHA()
        tracer = Tracer('M')
        tracer.start(mha)
        output = mha(x)
        tracer.stop()
        """,
        MHA=MHA, batch_size=10, seq_len=20, d_in=6,
    )  # fmt: skip
    lines = iter(line.strip() for line in capsys.readouterr().out.splitlines())
    assert all(wanted in lines for wanted in OUTPUT)  # each after the one before


@pytest.mark.parametrize(
    "first",
    [
        "from tracy_nn import Tracer\ntracer = Tracer('MyModel')\n",
        "from tracy_nn import trace_model\ntracer = trace_model(model, 'MyModel')\n",
    ],
    ids=["Tracer", "trace_model"],
)
def test_tracy_nn_context_manager(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = "with tracer.trace(model):\n    output = model(input_tensor)\n"
    scope = execute(first + block, model=nn.Sequential(nn.Linear(3, 2)), input_tensor=torch.ones(1, 3))
    assert scope["output"].shape == (1, 2)
    assert capsys.readouterr().out.splitlines() == [
        "  ● TRACING MyModel STARTED",
        "  │",
        "  ● 0 (Linear) (in_features: 3, out_features: 2)",
        "  ├─ Input: Tensor [1, 3] @ cpu",
        "  └─ Output: Tensor [1, 2] @ cpu",
        "  │",
        "  ● TRACING MyModel COMPLETE",
    ]


# -- torchspy ------------------------------------------------------------------------------------------------


def test_torchspy_saving_tensors(tmp_path: Path) -> None:
    execute(
        """
        from torchspy import TensorSaver, DebugContext
        from torchspy.saver import spy_save

        class MyModule(nn.Module):
            def __init__(self):
                super().__init__()
                self.proj_q = nn.Linear(4, 4)

            def forward(self, x):
                q = self.proj_q(x)
                spy_save("q", q, self)
                return q

        model = nn.Sequential(MyModule())
        saver = TensorSaver("./debug_tensors")
        saver.register_modules(model, target_classes=(MyModule,))
        model(inputs)  # outside: nothing

        with DebugContext(saver, prefix="step0"):
            output = model(inputs)
        """,
        nn=nn, inputs=torch.ones(1, 4),
    )  # fmt: skip
    assert [path.name for path in (tmp_path / "debug_tensors").iterdir()] == ["step0.0.q.call0.pt"]


def test_torchspy_tracing_module_calls(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)  # in train mode, which torch does not fuse
    scope = execute(
        """
        from torchspy import CallTracer

        tracer = CallTracer("./traces")
        tracer.register_hooks(model, target_classes=(nn.Linear,))
        output = model(inputs)
        tracer.save_trace("forward.txt")
        """,
        nn=nn, model=nn.TransformerEncoder(layer, 2), inputs=torch.ones(1, 2, 4),
    )  # fmt: skip
    scope["tracer"].remove_hooks()
    assert (tmp_path / "traces" / "forward.txt").read_text().splitlines() == [
        "layers.0.linear1",
        "layers.0.linear2",
        "layers.1.linear1",
        "layers.1.linear2",
    ]


# -- DLBacktrace, model tracing ------------------------------------------------------------------------------


class SimpleCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.pool(self.relu(self.conv(x))).flatten(1))
        return out


def test_dl_backtrace_tracing_with_a_dummy_input() -> None:
    """The document's first blocks: the call, and the nodes it lists."""
    scope = execute(
        """
        from dl_backtrace.pytorch_backtrace import DLBacktrace

        dummy_input = torch.randn(1, 3, 224, 224)
        dlb = DLBacktrace(
            model=model,
            input_for_graph=(dummy_input,)
        )
        """,
        torch=torch, model=SimpleCNN().eval(),
    )  # fmt: skip
    dlb = scope["dlb"]
    found = [(name, dlb.graph.nodes[name]["node_type"]) for name in dlb.layer_stack if name[:2] != "p_"]
    assert found == [
        ("x", "placeholder"),
        ("conv2d", "call_function"),
        ("relu", "call_function"),
        ("adaptive_avg_pool2d", "call_function"),
        ("flatten", "call_function"),
        ("linear", "call_function"),
        ("output", "output"),
    ]


def test_dl_backtrace_simple_model(capsys: pytest.CaptureFixture[str]) -> None:
    scope = execute(
        """
        import torch
        import torch.nn as nn
        from dl_backtrace.pytorch_backtrace import DLBacktrace

        model = SimpleCNN()
        model.eval()
        dummy_input = torch.randn(1, 3, 224, 224)
        dlb = DLBacktrace(
            model=model,
            input_for_graph=(dummy_input,),
            device="cpu"
        )
        print("traced")
        """,
        SimpleCNN=SimpleCNN,
    )
    assert capsys.readouterr().out == "traced\n"
    output = scope["dlb"].predict(scope["dummy_input"])["output"]["output_values"]
    torch.testing.assert_close(output, scope["model"](scope["dummy_input"]).detach())


def test_dl_backtrace_hyperparameters() -> None:
    """The document's dictionary of a convolution."""
    scope = execute(
        """
        from dl_backtrace.pytorch_backtrace import DLBacktrace
        dlb = DLBacktrace(model, torch.randn(1, 3, 8, 8))
        found = dlb.graph.nodes["conv2d"]["layer_hyperparams"]
        """,
        torch=torch, model=SimpleCNN().eval(),
    )  # fmt: skip
    found = {key: value for key, value in scope["found"].items() if key not in ("weight", "bias")}
    assert found == {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    assert scope["found"]["weight"] is scope["model"].conv.weight
    assert scope["found"]["bias"] is scope["model"].conv.bias


def test_dl_backtrace_multiple_inputs() -> None:
    class MultiInputModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image_encoder = SimpleCNN()
            self.metadata_encoder = nn.Linear(100, 4)
            self.classifier = nn.Linear(14, 2)

        def forward(self, image: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
            both = torch.cat([self.image_encoder(image), self.metadata_encoder(metadata)], dim=1)
            return self.classifier(both)  # type: ignore[no-any-return]

    scope = execute(
        """
        from dl_backtrace.pytorch_backtrace import DLBacktrace

        dummy_image = torch.randn(1, 3, 224, 224)
        dummy_metadata = torch.randn(1, 100)
        dlb = DLBacktrace(
            model=model,
            input_for_graph=(dummy_image, dummy_metadata)
        )
        node_io = dlb.predict(dummy_image, dummy_metadata)
        """,
        torch=torch, model=MultiInputModel().eval(),
    )  # fmt: skip
    node_io = scope["node_io"]
    assert node_io["output"]["output_values"].shape == (1, 2)
    assert len(node_io["cat"]["input_values"]) == 2


def test_dl_backtrace_another_sequence_length() -> None:
    scope = execute(
        """
        from dl_backtrace.pytorch_backtrace import DLBacktrace

        dummy_input = torch.randn(1, 128, 768)
        dlb = DLBacktrace(
            model=model,
            input_for_graph=(dummy_input,)
        )
        real_input = torch.randn(1, 256, 768)
        node_io = dlb.predict(real_input)
        """,
        torch=torch, model=nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 8), nn.Softmax(-1)).eval(),
    )  # fmt: skip
    output = scope["node_io"]["output"]["output_values"]
    assert output.shape == (1, 256, 8)
    torch.testing.assert_close(output, scope["model"](scope["real_input"]).detach())


def test_dl_backtrace_trace_once_and_use_many_times() -> None:
    batches = [torch.randn(size, 3, 16, 16) for size in (4, 4, 1)]
    scope = execute(
        """
        from dl_backtrace.pytorch_backtrace import DLBacktrace

        dlb = DLBacktrace(model=model, input_for_graph=(dummy_input,))
        sizes = []
        for input_batch in dataloader:
            node_io = dlb.predict(input_batch)
            sizes.append(node_io["output"]["output_values"].shape)
        """,
        model=SimpleCNN().eval(), dummy_input=torch.randn(4, 3, 16, 16), dataloader=batches,
    )  # fmt: skip
    assert scope["sizes"] == [(4, 10), (4, 10), (1, 10)]
