"""Disks that fill up and working folders that go away while something is recorded."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.errors import CaptureError
from sightline.store.shards.shard_file import ShardFile
from tests.recording.engines import BOTH_ENGINES
from tests.store.bundles import all_views


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """Sets how large the files of this process may become."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[Path]:
    """A working folder that the test may remove."""
    before = Path.cwd()
    folder = tmp_path / "gone"
    folder.mkdir()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.mark.faults
@BOTH_ENGINES
@pytest.mark.parametrize("options", [{}, {"capture": True}, {"stats": True}, {"last": 50}])
def test_the_run_goes_on_where_files_cannot_grow(
    engine: Any, options: dict[str, Any], tmp_path: Path, limit_files: Callable[[int], None]
) -> None:
    model = torch.nn.Linear(64, 64)
    with sl.trace(model, path=tmp_path / "run.sight", engine=engine, **options) as t:
        limit_files((tmp_path / "run.sight" / "rank0.journal").stat().st_size + 40_000)
        for _ in range(40):
            model(torch.randn(8, 64)).sum().backward()
            time.sleep(0.02)
    assert len(t.module_calls) == (3 if "last" in options else 40)
    assert "No bundle was made: " in t.info["faults"][0]
    assert "rank0.journal stays" in t.info["faults"][0]
    loaded = sl.load(tmp_path / "run.sight")
    loaded.validate()
    assert 0 < len(loaded.ops) <= len(t.ops)
    for key in loaded.tensors:
        assert loaded.tensors[key].raw.nbytes


@pytest.mark.faults
@BOTH_ENGINES
@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
def test_tensors_that_could_not_be_written_are_not_in_the_recording(
    engine: Any, file_format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = torch.nn.Linear(64, 64), sl.Capture(format=file_format, on_error="report")
    full = threading.Event()

    def failing(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if full.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*arguments)

        return wrapped

    monkeypatch.setattr(torch, "save", failing(torch.save))
    monkeypatch.setattr(ShardFile, "add", failing(ShardFile.add))
    with sl.trace(model, path=tmp_path / "run.sight", engine=engine, capture=options) as t:
        model(torch.randn(8, 64))
        assert list(t.tensors) == ["Linear/output/0/0"]
        full.set()
        for _ in range(5):
            model(torch.randn(8, 64))
        assert list(t.tensors) == ["Linear/output/0/0"]
        full.clear()
    assert t.info["left_out"] == 5
    assert not [fault for fault in t.info["faults"] if "No bundle" in fault]
    t.save(tmp_path / "copy.sight")
    for recording in (t, sl.load(tmp_path / "run.sight"), sl.load(tmp_path / "copy.sight")):
        assert list(recording.tensors) == ["Linear/output/0/0"]
        assert recording.tensors["Linear/output/0/0"].raw.nbytes == 8 * 64 * 4
        assert len(recording.module_calls) == 6
        recording.validate()


@BOTH_ENGINES
def test_the_working_folder_is_removed(engine: Any, gone: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with sl.trace(model, path=tmp_path / "run.sight", engine=engine, capture=True) as t:
        model(torch.ones(1, 3))
        shutil.rmtree(gone)
        model(torch.ones(1, 3))
    assert t.info["faults"] == []
    assert len(sl.load(tmp_path / "run.sight").module_calls) == 2
    assert all(all_views(t).values())
    assert t._repr_html_()
    with pytest.raises(CaptureError, match=r"rel\.sight could not be written: No such file or directory"):
        t.save("rel.sight")
    with pytest.raises(CaptureError, match=r"No recording can be written to rel\.sight"):
        sl.trace(model, path="rel.sight").start()


@pytest.mark.faults
@BOTH_ENGINES
def test_the_folder_of_the_recording_is_removed_with_it(engine: Any, gone: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with sl.trace(model, path="run.sight", engine=engine) as t:
        model(torch.ones(1, 3))
        shutil.rmtree(gone)
        model(torch.ones(1, 3))
    assert len(t.module_calls) == 2
    assert "was removed while it was written to; nothing of it is on disk" in t.info["faults"][0]
    assert str(t)


def test_rows_are_read_after_the_working_folder_has_changed(gone: Path, tmp_path: Path) -> None:
    with sl.trace() as t:
        torch.ones(2).relu()
    t.save("run.sight")
    op = sl.load("run.sight").ops[0]
    os.chdir(tmp_path)
    assert op.name == t.ops[0].name
    assert gone.exists()


def in_a_process(answers: Any) -> None:
    """A process that is spawned begins without a recording."""
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    answers.put([name for name in os.listdir("/proc/self/fd") if _is_recording(name)])


def _is_recording(number: str) -> bool:
    try:
        return ".sight" in os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return False


@BOTH_ENGINES
def test_a_spawned_process_has_nothing_of_the_recording(engine: Any, tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    model = torch.nn.Linear(3, 2)
    with sl.trace(model, path=tmp_path / "run.sight", engine=engine) as t:
        answers = context.Queue()
        process = context.Process(target=in_a_process, args=(answers,))
        process.start()
        assert answers.get(timeout=120) == []
        process.join()
        model(torch.ones(1, 3))
    assert process.exitcode == 0
    assert len(t.module_calls) == 1
    assert len(sl.load(tmp_path / "run.sight").module_calls) == 1
