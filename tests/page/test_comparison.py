from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import sightline as sl
from sightline.page import document as documents
from sightline.page.comparison import LINE, MODULE, OP, comparison_payload
from tests.page.packed import blocks_in, unpacked


@pytest.fixture(autouse=True)
def _viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_viewer_file", lambda name: f"/* {name} */")


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, eps=eps)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.fc(x))
        if self.extra:
            torch.tanh(y)
        result: torch.Tensor = y * 2
        return result


def compared(first: nn.Module, second: nn.Module) -> sl.Diff:
    return sl.diff(first, second, torch.arange(8.0).view(2, 4))


def rows(page: dict[str, Any], kind: int) -> list[int]:
    return [row for row, each in enumerate(page["rows.kind"]) if each == kind]


def test_the_verdict_names_the_divergence_with_both_lines() -> None:
    page = unpacked(comparison_payload(compared(Net(), Net(eps=0.1)).comparison))
    verdict = page["verdict"]
    assert verdict["verdict"] == "different"
    [found] = verdict["divergences"]
    assert found["reason"] == "eps 1e-05 against 0.1"
    assert found["inputs"] == "inputs are the same"
    assert found["a"]["code"] == found["b"]["code"] == "y = self.norm(self.fc(x))"


def test_the_rows_are_modules_lines_and_ops_in_order() -> None:
    d = compared(Net(), Net(eps=0.1))
    page = unpacked(comparison_payload(d.comparison))
    names = [(d.a.ops[int(page["rows.a"][row])].name, d.b.ops[int(page["rows.b"][row])].name)
             for row in rows(page, OP)]  # fmt: skip
    assert names == [(name, name) for name in ("addmm", "native_layer_norm", "mul.Tensor")]
    assert [int(page["rows.state"][row]) for row in rows(page, OP)] == [1, 3, 3]  # same, different, different
    [first] = [row for row in rows(page, OP) if page["rows.first"][row]]
    assert names[rows(page, OP).index(first)][0] == "native_layer_norm"
    paths = [d.a.module_calls[int(page["rows.a"][row])].module.label for row in rows(page, MODULE)]
    assert paths == ["fc", "norm", "Net"]
    assert len(rows(page, LINE)) == 3


def test_an_op_of_one_side_only_stands_where_it_ran() -> None:
    page = unpacked(comparison_payload(compared(Net(), Net(extra=True)).comparison))
    lone = [row for row in rows(page, OP) if page["rows.a"][row] < 0]
    assert len(lone) == 1
    after = rows(page, OP)[rows(page, OP).index(lone[0]) + 1 :]
    assert len(after) == 1
    back = unpacked(comparison_payload(compared(Net(extra=True), Net()).comparison))
    assert [int(back["rows.b"][row]) < 0 for row in rows(back, OP)] == [False, False, True, False]


def test_the_error_of_each_module_is_there() -> None:
    page = unpacked(comparison_payload(compared(Net(), Net(eps=0.1)).comparison))
    errors = {row[0]: row[6] for row in page["modules"]}
    assert errors["fc"] == 0
    assert errors["norm"] > 0.01
    assert errors["Net"] > 0.01


@pytest.mark.parametrize(("stats", "verdict"), [(True, "same"), (None, "unknown")])
def test_runs_that_do_not_part_have_a_page(stats: bool | None, verdict: str, tmp_path: Path) -> None:
    model, x = Net(), torch.ones(2, 4)
    traces = []
    for _ in range(2):
        with sl.trace(model, stats=stats) as t:
            model(x)
        traces.append(t)
    d = sl.diff(*traces)
    d.html(tmp_path / "diff.html")
    blocks = blocks_in((tmp_path / "diff.html").read_text())
    assert list(blocks) == ["recording-a", "recording-b", "comparison"]
    assert blocks["comparison"]["verdict"]["verdict"] == verdict
    assert blocks["comparison"]["verdict"]["divergences"] == []
    assert blocks["recording-a"]["run"]["ops"] == len(d.a.ops)


def test_module_calls_alone_have_a_page() -> None:
    model, x = Net(), torch.ones(2, 4)
    with sl.trace(model, ops="none") as t:
        model(x)
    page = unpacked(comparison_payload(sl.diff(t, t).comparison))
    assert len(page["rows.kind"]) == 0
    assert page["modules"]


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    from sightline.cli import main

    d = compared(Net(), Net(eps=0.1))
    d.a.save(tmp_path / "a.sight")
    d.b.save(tmp_path / "b.sight")
    sides = [str(tmp_path / name) for name in ("a.sight", "b.sight")]
    ran = CliRunner().invoke(main, ["diff", *sides, "--html", str(tmp_path / "diff.html")])
    assert ran.exit_code == 0, ran.output
    assert "Wrote" in ran.stderr
    assert "eps 1e-05 against 0.1" in " ".join(ran.stdout.split())
    assert "comparison" in blocks_in((tmp_path / "diff.html").read_text())
