"""Requested data that was never recorded is reported: globs that matched nothing, tensors left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.unmatched_globs import unmatched


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        query: Tensor = sl.spy("query", self.attn(x))
        return query.relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def traced(**asked: Any) -> sl.Trace:
    net = Net()
    with sl.trace(net, **asked) as t:
        net(torch.ones(2, 4))
    return t


WRONG = [
    ({"capture": "blocks.*.atn"}, "Capture(modules='blocks.*.atn')", "; near: blocks.0.attn, blocks.1.attn"),
    ({"capture": ["blocks.0", "blocks"]}, "Capture(modules='blocks')", "; near: blocks.0, blocks.1"),
    ({"capture": sl.Capture(ops="relo")}, "Capture(ops='relo')", "; near: relu"),
    ({"capture": sl.Capture(names="qery")}, "Capture(names='qery')", "; near: query"),
    ({"stats": sl.Stats(modules="block.*")}, "Stats(modules='block.*')", "; near: blocks.0, blocks.1"),
    ({"stats": sl.Stats(ops="zzz")}, "Stats(ops='zzz')", ""),
    ({"check": sl.Check(allow="linaer")}, "Check(allow='linaer')", "; near: linear, F.linear"),
]


@pytest.mark.parametrize(("asked", "written", "near"), WRONG, ids=[written for _, written, _ in WRONG])
def test_a_glob_that_matched_nothing_is_told(
    asked: dict[str, Any], written: str, near: str, tmp_path: Path
) -> None:
    t = traced(**asked)
    told = f"{written} matched nothing{near}"
    assert f"asked     {told}" in str(t)
    assert told in str(t.problems(kind="unmatched"))
    if "capture" in asked:
        assert told in repr(t.tensors)
    t.save(tmp_path / "run.sight")
    assert [str(each) for each in unmatched(sl.load(tmp_path / "run.sight").data)] == [told]


RIGHT = [
    {"capture": ["blocks.*.attn", "blocks.0"]},
    {"capture": sl.Capture(modules="blocks", ops="relu", names="q*")},
    {"stats": sl.Stats(modules="blocks", ops=["addmm", "Tensor.relu", "relu"])},
    {"check": sl.Check(allow=["blocks", "relu", "Net"])},
    {"capture": True, "stats": True, "check": "nonfinite"},
]


@pytest.mark.parametrize("asked", RIGHT)
def test_a_glob_that_matched_is_not(asked: dict[str, Any]) -> None:
    t = traced(**asked)
    assert unmatched(t.data) == []
    assert "asked  " not in str(t)


def test_statistics_of_nothing_say_why_there_are_none() -> None:
    t = traced(stats=sl.Stats(modules="atn"))
    assert str(t.nonfinite()) == "Nothing was measured: Stats(modules='atn') matched nothing."
    assert "stats=True" not in str(t.problems())


def test_a_capture_of_nothing_says_so_when_a_tensor_is_asked_for() -> None:
    t = traced(capture=sl.Capture(modules="blocks.0.atn", names="nothing"))
    with pytest.raises(sl.NotCaptured, match=r"Capture\(modules='blocks.0.atn'\) matched nothing; near: "):
        t.tensors["blocks.0.attn"]


def test_after_an_exception_it_is_not_told_since_the_rest_did_not_run() -> None:
    net = Net()
    with pytest.raises(RuntimeError), sl.trace(net, capture="blocks.1") as t:
        net(torch.ones(2, 3))
    assert unmatched(t.data) == []


def test_tensors_beyond_the_limit_are_told() -> None:
    t = traced(capture=sl.Capture(max_bytes=40))
    assert "tensors   1 kept, 32 B · 6 left out by max_bytes=40" in str(t)
    assert repr(t.tensors) == "<1 captured tensor, 32 B: blocks.0.attn.output (6 left out by max_bytes=40)>"
    none = traced(capture=sl.Capture(max_bytes=3))
    assert "tensors   0 kept, 0 B · 7 left out by max_bytes=3" in str(none)
    assert repr(none.tensors) == "<0 captured tensors (7 left out by max_bytes=3)>"


@pytest.mark.parametrize(
    "asked", [None, 3, {"capture": 3}, {"capture": {"modules": "a"}}, {"stats": {"ops": [1]}}]
)
def test_a_file_that_says_nonsense_is_read_all_the_same(asked: Any) -> None:
    data = traced().data
    data.info["asked"] = asked
    assert unmatched(data) == []
