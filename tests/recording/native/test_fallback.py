"""A recording of the plain engine that nobody asked for says so, why, and how to have the other one."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.recording import engine_choice
from sightline.recording.native import compiler
from sightline.recording.native.builder import NAME
from tests.recording.native.comparison import SOURCE
from tests.recording.native.stand_in import FakeCompiler

SLOWER = "python: it is slower, and some gradients differ in their last bits (docs/limits.md)."


@pytest.fixture(autouse=True)
def nothing_loaded(own_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native engine was not loaded in this process, and its stand-in neither."""
    monkeypatch.delitem(sys.modules, NAME)


def first_screen(**options: Any) -> str:
    with sl.trace(**options) as t:
        torch.ones(2) + 1
    assert t.info["engine"] == "python"
    return " ".join(str(t).split())


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What is said where no compiler is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return "The native engine needs a C++ compiler, and none of g++, c++, clang++ is on PATH: install one"


def test_without_a_compiler(no_compiler: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f"engine {SLOWER} {no_compiler} (`apt-get install g++`" in first_screen()
        path = tmp_path / "run.sight"
        first_screen(path=path)
    assert f"engine {SLOWER} {no_compiler}" in " ".join(str(sl.load(path)).split())
    err = capsys.readouterr().err
    assert err.count("sightline: the plain engine records, which is slower. The native engine needs") == 1


def test_a_build_that_fails(fake: FakeCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    fake.does("exit 1")
    text = first_screen()
    assert f"engine {SLOWER} The native engine did not compile with fake++ 1.0: set CXX" in text
    assert "sightline engine --build" in text
    assert "the plain engine records" in capsys.readouterr().err


def test_a_python_that_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "PYTHONS", ((3, 9),))
    assert f"engine {SLOWER} The native engine is for CPython 3.9, and this is Python 3." in first_screen()
    assert "the plain engine records" in capsys.readouterr().err


def test_gradients_are_not_mentioned_where_they_are_the_same(no_compiler: str) -> None:
    assert f"engine python: it is slower (docs/limits.md). {no_compiler}" in first_screen(ops="api")


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_an_engine_that_was_asked_for_is_only_named(
    by: str, no_compiler: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if by == "environment":
        monkeypatch.setenv(engine_choice.ENGINE, "python")
    text = first_screen(**({"engine": "python"} if by == "argument" else {}))
    assert "· engine=python ·" in text
    assert "slower" not in text
    assert no_compiler not in text
    assert capsys.readouterr().err == ""


def test_one_of_several_local_processes_says_it(
    no_compiler: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    first_screen()
    assert capsys.readouterr().err == ""


def test_sightline_run_says_it(no_compiler: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)\n")
    command = [sys.executable, "-W", "error", "-m", "sightline", "run", "-o", "run.sight", str(script)]
    done = subprocess.run(
        command,
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([1, 2])\n"
    assert done.stderr.startswith(f"sightline: the plain engine records, which is slower. {no_compiler}")
    assert f"engine {SLOWER}" in " ".join(done.stderr.split())
