"""`TracingMode`: the lines it prints, the traces it keeps, and a script written for the other package."""

from __future__ import annotations

import importlib
import inspect
import io
import linecache
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline.compat.torch_code_tracing as adapter
from sightline.compat.torch_code_tracing import TracingMode

torch.set_num_threads(1)

STEP = re.compile(r"^(│ )*")
SOURCE = re.compile(r"^(?:(?P<code>\S.*\S|\S)?  )?# (?P<file>\S+):(?P<line>\d+) in (?P<function>[\w<>]+):$")
OP = re.compile(r"^# (⟵ )?[\w.]+\(.*\)( -> .+)?;$")
ANSI = re.compile(r"\x1b\[[\d;]*m")


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor().to(self.weight.dtype)

    def factor(self) -> torch.Tensor:
        return self.weight.new_zeros(())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Scaled(7, 4, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).relu() + 1
        return self.mask(x)

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        full = torch.full([2, 3], -1.5, dtype=torch.bfloat16, device=x.device)
        return x + torch.triu(full, diagonal=1)[..., None]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def language_model(request: pytest.FixtureRequest) -> Any:
    """A tiny model; made once and early, since transformers leaves things behind while it makes one."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    if request.param == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    config = transformers.Gemma3TextConfig(pad_token_id=0, **sizes)
    return transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).eval()


def checked(text: str) -> list[str]:
    """The lines, each of them of a documented form and as deep as the ones before allow."""
    lines = text.splitlines()
    open_, arrow = 0, False
    for line in lines:
        if line.startswith("── "):
            open_, arrow = 0, False
            continue
        lead = STEP.match(line)
        assert lead is not None
        depth, rest = len(lead[0]) // 2, line[len(lead[0]) :]
        if rest == "⬇️":
            assert depth == open_
            arrow = True
        elif OP.match(rest):
            assert depth == open_
            assert not arrow
        else:
            assert SOURCE.match(rest), line
            assert depth == open_ if arrow else depth < max(open_, 1), line
            open_, arrow = depth + 1, False
    return lines


def bare(lines: list[str]) -> list[str]:
    """The lines without folders and line numbers, which depend on where the tests run."""
    return [re.sub(r"# \S*?(\w+\.py):\d+ in ", r"# \1 in ", line) for line in lines]


def test_a_block_prints_ops_under_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net().to("meta", torch.bfloat16)
    args, kwargs = (torch.zeros(2, 3, dtype=torch.int64, device="meta"),), dict[str, Any]()
    with TracingMode(succinct=True, color=False):
        out = model(*args, **kwargs)
    assert out.shape == (2, 3, 4)
    here = "test_torch_code_tracing.py in"
    lines = bare(checked(capsys.readouterr().out))
    scaled = f"│ │ return super().forward(ids) * self.factor().to(self.weight.dtype)  # {here} forward:"
    assert lines[:13] == [
        f"out = model(*args, **kwargs)  # {here} test_a_block_prints_ops_under_their_lines:",
        "│ ⬇️",
        f"│ x = self.embed(ids)  # {here} forward:",
        "│ │ ⬇️",
        scaled,
        "│ │ │ # embedding(bf16[7, 4], i64[2, 3], 0) -> bf16[2, 3, 4];",
        "│ │ │ ⬇️",
        f"│ │ │ return self.weight.new_zeros(())  # {here} factor:",
        "│ │ │ │ # new_zeros(bf16[7, 4], [], pin_memory=False) -> bf16[];",
        scaled,
        "│ │ │ # mul.Tensor(bf16[2, 3, 4], bf16[]) -> bf16[2, 3, 4];",
        f"│ x = layer(x).relu() + 1  # {here} forward:",
        "│ │ # t(bf16[4, 4]) -> bf16[4, 4];",
    ]
    full = "full([2, 3], -1.5, dtype=torch.bfloat16, device=meta, pin_memory=False) -> bf16[2, 3];"
    assert f"│ │ │ # {full}" in lines
    assert "│ │ │ # triu(bf16[2, 3], 1) -> bf16[2, 3];" in lines
    assert sum("layer(x)" in line for line in lines) == 1


def test_colour_is_on_unless_it_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    with TracingMode() as mode:
        torch.ones(2).neg()
    shown = capsys.readouterr().out
    assert "\x1b[1mtorch.ones(2)" in shown
    assert "\x1b[2m#" in shown
    assert ANSI.sub("", shown) == mode.format() + "\n"
    assert "\x1b" not in mode.format()
    assert ANSI.sub("", mode.format(color=True)) == mode.format()
    assert mode.format(color=True) + "\n" == shown


def test_succinct_shares_a_line_and_otherwise_an_expression(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2)
    y = x
    for succinct, count in ((True, 1), (False, 3)):
        with TracingMode(succinct=succinct, color=False) as mode:
            y = x.neg().exp() + 1
        live = capsys.readouterr().out
        assert len(checked(live)) == 3 + count
        assert live.count("y = x.neg().exp() + 1  # ") == count
        assert mode.format(succinct=succinct) + "\n" == live
        mode.print(succinct=succinct)
        assert capsys.readouterr().out == live
        mode.print(succinct=not succinct)
        assert capsys.readouterr().out == mode.format(succinct=not succinct) + "\n" != live
        mode.print()
        assert capsys.readouterr().out == mode.format(succinct=True) + "\n"
    assert y.shape == (2,)


def test_two_expressions_of_one_line_that_call_into_torch() -> None:
    embed = Scaled(7, 4, padding_idx=0)
    embed.factor = embed.weight.sum  # type: ignore[method-assign]  # nothing of ours on the way
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with torch.no_grad(), TracingMode(quiet=True) as mode:
        embed(ids)
    lines = bare(checked(mode.format(succinct=False)))[2:]
    assert lines[0::2] == [lines[0]] * 3
    assert lines[0].startswith("│ return super().forward(ids) * self.factor()")
    assert lines[1::2] == [
        "│ │ # embedding(f32[7, 4], i64[2, 3], 0) -> f32[2, 3, 4];",
        "│ │ # sum(f32[7, 4]) -> f32[];",
        "│ │ # mul.Tensor(f32[2, 3, 4], f32[]) -> f32[2, 3, 4];",
    ]


def test_quiet_keeps_the_ops_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with TracingMode(quiet=True) as mode:
        torch.ones(2, 3).max(0)
        assert len(mode.traces) == 2
        torch.ones(1)
    assert capsys.readouterr().out == ""
    ones, maximum, _ = mode.traces
    assert ones.op_str == "ones([2, 3], device=cpu, pin_memory=False) -> f32[2, 3]"
    assert maximum.op_str == "max.dim(f32[2, 3], 0) -> (f32[3], i64[3])"
    frame = maximum.stack[-1]
    assert (frame.filename, frame.function) == (
        __file__,
        test_quiet_keeps_the_ops_and_prints_nothing.__name__,
    )
    assert isinstance(frame, inspect.FrameInfo)
    assert next(iter(frame)) is None  # a frame would keep its tensors alive
    assert frame.index == 0
    assert frame.code_context == ["        torch.ones(2, 3).max(0)\n"]
    assert linecache.getline(__file__, frame.lineno) == frame.code_context[0]
    assert frame.positions is not None
    assert frame.code_context[0][slice(*frame.positions[2:])] == "torch.ones(2, 3).max(0)"
    _, filename, lineno, function, context, _ = frame  # as FrameInfo is unpacked
    assert (filename, lineno, function, context) == (__file__, *frame[2:5])
    assert mode.traces is mode.traces


def test_the_arguments_have_the_other_tool_s_names_and_defaults() -> None:
    def defaults(function: Any) -> dict[str, Any]:
        found = inspect.signature(function).parameters
        return {name: one.default for name, one in found.items() if name != "self"}

    assert defaults(TracingMode) == {"quiet": False, "succinct": True, "color": True}
    assert defaults(TracingMode.format) == {"color": False, "succinct": True}
    assert defaults(TracingMode.print) == {"succinct": True}


def test_entering_again_adds_ops() -> None:
    mode = TracingMode(quiet=True)
    assert (mode.traces, mode.format()) == ([], "")
    for _ in range(2):
        with mode as entered:
            assert entered is mode
            torch.ones(1)
    assert [trace.op_str[:4] for trace in mode.traces] == ["ones", "ones"]


def test_a_mode_inside_itself_reports_each_op_twice_as_one_that_is_on_the_stack_of_torch_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mode, x = TracingMode(color=False), torch.ones(1)
    with mode:
        x.neg()
        with mode:
            x.cos()
            assert [trace.op_str[:3] for trace in mode.traces] == ["neg", "cos", "cos"]
            x.sin()
        x.exp()
    assert [trace.op_str[:3] for trace in mode.traces] == ["neg", "cos", "cos", "sin", "sin", "exp"]
    printed = [
        line.removeprefix("│ # ")[:3] for line in capsys.readouterr().out.splitlines() if "│ #" in line
    ]
    assert printed == ["neg", "cos", "cos", "sin", "sin", "exp"]


def test_traces_are_one_list_that_may_be_changed() -> None:
    mode, x = TracingMode(quiet=True), torch.ones(1)
    traces = mode.traces
    with mode:
        x.neg()
        mode.traces.clear()
        x.cos()
        assert [trace.op_str[:3] for trace in mode.traces] == ["cos"]
    assert mode.traces is traces
    assert mode.format().splitlines()[-1] == "│ # cos(f32[1]) -> f32[1];"
    mode.traces.clear()
    assert (mode.traces, mode.format()) == ([], "")
    with mode:
        x.sin()
    assert [trace.op_str[:3] for trace in traces] == ["sin"]


def test_backward_ops_have_the_lines_of_their_forward_ops(capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.ones(3, requires_grad=True)
    with TracingMode(color=False) as mode:
        loss = w.exp().sum()
        loss.backward()
    for text in (capsys.readouterr().out, mode.format()):
        lines = bare(checked(text))
        assert any(line.startswith("── backward ─") for line in lines)
        at = lines.index("│ # ⟵ mul.Tensor(f32[3], f32[3]) -> f32[3];")
        above = [line for line in lines[:at] if not line.startswith("│ #")]
        assert above[-1].startswith("loss = w.exp().sum()  # test_torch_code_tracing.py in ")


def test_results_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(2, 3)
    with TracingMode(color=False) as mode:
        x.split(1)
        torch._foreach_add_([x, x], 1.0)
        x.equal(x)
        torch.std_mean(x)
    found = [trace.op_str for trace in mode.traces]
    assert found == [
        "split.Tensor(f32[2, 3], 1) -> (f32[1, 3], f32[1, 3])",
        "_foreach_add_.Scalar([f32[2, 3], f32[2, 3]], 1.0) -> None",
        "equal(f32[2, 3], f32[2, 3]) -> True",
        "std_mean.correction(f32[2, 3]) -> (f32[], f32[])",
    ]
    shown = [line for line in checked(capsys.readouterr().out) if line.startswith("│ ")]
    assert shown == [f"│ # {text};" for text in found]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "complex64", "uint16", "bits8", "float4_e2m1fn_x2"])
def test_any_dtype_has_a_name(name: str) -> None:
    with TracingMode(quiet=True) as mode:
        torch.empty(2, dtype=getattr(torch, name))
    assert re.search(r" -> \w+\[2\]$", mode.traces[0].op_str)


def test_lists_are_written_out() -> None:
    with TracingMode(quiet=True) as mode:
        torch.cat([torch.ones(2)] * 5)
    assert mode.traces[-1].op_str == "cat([f32[2], f32[2], f32[2], f32[2], f32[2]]) -> f32[10]"
    assert "cat([f32[2], f32[2], f32[2], f32[2], f32[2]]) -> f32[10];" in mode.format()


def test_ops_before_an_exception_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), TracingMode(color=False) as mode:
        torch.ones(2, 3) @ torch.ones(2, 3)
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("# mm(f32[2, 3], f32[2, 3]) !! raised")
    assert mode.format() + "\n" == shown


def test_installed_files_are_shortened_and_torch_is_left_out(
    language_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    example: dict[str, Any] = {"input_ids": torch.tensor([[1, 2, 3]])}
    with torch.no_grad(), TracingMode(succinct=True, color=False) as mode:
        out = language_model(**example)
    shown = capsys.readouterr().out
    lines = checked(shown)
    assert mode.format() + "\n" == shown
    assert bare(lines)[0].startswith("out = language_model(**example)  # test_torch_code_tracing.py in ")
    files = {found["file"] for line in lines if (found := SOURCE.match(line.lstrip("│ ")))}
    name = language_model.config.model_type.removesuffix("_text")
    assert f"site-packages/transformers/models/{name}/modeling_{name}.py" in files
    assert not [file for file in files if file.startswith(("/", "site-packages/torch/"))]
    assert out.logits.shape == (1, 3, 32)
    at = next(at for at, line in enumerate(lines) if "# embedding(" in line)
    if name == "llama":
        assert lines[at].endswith("# embedding(f32[32, 16], i64[1, 3]) -> f32[1, 3, 16];")
    else:
        assert "return super().forward(input_ids) * self.embed_scale" in lines[at - 1]
        assert lines[at].endswith("# embedding(bf16[32, 16], i64[1, 3], 0) -> bf16[1, 3, 16];")
        assert lines[at + 1].endswith("# mul.Tensor(bf16[1, 3, 16], bf16[]) -> bf16[1, 3, 16];")


def test_the_other_packages_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_code_tracing", adapter)
    module = importlib.import_module("torch_code_tracing")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with module.TracingMode(color=False):
        torch.ones(2)
    assert out.getvalue().endswith("│ # ones([2], device=cpu, pin_memory=False) -> f32[2];\n")


def test_a_script_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import sightline.compat.torch_code_tracing
            sys.modules["torch_code_tracing"] = sightline.compat.torch_code_tracing
            import torch
            from torch_code_tracing import TracingMode
            def double(x):
                return x * 2
            x = torch.ones(2)
            with TracingMode(succinct=True, color=False):
                y = double(x)
            def block():
                with TracingMode(succinct=True, color=False):
                    y = double(x)
            block()
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines() == [
        "y = double(x)  # script.py:11 in <module>:",
        "│ ⬇️",
        "│ return x * 2  # script.py:8 in double:",
        "│ │ # mul.Tensor(f32[2], 2) -> f32[2];",
        "block()  # script.py:15 in <module>:",
        "│ ⬇️",
        "│ y = double(x)  # script.py:14 in block:",
        "│ │ ⬇️",
        "│ │ return x * 2  # script.py:8 in double:",
        "│ │ │ # mul.Tensor(f32[2], 2) -> f32[2];",
    ]
