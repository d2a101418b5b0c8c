"""A recording process that is killed at any moment leaves a bundle that opens, is valid, and lacks little."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.errors import SightlineError
from tests.recording.streaming.streams import Awkward, session_of, train

KILLS = 56
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"stats": True}, {"ops": "aten"}, {"ops": "api"}, {"last": 500}, {"ops": "none"}, {"capture": True},
    {"check": "nonfinite"},
)  # fmt: skip
#: How old what was finished may be that is missing: a batch, and a machine that has other things to do.
LATE = 0.5 + 1.0
_PROGRESS = struct.Struct("qd")
_ROOM = 1 << 20


def forked(way: dict[str, Any], path: Path, said: mmap.mmap) -> int:
    """A child that trains for ever under a trace, and notes when each step has ended."""
    child = os.fork()
    if child:
        return child
    try:
        model = Awkward()
        updates = torch.optim.Adam(model.parameters(), lr=0.01)
        with sl.trace(model, path=path, **way):
            for number in range(_ROOM // _PROGRESS.size - 1):
                with sl.step(f"step{number}"):
                    updates.zero_grad()
                    model(torch.randn(5, 8)).backward()
                    updates.step()
                _PROGRESS.pack_into(said, (number + 1) * _PROGRESS.size, number + 1, time.monotonic())
                struct.pack_into("q", said, 0, number + 1)
    finally:
        os._exit(1)


def killed(
    folder: Path, count: int = KILLS, seed: int = 7
) -> Iterator[tuple[dict[str, Any], Path, int, int]]:
    """Kill children at random moments: what each was asked, its bundle, the steps it must and may have."""
    chance = random.Random(seed)
    for number in range(count):
        way, path, said = WAYS[number % len(WAYS)], folder / f"{number}.sight", mmap.mmap(-1, _ROOM)
        child = forked(way, path, said)
        began = time.monotonic()
        while not (path / "rank0.journal").exists() and time.monotonic() - began < 30:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.9) ** 2)
        os.kill(child, signal.SIGKILL)
        now = time.monotonic()
        os.waitpid(child, 0)
        (done,) = struct.unpack_from("q", said, 0)
        ended = (_PROGRESS.unpack_from(said, (step + 1) * _PROGRESS.size)[1] for step in range(done))
        yield way, path, sum(at < now - LATE for at in ended), done
        said.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_fifty_kills(tmp_path: Path) -> None:
    assert check_kills(tmp_path) >= 50


def check_kills(folder: Path, count: int = KILLS, seed: int = 7) -> int:
    """Kill recording processes, and look at what each left; how many there were."""
    torch.randn(2, 2).matmul(torch.randn(2, 2))
    train(Awkward(), 1)  # what is imported late is there before the children are
    seen = 0
    for way, path, least, most in killed(folder, count, seed):
        trace = sl.load(path)
        assert trace.validate().external == 0, way
        assert trace.info["unfinished"] is True
        assert not trace.info["faults"]
        if "last" in way:
            assert len(trace.ops) <= way["last"]
        else:
            finished = [step for step in trace.steps if step.id < least]
            assert least <= len(finished), way
            assert len(trace.steps) <= most + 1, way
            assert all(not call.unfinished for step in finished[:-1] for call in step.module_calls)
        str(trace)
        seen += 1
    return seen


def test_what_was_open_is_unfinished(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            model = Awkward()
            model.norm.register_forward_hook(lambda *_: time.sleep(60))
            with sl.trace(model, path=tmp_path / "run.sight"):
                model(torch.randn(5, 8))
        finally:
            os._exit(1)
    journal = tmp_path / "run.sight" / "rank0.journal"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if journal.exists() and len(sl.load(tmp_path / "run.sight").ops) > 10:
            break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.chmod(tmp_path / "run.sight", 0o555)
    trace = sl.load(tmp_path / "run.sight")
    trace.validate()
    assert [(call.module.path, call.unfinished) for call in trace.module_calls] == [
        ("", True), ("first", False), ("norm", False),
    ]  # fmt: skip
    os.chmod(tmp_path / "run.sight", 0o755)
    assert "self.norm(self.first(x))" in str(trace.code())
    line = trace.save(tmp_path / "saved.sight")  # what is left can be made a bundle like any other
    assert "source file" in line
    assert str(sl.load(tmp_path / "saved.sight").call_order()) == str(trace.call_order())


def test_a_journal_opens_without_torch(tmp_path: Path) -> None:
    path = left_behind(tmp_path)
    script = (
        "import sys, sightline as sl; t = sl.load(sys.argv[1]); t.validate();"
        "str(t); str(t.code()); str(t.summary());"
        "assert 'torch' not in sys.modules; print(len(t.ops), int(sum(op.flops or 0 for op in t.ops) > 0))"
    )
    run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    ops, counted = map(int, run.stdout.split())
    assert ops > 100
    assert counted == 1


def left_behind(folder: Path) -> str:
    """The bundle of a recording that nobody finished."""
    path = folder / "run.sight"
    model = Awkward()
    child = os.fork()
    if child == 0:
        try:
            trace = sl.trace(model, path=path)
            trace.start()
            for _ in range(2):  # a batch each: what is wrong with the last one counts as cut short
                train(model, 1)
                session_of(trace).stream_writer.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return str(path)


def test_a_damaged_journal_is_a_sentence_or_a_safe_trace(tmp_path: Path) -> None:
    path = Path(left_behind(tmp_path)) / "rank0.journal"
    whole = path.read_bytes()
    full = len(sl.load(path).ops)
    chance = random.Random(3)
    sentences = set()
    left_out = False
    for _ in range(150):
        data = bytearray(whole)
        if chance.random() < 0.4:
            del data[chance.randrange(len(data)) :]
        else:
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            trace = sl.load(path.parent)
            trace.validate()
            assert len(trace.ops) <= full
            left_out |= "Damaged and left out: " in " ".join(trace.info["faults"])
        except SightlineError as error:
            sentences.add(str(error))
    assert all(one.startswith(f"{path} is ") and one.endswith(".") for one in sentences)
    assert left_out  # a frame that was altered is left out, and that is said
