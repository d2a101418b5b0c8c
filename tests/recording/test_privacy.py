"""What a recording that is written while it runs holds, and who may read it."""

from __future__ import annotations

import copy
import os
import pickle
import stat
from pathlib import Path

import pytest
import torch

import sightline as sl
from sightline.errors import UsageError
from sightline.store.journal import JOURNAL, Journal


def traced(path: Path, **options: bool) -> sl.Trace:
    with sl.trace(path=path, capture=True, **options) as t:  # type: ignore[arg-type]
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    return t


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_only_the_owner_reads_a_recording(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        traced(tmp_path / "run.sight").save(tmp_path / "saved.sight")
        with sl.trace(capture=True) as t:
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
        t.save(tmp_path / "memory.sight")
    finally:
        os.umask(before)
    for name in ("run.sight", "saved.sight", "memory.sight"):
        for item in (tmp_path / name, *(tmp_path / name).rglob("*")):
            wanted = 0o700 if item.is_dir() else 0o600
            assert stat.S_IMODE(item.stat().st_mode) == wanted, item


def test_sources_and_environment_are_left_out_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: "a-host-nobody-knows")
    tracing = sl.trace(path=sl.Bundle(tmp_path / "run.sight", source=False, environment=False))
    t = tracing.start()
    torch.ones(2).relu()
    len(t.ops)
    journal = Journal(tmp_path / "run.sight" / JOURNAL)
    told = journal.heads()
    journal.close()
    assert all("sources" not in head and "torch" not in head["info"] for head in told)
    assert "a-host-nobody-knows" not in str(told)
    t = tracing.stop()
    assert "torch.ones(2).relu()" in str(t.code())  # here the file is at hand
    data = sl.load(tmp_path / "run.sight").data
    assert not data.environment  # type: ignore[attr-defined]
    assert not data.sources  # type: ignore[attr-defined]
    assert not {"torch", "python", "pid"} & data.info.keys()
    raw = (tmp_path / "run.sight" / "rank0.db").read_bytes()
    assert b"a-host-nobody-knows" not in raw
    with_both = traced(tmp_path / "both.sight")
    assert with_both.data.environment["host"] == "a-host-nobody-knows"  # type: ignore[attr-defined]


def test_the_options_of_a_bundle_need_a_path() -> None:
    with pytest.raises(UsageError, match=r"path=3 must be a path, or sl\.Bundle"):
        sl.trace(path=3)  # type: ignore[arg-type]


def test_what_stays_is_said(tmp_path: Path) -> None:
    line = traced(tmp_path / "run.sight").save(tmp_path / "a.sight", source=False, environment=False)
    assert "without sources and environment (names, paths, text arguments and errors" in line


def test_a_bundle_from_elsewhere_opens_no_file_here(tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("password = 'hunter2'\n" * 50)
    t = traced(tmp_path / "run.sight", source=False)
    data = t.data
    from dataclasses import replace

    codes = [replace(code, file=str(secret), first_line=1) for code in data.codes]
    from sightline.store import save

    save(replace(data, codes=codes), tmp_path / "foreign.sight", source=False)
    foreign = sl.load(tmp_path / "foreign.sight")
    views = (foreign.code(torch_frames=True), foreign.source(file="secret"), foreign.log(), foreign.summary())
    assert not any("hunter2" in str(view) for view in views)
    foreign.save(tmp_path / "again.sight")
    again = sl.load(tmp_path / "again.sight").data
    assert not again.sources  # type: ignore[attr-defined]


def test_a_trace_is_passed_on_as_a_file(tmp_path: Path) -> None:
    with sl.trace() as t:
        torch.ones(2).relu()
    with pytest.raises(UsageError, match="A recording is passed on as a file"):
        pickle.dumps(t)
    t.save(tmp_path / "run.sight")
    loaded = sl.load(tmp_path / "run.sight")
    assert len(pickle.loads(pickle.dumps(loaded)).ops) == len(t.ops)
    assert len(copy.copy(t).ops) == len(copy.deepcopy(t).ops) == len(t.ops)
