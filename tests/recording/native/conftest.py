"""A stand-in for the native engine, compiled once, and for the compiler."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sightline.recording import engine_choice
from sightline.recording.native import builder as compilation
from sightline.recording.native import compiler as toolchain
from sightline.recording.native import engine as build
from sightline.recording.native.builder import NAME
from sightline.recording.native.trusted_files import CACHE
from tests.recording.native.stand_in import FakeCompiler, builder, write_sources


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the user's cache or choices, nor what another test has loaded."""
    for name in ("CXX", "XDG_CACHE_HOME", engine_choice.ENGINE, toolchain.SANITIZE, "STAND_IN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_outcome", None)
    monkeypatch.setattr(engine_choice, "_has_warned", False)
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))  # restores what was there


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, really compiled, once for all tests."""
    if not any(map(shutil.which, toolchain.COMPILERS)):
        pytest.skip("no C++ compiler is on PATH")
    folder = tmp_path_factory.mktemp("stand-in")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        patch.delenv(toolchain.SANITIZE, raising=False)
        patch.setattr(compilation, "try_in_a_process", lambda path: None)
        return builder(write_sources(folder / "sources"), folder / "cache").build()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def fake(own_environment: None, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """Stands where the compiler stands, and nothing is tried in a process of its own."""
    monkeypatch.setattr(compilation, "try_in_a_process", lambda path: None)
    compiler = FakeCompiler(tmp_path / "fake++", built).does()
    monkeypatch.setenv("CXX", str(compiler.program))
    return compiler
