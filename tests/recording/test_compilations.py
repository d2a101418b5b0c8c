"""Waiting for a module to be imported: the program that imports it has no part in what goes wrong."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import sightline as sl
from sightline.recording.compilations import AfterImport, Compilations
from tests.recording.engines import BOTH_ENGINES


class Branches(nn.Module):
    """Two branches, whose results are a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x).tanh()


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


@BOTH_ENGINES
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_regions_are_counted_as_torch_counts_its_graphs(engine: Any, backend: str) -> None:
    """Neither backward passes nor frames without anything to compile are regions."""
    torch._dynamo.reset()
    net = Branches()
    compiled = torch.compile(net, backend=backend)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with sl.trace(net, engine=engine) as t:
            for _ in range(3):
                sum(compiled(torch.ones(2, 4))).sum().backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert t.info["compilations"] == graphs == 1
    assert "compiled  1 region in" in str(t)
