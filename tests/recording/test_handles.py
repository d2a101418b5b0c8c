"""Files of a recording that is written while it runs: none is left open, and none is mistaken for another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.store.disk_sink import DiskSink

CLOSED = """
import os, sys, torch
import sightline as sl
folder = sys.argv[1]
tracing = sl.trace(path=folder + "/run.sight")
tracing.start()
torch.ones(2).relu()
from sightline.store.journal import JOURNAL
journal = os.stat(folder + "/run.sight/" + JOURNAL).st_ino
numbers = [n for n in range(3, 256) if os.path.exists(f"/proc/self/fd/{n}") and os.fstat(n).st_ino == journal]
assert numbers, "the journal is open"
os.closerange(min(numbers), max(numbers) + 1)
mine = os.open(folder + "/mine.txt", os.O_RDWR | os.O_CREAT)
while mine < max(numbers):
    mine = os.dup(mine)
assert mine in numbers
os.write(mine, b"the user's own")
torch.ones(2).relu()
t = tracing.stop()
assert os.fstat(mine).st_size == len(b"the user's own"), "it was written to"
assert len(t.ops) == len(sl.load(folder + "/run.sight").ops)
os.fstat(mine)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="it looks for the number of a file there")
def test_a_number_that_means_another_file_now_is_left_alone(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CLOSED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "mine.txt").read_bytes() == b"the user's own"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted there")
@pytest.mark.faults
def test_a_failing_finish_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.open
    opened = 0

    def failing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        nonlocal opened
        made = ".spool-" in str(path) and flags & os.O_CREAT
        opened += bool(made)
        if made and opened > 20:
            raise OSError(24, "Too many open files")
        return whole(path, flags, *args, **kwargs)

    before = len(os.listdir("/proc/self/fd"))
    tracing = sl.trace(path=tmp_path / "run.sight")
    tracing.start()
    torch.ones(2).relu()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing)
        t = tracing.stop()
    assert "Too many open files" in t.info["faults"][-1]
    assert len(t.ops) == 4
    assert len(os.listdir("/proc/self/fd")) == before
    assert not list((tmp_path / "run.sight").glob(".spool*"))


def test_a_spool_that_cannot_be_made_is_gone(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(FileExistsError):
        DiskSink(tmp_path / "x")
