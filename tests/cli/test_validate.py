"""``sightline validate``: all of a recording is read, and errors are reported."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import sightline as sl
from sightline.store import save
from tests.builders import make_trace
from tests.cli.recorded import cli, invoke, on_terminal, refused


def test_a_sound_recording(run: Path) -> None:
    trace = sl.load(run)
    counts = f"{len(trace.ops)} ops, {len(trace.values)} values, {len(trace.module_calls)} module calls"
    text = cli("validate", run)
    assert text.startswith(f"{run} is sound: {counts}, ")
    assert "source file" in text
    assert f"{len(trace.tensors)} kept tensors of " in text


def test_a_recording_that_contradicts_itself(tmp_path: Path) -> None:
    data = make_trace().data
    order = data.calls.order[::-1].copy()  # a call ends before the calls inside it
    with pytest.warns(UserWarning, match="call 3 ends after its parent"):
        save(replace(data, calls=replace(data.calls, order=order)), tmp_path / "run.sight")
    assert refused("validate", tmp_path / "run.sight").startswith("This recording contradicts itself: ")


def test_a_tensor_that_was_altered(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    shutil.copytree(run, path)
    shard = next(file for file in path.rglob("*") if file.is_file() and file.name != "rank0.db")
    shard.write_bytes(shard.read_bytes()[:-3])
    assert str(shard) in refused("validate", path)
    shard.unlink()
    assert refused("validate", path).startswith(f"{shard} is missing")


def test_a_byte_in_any_chunk(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    shutil.copytree(run, path)
    database = sqlite3.connect(path / "rank0.db", isolation_level=None)
    chunks = database.execute("SELECT kind, name, number, data FROM chunks").fetchall()
    assert len(chunks) > 50
    change = "UPDATE chunks SET data = ? WHERE kind = ? AND name = ? AND number = ?"
    missed = []
    for kind, name, number, data in chunks:
        altered = bytearray(data)
        altered[len(data) // 2] ^= 0x10
        database.execute(change, (bytes(altered), kind, name, number))
        text = invoke("validate", path)
        if text.exit_code != 1 or f"{kind}/{name}/{number} was altered" not in text.stderr:
            missed.append(f"{kind}/{name}")
        database.execute(change, (data, kind, name, number))
    database.close()
    assert missed == []
    assert "is sound" in cli("validate", path)


def test_a_recording_that_was_not_finished(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, torch, sightline as sl
        from sightline.recording.streaming import writer as stream_writer
        stream_writer.SECONDS = 0.01
        model = torch.nn.Linear(2, 2)
        with sl.trace(model, path=sys.argv[1], capture=True) as t:
            model(torch.ones(1, 2))
            t.data
            os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "run.sight"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert cli("validate", path).startswith(
        f"{path} is sound, but not finished: 5 ops, 5 values, 1 module call, "
    )


def test_the_exit_code_is_for_scripts(run: Path, tmp_path: Path) -> None:
    assert invoke("validate", run).exit_code == 0
    assert invoke("validate", tmp_path).exit_code == 1
    assert invoke("validate").exit_code == 2


def test_on_a_terminal_it_says_the_same(run: Path) -> None:
    seen, status = on_terminal("validate", run)
    assert status == 0
    assert cli("validate", run).rstrip("\n") in seen
