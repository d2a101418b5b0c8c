"""Where standard output is ASCII, everything prints, with readable substitutes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import sightline as sl

MODEL = """
import sys, torch, sightline as sl
class Schicht(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.größe = torch.nn.Linear(3, 3)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    def forward(self, x):
        return self.layers(self.größe(x))
torch.manual_seed(0)
model = Schicht()
def train(steps=3):
    for _ in range(steps):
        model(torch.randn(2, 3)).sum().backward()
"""


def run(code: str, folder: Path, encoding: str = "ascii") -> subprocess.CompletedProcess[str]:
    """Run a script whose standard output has an encoding, and which must not fail."""
    script = folder / "train.py"
    script.write_text(MODEL + textwrap.dedent(code), "utf-8")
    return python([str(script)], folder, encoding)


def python(arguments: list[str], folder: Path, encoding: str = "ascii") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=folder,
        capture_output=True,
        encoding="latin-1",
        check=False,
    )


PRINTED = """
with sl.trace(model, stats=True, capture=True) as t:
    with sl.step("schön"):
        train()
for shown in (
    t, t.code(), t.code(fold=True, names=True), t.log(), t.call_order(), t.summary(), t.source(), t.memory(),
    t.problems(), t.nonfinite(), t.lineage(t.values[-1]), t.graph(), t.graph(fold=True), sl.diff(t, t),
    t.ops, t.values, t.modules, t.steps, t.tensors, t.frames,
):
    print("##", type(shown).__name__)
    print(shown)
    print(repr(shown))
for op in t.ops:
    print(op, [str(value) for value in op.outputs], op.outputs and op.outputs[0].stats)
t.code().print(); t.print(); t.summary().print(color=True); sl.diff(t, t).print()
t.save("run.sight")
"""


PARTS = """
with sl.trace(model, stats=True, capture=True) as t:
    with sl.step("schön"):
        train()
with sl.trace(model, stats=True) as broken:
    model(torch.full((2, 3), float("nan"))).sum().backward()
d = sl.diff(t, broken)
exported = sl.export(model, (torch.randn(2, 3),))
ran = exported.run(torch.randn(2, 3))
def errors():
    for call in (
        lambda: t.ops["x"], lambda: t.tensors["x"], lambda: t.lineage("größ"), lambda: ran["größ"],
        lambda: t.code(module="grösse"), lambda: t.code(step="schon"), lambda: sl.Capture(when=1),
        lambda: sl.load("schön.sight"),
    ):
        try:
            call()
        except sl.SightlineError as error:
            yield error
raised = list(errors())
assert len(raised) == 8
for shown in (
    *t.steps, *t.modules, *t.module_calls, *t.values, *t.frames, t.step("schön"), d.divergence,
    d.divergences, d.divergence.reason, d.parameters, d.added, d.removed, t.lineage(t.values[-1]),
    exported, exported.dynamic, exported.verify(torch.randn(2, 3)), ran, exported.nodes, *raised,
):
    print(shown)
    print(repr(shown), [shown])
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_everything_prints(tmp_path: Path, encoding: str) -> None:
    done = run(PRINTED, tmp_path, encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii() == (encoding == "ascii")
    assert ("x3" if encoding == "ascii" else "\xd73") in done.stdout
    assert "\\x" not in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_every_part_and_error_prints(tmp_path: Path, encoding: str) -> None:
    done = run(PARTS, tmp_path, encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii() == (encoding == "ascii")
    assert ("<Step sch?n:" if encoding == "ascii" else "<Step sch\xf6n:") in done.stdout


def test_live_output_prints(tmp_path: Path) -> None:
    for live in ("code", "log"):
        done = run(f"with sl.trace(model, live={live!r}): train(1)", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()


def test_the_note_of_an_error_is_readable(tmp_path: Path) -> None:
    done = run("with sl.trace(model): model(torch.ones(2, 4))", tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    note = done.stderr[done.stderr.index("sightline: ") :]
    assert "\\u" not in note


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert run(PRINTED, folder).returncode == 0
    return folder


COMMANDS = [
    "show run.sight", "show run.sight --view summary", "show run.sight --view source", "ops run.sight",
    "ops run.sight --json", "ops run.sight --csv", "tensors run.sight", "lineage run.sight 3",
    "diff run.sight run.sight", "validate run.sight", "sql run.sight 'SELECT * FROM modules'",
    "graph run.sight", "convert run.sight --to json -o out.json", "html run.sight -o größe.html",
    "repair run.sight", "--help", "engine",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line(saved: Path, command: str) -> None:
    import shlex

    done = python(["-m", "sightline", *shlex.split(command)], saved)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).isascii()


def test_errors_of_the_command_line(saved: Path) -> None:
    done = python(["-m", "sightline", "show", "run.sight", "--module", "grö…"], saved)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.isascii()


def test_run_leaves_the_streams_of_the_script_alone(tmp_path: Path) -> None:
    code = """
    print(sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors)
    train(1)
    print("größe")
    """
    (tmp_path / "train.py").write_text(MODEL + textwrap.dedent(code), "utf-8")
    done = python(["-m", "sightline", "run", "-o", "out.sight", "train.py"], tmp_path)
    assert done.stdout.startswith("ascii strict backslashreplace\n")
    assert "UnicodeEncodeError" in done.stderr  # as without the trace
    assert done.stderr.isascii()
    assert "\\u2" not in done.stderr


def test_on_a_utf8_output_nothing_is_replaced() -> None:
    with sl.trace(torch.nn.Linear(3, 2)) as t:
        torch.ones(2, 3).relu()
    assert "─" in str(t) or "·" in str(t)
