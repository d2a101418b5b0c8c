"""``sightline validate``: all of a recording is read, and what is wrong is said."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

import sightline as sl
from sightline.trace.bundle import save
from tests.builders import make_trace
from tests.cli.recorded import invoke, on_terminal, refused, told


def test_a_sound_recording(run: Path) -> None:
    trace = sl.load(run)
    counts = f"{len(trace.ops)} ops, {len(trace.values)} values, {len(trace.module_calls)} module calls"
    said = told("validate", run)
    assert said.startswith(f"{run} is sound: {counts}, ")
    assert "source file" in said
    assert f"{len(trace.tensors)} kept tensors of " in said


def test_a_recording_that_contradicts_itself(tmp_path: Path) -> None:
    data = make_trace().data
    start = data.calls.start.copy()
    start[0] = int(np.max(start)) + 10**9  # a call that begins after what runs in it
    save(replace(data, calls=replace(data.calls, start=start)), tmp_path / "run.sight")
    assert refused("validate", tmp_path / "run.sight").startswith("This recording contradicts itself: ")


def test_a_tensor_that_was_altered(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    shutil.copytree(run, path)
    shard = next(file for file in path.rglob("*") if file.is_file() and file.name != "rank0.db")
    shard.write_bytes(shard.read_bytes()[:-3])
    assert str(shard) in refused("validate", path)
    shard.unlink()
    assert refused("validate", path).startswith(f"{shard} is missing")


def test_the_exit_code_is_for_scripts(run: Path, tmp_path: Path) -> None:
    assert invoke("validate", run).exit_code == 0
    assert invoke("validate", tmp_path).exit_code == 1
    assert invoke("validate").exit_code == 2


def test_on_a_terminal_it_says_the_same(run: Path) -> None:
    seen, status = on_terminal("validate", run)
    assert status == 0
    assert told("validate", run).rstrip("\n") in seen
