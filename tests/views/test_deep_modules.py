"""Modules nested deeper than Python's calls may be: every view, graph and converter has something to say."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.errors import SightlineError
from tests.fuzz.consumers import consumers

DEEP = 1200  # CPython 3.13 limits calls of C too, to some 1,400 modules


class Nested(nn.Module):
    """A module in a module, and so on."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1 if self.inner is None else self.inner(x)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a model that needs a larger stack than there is by default."""
    path = tmp_path_factory.mktemp("deep") / "run.sight"

    def record() -> None:
        model = Nested(None)
        for _ in range(DEEP - 1):
            model = Nested(model)
        with sl.trace(model, path=path):
            model(torch.ones(2))

    limit, size = sys.getrecursionlimit(), threading.stack_size(512 << 20)
    sys.setrecursionlimit(20 * DEEP)
    try:
        thread = threading.Thread(target=record)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    return path


def test_every_reader_has_an_answer(recorded: Path, tmp_path: Path) -> None:
    trace = sl.load(recorded)
    assert len(trace.module_calls) == DEEP
    failed = {}
    for name, read in consumers(trace, recorded, tmp_path).items():
        try:
            read()
        except SightlineError:
            pass
        except RecursionError as error:
            failed[name] = error
    assert not failed


@pytest.mark.parametrize("given", [{}, {"fold": True}, {"depth": DEEP - 1}])
def test_a_graph_has_every_form(recorded: Path, given: dict[str, int]) -> None:
    graph = sl.load(recorded).graph(**given)  # type: ignore[arg-type]
    assert graph.to_dot().count("subgraph") == graph.to_mermaid().count("subgraph")
    assert graph.to_networkx().number_of_nodes() == len(graph.nodes)
