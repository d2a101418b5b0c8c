"""A save replaces a bundle in one step, whatever ends it; tensors are kept, shared or copied."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.data.trace_data import TraceData
from sightline.errors import CaptureError, DamagedFile, UsageError
from sightline.store import bundle_schema as schema
from sightline.store import load, save
from sightline.store import shard_files as tensorfiles
from sightline.store import writer as saving
from sightline.store.shards.stores import ShardStore
from tests.builders import make_trace
from tests.store.bundles import assert_same, captured
from tests.store.shards.captured import capture, some_bytes, written

ROOT = Path(__file__).parents[2]


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def tensors(data: TraceData) -> dict[str, bytes]:
    assert data.store is not None
    return {info.key: data.store.read(info.key).tobytes() for info in data.captures}


def in_shards(folder: Path) -> TraceData:
    infos = [capture("fc", value=1), capture("fc2", dtype="int64")]
    return replace(make_trace().data, captures=infos, store=ShardStore(written(folder, *infos)))


def test_saving_over_a_bundle_replaces_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    save(captured().data, path)
    first = files(path)
    save(captured(step="again").data, path)
    second = files(path)
    assert len(first) == len(second)
    assert not set(first) & set(second) - {"rank0.db"}  # new shards have new names
    assert tensors(load(path)) == tensors(captured(step="again").data)
    save(make_trace().data, path)
    assert files(path) == ["rank0.db"]
    assert_same(make_trace().data, load(path))


def test_shards_of_the_same_folder_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    data = in_shards(path / "tensors")
    before = {file: os.stat(path / file).st_ino for file in files(path)}
    save(data, path)
    assert {file: os.stat(path / file).st_ino for file in before} == before
    assert files(path) == sorted([*before, "rank0.db"])
    assert tensors(load(path)) == tensors(data)
    save(load(path), path)
    assert {file: os.stat(path / file).st_ino for file in before} == before


@pytest.mark.parametrize("links", [True, False])
def test_shards_of_another_folder_are_shared_or_copied(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError("no links here")

        monkeypatch.setattr(os, "link", refuse)
    data = in_shards(tmp_path / "elsewhere")
    path = tmp_path / "run.sight"
    save(data, path)
    there = {os.stat(file).st_ino for file in (tmp_path / "elsewhere").iterdir()}
    assert ({os.stat(file).st_ino for file in (path / "tensors").iterdir()} == there) is links
    assert tensors(load(path)) == tensors(data)
    save(in_shards(tmp_path / "more"), path)
    assert len(files(path)) == 3
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


STAGES = {
    "tensors": (tensorfiles, "ShardWriter"),
    "sources": (saving, "collect_sources"),
    "columns": (saving, "encode"),
    "disk": (saving, "sync"),
    "last moment": (saving, "_shards_of"),
}


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("bug")]
)
@pytest.mark.parametrize("stage", STAGES)
def test_whatever_ends_a_save_the_old_bundle_is_whole(
    stage: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.sight"
    save(captured().data, path)
    before = {file: (path / file).read_bytes() for file in files(path)}

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(*STAGES[stage], fail)
    expected = CaptureError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as raised:
        save(captured(step="new").data, path)
    if isinstance(error, OSError):
        assert str(raised.value) == f"{path} could not be written: No space left on device."
    assert {file: (path / file).read_bytes() for file in files(path)} == before
    assert not [entry for entry in path.rglob("*") if entry.name.startswith(".")]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CaptureError, match="could not be written: Not a directory"):
        save(make_trace().data, tmp_path / "file" / "run.sight")
    with pytest.raises(UsageError, match="is a file; a recording is saved to a folder"):
        save(make_trace().data, tmp_path / "file")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"other things in it, such as 'thesis.tex'; save to a new one"):
        save(make_trace().data, tmp_path)
    assert files(tmp_path) == ["thesis.tex"]


def test_other_files_in_a_bundle_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    save(captured().data, path)
    (path / "notes.txt").write_text("mine")
    (path / "tensors" / "q.pt").write_text("mine")
    (path / "rank1.db").write_text("another process's")
    save(make_trace().data, path)
    assert files(path) == ["notes.txt", "rank0.db", "rank1.db", "tensors/q.pt"]


def test_a_damaged_bundle_can_be_saved_over(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    save(captured().data, path)
    (path / "rank0.db").write_bytes(b"rubbish")
    save(captured().data, path)
    assert tensors(load(path)) == tensors(captured().data)


def test_who_has_a_bundle_open_goes_on_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    save(make_trace(2).data, path)
    loaded = load(path)
    save(make_trace(4).data, path)
    assert_same(make_trace(2).data, loaded)
    assert_same(make_trace(4).data, load(path))


def test_tensors_that_cannot_be_read_end_the_save(tmp_path: Path) -> None:
    data = in_shards(tmp_path / "elsewhere")
    for file in (tmp_path / "elsewhere").iterdir():
        file.write_bytes(b"rubbish")
    with pytest.raises(DamagedFile):
        save(data, tmp_path / "run.sight")
    assert not files(tmp_path / "run.sight")


def test_a_recording_of_one_op_in_a_loop_stays_far_below_the_limit_of_growth(tmp_path: Path) -> None:
    x = torch.zeros(2)
    with sl.trace(ops="aten") as t:
        for _ in range(3000):
            x.add_(1)
    t.save(tmp_path / "run.sight")
    size = (tmp_path / "run.sight" / schema.DATABASE).stat().st_size
    assert schema.decoded_bytes(dict(load(tmp_path / "run.sight").counts)) < schema.GROWTH * size / 4


READER = """
import sys
from pathlib import Path
from sightline.store import load
from sightline.errors import DamagedFile
path, seen, lost = sys.argv[1], set(), 0
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    data = load(path)
    ops = len(data.ops)
    assert len(data.ops.name) == len(data.ops.frame) == len(data.ops.input_offsets) - 1 == ops
    assert len(data.names) and len(data.values.kind) == len(data.values)
    steps = {info.step for info in data.captures}
    assert len(steps) <= 1, steps
    try:
        for info in data.captures:
            data.store.read(info.key)
    except DamagedFile as error:
        assert "saved over" in str(error), error
        lost += 1
    seen.add(ops)
