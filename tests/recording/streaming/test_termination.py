"""SIGTERM while a recording is written: the process ends by it, and what ran before is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sightline as sl
from tests.recording.engines import needs_native

pytestmark = needs_native  # the plain engine leaves SIGTERM as it is

_BEGINNING = """
import ctypes, os, signal, sys, time, torch, sightline as sl
model = torch.nn.Linear(2, 2)
recorder = sl.trace(model, path=sys.argv[1])
recorder.start()
for _ in range(300):
    model(torch.ones(1, 2))
"""


def terminated(path: Path, ending: str) -> tuple[int, str]:
    """How a process ended that got SIGTERM when it said that it is ready, and what it printed afterwards."""
    script = textwrap.dedent(_BEGINNING) + textwrap.dedent(ending)
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    return process.returncode, rest


@pytest.mark.parametrize(
    "waiting",
    [
        "time.sleep(60)",
        "while ctypes.PyDLL(None).sleep(60): pass",  # keeps the GIL: no Python handler could run
        "[None for _ in iter(int, 1)]",
    ],
)
def test_what_ran_before_is_recorded(tmp_path: Path, waiting: str) -> None:
    ready = "time.sleep(1)" if "PyDLL" in waiting else "None"  # without the GIL nothing can be written
    ending = f"""
        {ready}
        print("ready", flush=True)
        {waiting}
    """
    code, _ = terminated(tmp_path / "run.sight", ending)
    assert code == -signal.SIGTERM
    assert len(sl.load(tmp_path / "run.sight").module_calls) == 300


def test_a_program_that_ends_meanwhile_ends_by_the_signal(tmp_path: Path) -> None:
    ending = """
        print("ready", flush=True)
        time.sleep(0.3)
    """
    code, _ = terminated(tmp_path / "run.sight", ending)
    assert code == -signal.SIGTERM
    recording = sl.load(tmp_path / "run.sight")
    assert len(recording.module_calls) == 300
    assert not recording.data.info.get("unfinished")


def test_a_handler_of_the_program_is_left_alone(tmp_path: Path) -> None:
    ending = """
        signal.signal(signal.SIGTERM, lambda *_: (print("mine", flush=True), sys.exit(3)))
        print("ready", flush=True)
        time.sleep(60)
    """
    assert terminated(tmp_path / "run.sight", ending) == (3, "mine\n")


def test_after_the_recording_it_ends_at_once(tmp_path: Path) -> None:
    ending = """
        recorder.stop()
        while any(line.startswith("SigCgt") and int(line.split()[1], 16) >> 14 & 1
                  for line in open("/proc/self/status")):
            time.sleep(0.01)
        print("ready", flush=True)
        time.sleep(60)
    """
    code, _ = terminated(tmp_path / "run.sight", ending)
    assert code == -signal.SIGTERM


def test_a_forked_child_ends_at_once_and_its_parent_does_not(tmp_path: Path) -> None:
    ending = """
        child = os.fork()
        if not child:
            time.sleep(60)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        recorder.stop()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        print("ready", flush=True)
        time.sleep(60)
    """
    assert terminated(tmp_path / "run.sight", ending)[0] == 7
