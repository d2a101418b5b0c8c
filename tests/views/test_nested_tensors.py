"""Nested tensors, whose sizes are symbols or differ between their parts, in every view, table and file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.convert.query import TABLES_BY_NAME, Query


class Net(nn.Module):
    """Each call gets parts of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.act(self.norm(self.linear(x)))


def recorded(layout: Any) -> sl.Trace:
    torch.manual_seed(0)
    model = Net()
    with sl.trace(model, capture=True, stats=True) as t:
        for length in (3, 5, 2):
            parts = [torch.randn(length, 4), torch.randn(2, 4)]
            y = model(torch.nested.nested_tensor(parts, layout=layout))
            torch.nested.to_padded_tensor(y, 0.0).sum().backward()
    return t


@pytest.fixture(scope="module", params=["jagged", "strided"])
def trace(request: pytest.FixtureRequest) -> sl.Trace:
    return recorded(getattr(torch, request.param))


def test_calls_of_other_lengths_are_one_row(trace: sl.Trace) -> None:
    assert trace.info["faults"] == []
    trace.validate()
    text = str(trace.summary(width=None))
    assert "linear (Linear)" in text
    assert text.count("f32[2, *, 4] nested → f32[2, *, 4] nested") == 4
    assert "f32[2, *, 4] nested" in str(trace)


def test_every_view(trace: sl.Trace) -> None:
    views = [
        trace.code(), trace.log(), trace.call_order(), trace.memory(), trace.source(), trace.problems(),
        trace.nonfinite(), trace.code(fold=True), trace.log(fold=False),
        trace.lineage(trace.values[len(trace.values) - 1]),
    ]  # fmt: skip
    assert all(str(view) for view in views)
    assert all(view._repr_html_() for view in views)


def test_graphs_and_a_comparison(trace: sl.Trace, tmp_path: Path) -> None:
    for depth in (None, 1):
        graph = trace.graph(depth=depth)
        assert "linear" in graph.to_dot()
        assert graph.to_mermaid()
        assert graph.to_networkx().number_of_nodes()
        assert json.loads(graph.to_json())
        assert graph.to_model_explorer()
    assert str(sl.diff(trace, trace))
    trace.to_perfetto().save(tmp_path / "run.json")
    trace.html(tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size > 10_000


def test_tables_and_files(trace: sl.Trace, tmp_path: Path) -> None:
    for table in TABLES_BY_NAME:
        with Query(trace.index, f'select * from "{table}"', seconds=60) as query:
            assert len(query.names) == len(next(iter(query.rows), query.names))
    path = tmp_path / "run.sight"
    trace.save(path)
    loaded = sl.load(path)
    loaded.validate()
    assert str(loaded.summary(width=None)) == str(trace.summary(width=None))
    for arguments in (
        ["ops"],
        ["tensors"],
        ["show"],
        ["convert", "-o", str(tmp_path / "t.csv"), "--table", "values"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "sightline", arguments[0], str(path), *arguments[1:]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
