"""Recordings that are unusual and honest: each verb shows them, none ends in a traceback."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import sightline as sl
from sightline.cli import main


def output(*arguments: str) -> str:
    ended = CliRunner().invoke(main, arguments)
    assert ended.exception is None, ended.output
    return ended.output


def test_ops_without_module_calls(tmp_path: Path) -> None:
    with sl.trace() as t:
        torch.ones(2).relu()
    t.save(tmp_path / "run.sight")
    rows = [json.loads(line) for line in output("ops", str(tmp_path / "run.sight"), "--json").splitlines()]
    assert len(rows) == len(t.ops)
    assert {row["module_call"] for row in rows} == {None}


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, by: int) -> torch.Tensor:
        return x + by % 7


def test_an_argument_of_five_thousand_digits(tmp_path: Path) -> None:
    model = Scaled()
    with sl.trace(model) as t:
        model(torch.ones(2), 10**5000)
    t.save(tmp_path / "run.sight")
    for trace in (t, sl.load(tmp_path / "run.sight")):
        views = [str(view) for view in (trace.code(fold=True), trace.log(), trace.summary())]
        assert "<an integer of 16610 bits>" in views[1]
        trace.graph(level="module").to_json()
        trace.to_perfetto().save(tmp_path / "run.json")
    assert output("show", str(tmp_path / "run.sight"), "--view", "log")


class Around(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_five_hundred_modules_inside_each_other(tmp_path: Path) -> None:
    model: torch.nn.Module = torch.nn.ReLU()
    for _ in range(500):
        model = Around(model)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        with sl.trace(model) as t:
            model(torch.ones(2))
    finally:
        sys.setrecursionlimit(before)
    t.save(tmp_path / "run.sight")
    for view in ("code", "summary", "log", "order"):
        ended = CliRunner().invoke(main, ["show", str(tmp_path / "run.sight"), "--view", view])
        assert ended.exception is None or isinstance(ended.exception, SystemExit), view


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_stop_from_another_thread(engine: str, tmp_path: Path) -> None:
    tracing = sl.trace(engine=engine, path=tmp_path / "run.sight")  # type: ignore[arg-type]
    tracing.start()
    torch.ones(2).relu()
    held: list[Any] = []

    def stop() -> None:
        try:
            held.append(tracing.stop())
        except BaseException as error:  # noqa: BLE001  # it is looked at below
            held.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert isinstance(held[0], sl.Trace), held
    assert len(held[0].ops) == 4
    torch.ones(2).relu()
    assert len(tracing.stop().ops) == 4
    assert held[0].validate().ops == 4
    with sl.trace(engine=engine):  # type: ignore[arg-type]  # the next one takes out what only this thread can
        pass


def test_a_report_counts_what_is_on_disk(tmp_path: Path) -> None:
    from sightline.cli.run import _count_ops
    from tests.fuzz.running import recorded_journal

    cut = recorded_journal(tmp_path / "cut.sight")
    with sl.trace() as t:
        torch.ones(2).relu()
    t.save(tmp_path / "whole.sight")
    assert _count_ops(t, tmp_path / "whole.sight") == "4 ops"
    kept = len(sl.load(cut).ops)
    assert _count_ops(t, cut) == f"{kept} of 4 ops"
