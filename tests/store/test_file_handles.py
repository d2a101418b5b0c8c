"""Files of recordings are closed as soon as nobody holds the trace, without a garbage collection."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.errors import DamagedFile
from sightline.store import checked_database, save
from tests.builders import make_trace
from tests.store.bundles import all_views

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files are counted in /proc")


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_files(folder: Path) -> list[str]:
    """The open files of this process in a folder."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the one that lists them
            continue
    return [target for target in targets if target.startswith(str(folder))]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(make_trace().data, tmp_path / "run.sight")
    return tmp_path / "run.sight"


USES: dict[str, Callable[[sl.Trace], Any]] = {
    "nothing": lambda t: None,
    "views": all_views,
    "rows": lambda t: [str(op) for op in t.ops],
    "graph": lambda t: t.graph().to_dot(),
    "validate": lambda t: t.validate(),
    "step": lambda t: str(t.step(0)) if len(t.steps) else str(t),
    "diff": lambda t: str(sl.diff(t, t)),
    "page": lambda t: t._repr_html_(),
}


@pytest.mark.parametrize("use", USES)
def test_a_loaded_trace(run: Path, use: str) -> None:
    t = sl.load(run)
    assert len(open_files(run)) == 1
    USES[use](t)
    del t
    assert open_files(run) == []


@pytest.mark.parametrize("options", [{}, {"capture": True}, {"last": 3}, {"stats": True}, {"source": False}])
@pytest.mark.parametrize("use", ["nothing", "views"])
def test_a_recording_with_a_path(tmp_path: Path, options: dict[str, Any], use: str) -> None:
    model = torch.nn.Linear(3, 2)

    def record(path: Path) -> None:
        with sl.trace(model, path=path, **options) as t:
            model(torch.ones(1, 3)).sum().backward()
        USES[use](t)
        assert len(open_files(tmp_path)) == 1

    for number in range(3):
        record(tmp_path / f"{number}.sight")
        assert open_files(tmp_path) == []


def test_rows_outlive_their_trace(run: Path) -> None:
    op = sl.load(run).ops[3]
    assert open_files(run) == []
    assert op.name == sl.load(run).ops[3].name
    assert op.outputs[0].shape
    assert open_files(run) == []


def test_rows_of_a_recording_that_was_replaced_say_so(run: Path) -> None:
    op, kept = sl.load(run).ops[3], sl.load(run)
    save(make_trace(3).data, run)
    with pytest.raises(DamagedFile, match=r"rank0\.db is damaged: it was replaced after it was opened\.$"):
        _ = op.name
    assert kept.ops[3].name  # a trace that is held goes on reading the old one


def test_many_traces_do_not_use_up_the_files_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_database, "_MOST_OPEN", 10)
    model = torch.nn.Linear(3, 2)
    kept = []
    for number in range(30):
        with sl.trace(model, path=tmp_path / f"{number}.sight") as t:
            model(torch.ones(1, 3))
        kept.append(t)
        assert len(open_files(tmp_path)) <= 11
    names = {tuple(op.name for op in t.ops) for t in kept}
    assert len(names) == 1
    assert all(str(t) for t in kept)


def test_a_trace_that_is_held_stays_open_however_many_others_come_and_go(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_database, "_MOST_OPEN", 3)
    kept = sl.load(run)
    for _ in range(10):
        sl.load(run)
    save(make_trace(3).data, run)
    assert kept.ops[3].name
