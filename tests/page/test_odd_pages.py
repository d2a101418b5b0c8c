"""Pages of recordings with little or nothing in them: each shows its content, and nothing on it fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import sightline as sl
from tests.builders import TraceBuilder
from tests.page.browser import OpenPage
from tests.page.conftest import Opener
from tests.views.odd_traces import crashed, nested


def walked(page: OpenPage) -> dict[str, str]:
    """The text of each view of a page."""
    texts = {}
    for tab in ("problems", "graph", "source", "cost"):
        page.page.click(f"#tab-{tab}")
        texts[tab] = page.text("#tab-panel")
        assert page.barriers() == []
    return texts


def test_an_empty_recording(opened: Opener) -> None:
    page = opened(TraceBuilder().build())
    assert "0 ops" in page.text(".header")
    assert "Nothing was recorded in this run." in page.text("#tree")
    said = walked(page)
    assert said["graph"].endswith("Nothing runs in here.")
    assert said["source"] == "No source lines were recorded in this run."
    assert said["cost"].endswith("Nothing was measured in this run.")


def test_one_without_sources(opened: Opener) -> None:
    scope: dict[str, object] = {"torch": torch}
    exec(compile("def work(x):\n    return torch.relu(x) + 1\n", "/nowhere/lost.py", "exec"), scope)
    work = scope["work"]
    assert callable(work)
    with sl.trace() as t:
        work(torch.ones(3))
    page = opened(t)
    page.page.fill("#search", "lost.py:2")
    page.page.keyboard.press("Enter")
    said = walked(page)
    assert "its text is not in the recording" in said["source"]
    assert "lost.py:2" in page.text(".detail")
    page.page.click("#tab-source")
    assert "relu" in page.line()


def test_one_without_any_line(opened: Opener) -> None:
    b = TraceBuilder()
    b.op("relu", b.value(2), out=(2,))
    page = opened(b.build())
    assert walked(page)["source"] == "No source lines were recorded in this run."
    page.page.click("#tree .row")
    assert "relu" in page.text(".detail h2")


def test_one_with_a_single_op(opened: Opener) -> None:
    with sl.trace(ops="aten", name="single") as t:
        torch.ones(2)
    page = opened(t)
    assert "1 op" in page.text(".header")
    said = walked(page)
    assert "ones" in said["graph"]
    assert "ones" in said["cost"]


def test_one_of_module_calls_alone(opened: Opener) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with sl.trace(model, ops="none") as t:
        model(torch.ones(1, 2))
    page = opened(t)
    assert "Sequential" in page.text("#tree")
    walked(page)


def test_one_that_a_crash_cut_off(opened: Opener, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    recording = sl.trace(model, path=tmp_path / "run.sight", name="killed")
    recording.start()
    try:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
        shutil.copytree(tmp_path / "run.sight", tmp_path / "left.sight")  # as a killed process leaves it
    finally:
        recording.stop()
    page = opened(sl.load(tmp_path / "left.sight"))
    assert "cut short" in page.text(".header")
    walked(page)


def test_one_that_an_exception_ended_selects_the_op_that_raised(opened: Opener) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2)), torch.ones(1, 3)
    with pytest.raises(RuntimeError), sl.trace(model) as t:
        model(x)
    page = opened(t)
    assert page.page.get_attribute("#tab-problems", "aria-selected") == "true"
    assert "mat1 and mat2 shapes cannot be multiplied" in page.text(".problem")
    assert "addmm" in page.text(".detail h2")
    assert "f32[1, 4]" in page.text(".detail")
    walked(page)


@pytest.mark.parametrize("make", [crashed, nested])
def test_odd_shapes_of_runs(opened: Opener, make: object) -> None:
    assert callable(make)
    walked(opened(make()))
