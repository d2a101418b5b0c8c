"""Waiting for a module to be imported: the program that imports it has no part in what goes wrong."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sightline.recording.compilations import AfterImport, Compilations


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that was never imported."""
    (tmp_path / "waited_for.py").write_text("made = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "waited_for", raising=False)
    return "waited_for"


def recording() -> tuple[Any, list[Exception]]:
    """A recording that only counts its faults."""
    faults: list[Exception] = []
    return SimpleNamespace(note_fault=faults.append), faults


def test_it_is_told_once_the_module_is_there(module: str) -> None:
    told: list[ModuleType] = []
    wait = AfterImport(module, told.append, list)
    wait.install()
    try:
        assert not told
        assert importlib.import_module(module).made == 1
    finally:
        wait.remove()
    assert [one.made for one in told] == [1]
    assert wait not in sys.meta_path


def test_what_fails_there_is_a_fault_of_the_recording(module: str) -> None:
    session, faults = recording()

    def fails(found: ModuleType) -> None:
        raise AttributeError(f"{found.__name__} has no callbacks any more")

    for _ in range(2):  # while it is imported, and when it was
        wait = AfterImport(module, fails, lambda: [session])
        wait.install()
        try:
            assert importlib.import_module(module).made == 1
        finally:
            wait.remove()
    assert [str(fault) for fault in faults] == ["waited_for has no callbacks any more"] * 2


def test_a_compilation_goes_on_though_it_cannot_be_noted() -> None:
    session, faults = recording()

    def fails(*_: object) -> None:
        raise RuntimeError("not now")

    session.note_compilation = fails
    watch = Compilations(lambda: [session], fails)
    watch._start()
    watch._end()
    assert [str(fault) for fault in faults] == ["not now"] * 2