print(len(seen), lost)
"""


@pytest.mark.parametrize("readers", [2])
def test_saving_while_others_read(readers: int, tmp_path: Path) -> None:
    path, stop = tmp_path / "run.sight", tmp_path / "stop"
    turns = [captured().data, captured(step="b").data, make_trace(4).data]
    save(turns[0], path)
    command = [sys.executable, "-c", READER, str(path), str(stop)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
        for _ in range(readers)
    ]  # fmt: skip
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for turn in range(60):
            save(turns[turn % len(turns)], path)
    finally:
        stop.touch()
        results = [process.communicate(timeout=60) for process in running]
    for process, (out, err) in zip(running, results, strict=True):
        assert process.returncode == 0, err
        assert int(out.split()[0]) >= 1


def test_saving_at_the_same_time_leaves_one_of_them(tmp_path: Path) -> None:
    script = (
        "import sys; from sightline.store import load, save\n"
        "data = load(sys.argv[1])\n"
        "for _ in range(15): save(data, sys.argv[2])"
    )
    sources = []
    for step in ("a", "b"):
        sources.append(tmp_path / f"{step}.sight")
        save(captured(step=step).data, sources[-1])
    path = tmp_path / "run.sight"
    running = [
        subprocess.Popen([sys.executable, "-c", script, str(source), str(path)],
                         env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
        for source in sources
    ]  # fmt: skip
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    found = tensors(load(path))
    assert found in (tensors(captured(step="a").data), tensors(captured(step="b").data))
    assert len(files(path)) == 5  # nothing of the others is left


def test_a_key_that_looks_like_a_path_is_none(tmp_path: Path) -> None:
    info = capture("../../../x", "/etc/passwd")
    data = replace(make_trace().data, captures=[info], store=_Held({info.key: some_bytes(info)}))
    save(data, tmp_path / "deep" / "run.sight")
    assert files(tmp_path) == ["deep/run.sight/rank0.db", "deep/run.sight/tensors/000000.safetensors"]


class _Held:
    def __init__(self, held: dict[str, Any]) -> None:
        self.read = held.__getitem__
