"""Advice names options that exist where it is read: in Python, or at a command."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sightline as sl
from sightline.cli import main
from sightline.cli.show import VIEWS
from sightline.data import not_recorded
from sightline.hints import Hint, for_command_line

SOURCE = Path(sl.__file__).parent
#: An option as Python spells it, in a text that is no part of `Hint`.
PYTHONS = re.compile(r'\b(stats=True|capture=True|(compiled|ops|check|time)="\w+")')
#: Python only: errors about arguments, the library's own integrations, help, notes that are stored.
NOT_ON_SCREENS = ("options.py", "integrations", "schema", "convert/tables.py", "explain/failure.py", "compat")
PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend="eager")
for step in range(3):
    compiled(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every ``Hint.kind(…)`` in the sources: its kind, and the call."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="Hint"), attr=kind)):
                    yield kind, node


def constants(kind: str) -> set[str]:
    """The names that hints of a kind are made of, where these are written down."""
    return {
        call.args[0].value for each, call in calls()
        if each == kind and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    }  # fmt: skip


def flags(command: str) -> set[str]:
    found = main.get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    return {flag for option in found.params for flag in (*option.opts, *option.secondary_opts)}


def test_options_of_recordings_exist_in_python_and_at_the_command() -> None:
    names = constants("recording")
    assert {"stats", "ops", "compiled"} <= names
    arguments = inspect.signature(sl.trace).parameters
    for name in names:
        assert name in arguments
        assert f"--{name}" in flags("run")


def test_options_and_views_exist_at_show() -> None:
    names = constants("option")
    assert {"step", "all", "module"} <= names
    views = {name: set(inspect.signature(getattr(sl.Trace, name)).parameters) for name in VIEWS.values()}
    graphs = flags("graph") | {"--kind"}  # a method of the graph, in Python alone
    for name in names:
        assert any(name in arguments for arguments in views.values()) or f"--{name}" in graphs, name
        assert f"--{name}" in flags("show") | graphs, name
    for name in constants("view"):
        assert callable(getattr(sl.Trace, name))
        with for_command_line():
            assert str(Hint.view(name)).removeprefix("--view ") in VIEWS


def test_texts_of_screens_spell_options_by_hints() -> None:
    wrong = []
    for file in SOURCE.rglob("*.py"):
        where = file.relative_to(SOURCE).as_posix()
        if where.startswith(NOT_ON_SCREENS):
            continue
        tree = ast.parse(file.read_text())
        hints = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Hint"
            for inner in ast.walk(node)
        }
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        wrong += [
            f"{where}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and PYTHONS.search(node.value)
            if id(node) not in hints | docs
        ]
    assert not wrong


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "train.py"
    path.write_text(PROGRAM)
    return path


def run(path: Path, *options: str) -> str:
    command = [sys.executable, "-m", "sightline", "run", "--force", *options, path.name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stderr.split())


def test_the_advice_after_a_run_works(compiled: Path) -> None:
    """Each option on the screen is one of the command in front of it."""
    text = run(compiled, "-o", "opaque.sight", "--no-stats")
    assert "compiled=" not in text
    assert "sightline run --compiled eager shows them" in text
    assert "sightline show --step 2 shows one" in text
    names = {op.name for op in sl.load(compiled.parent / "opaque.sight").ops}
    assert not any(name.startswith("addmm") for name in names)
    text = run(compiled, "-o", "eager.sight", "--compiled", "eager")
    assert "not seen" not in text
    names = {op.name for op in sl.load(compiled.parent / "eager.sight").ops}
    assert any(name.startswith("addmm") for name in names)


def test_advice_about_compiled_code_is_that_of_its_reader() -> None:
    with sl.trace() as t:
        model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
        model(torch.ones(1, 2))

    def texts() -> list[str]:
        views = str(t), str(t.problems()), not_recorded.compiled(t.data)
        return [" ".join(text.split()) for text in views]

    assert all('compiled="eager"' in text for text in texts())
    with for_command_line():
        assert all("sightline run --compiled eager" in text for text in texts())
        assert not any("compiled=" in text for text in texts())
