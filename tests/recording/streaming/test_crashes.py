"""A process that aborts or crashes while a recording is written: what ran before is there."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import sightline as sl
from tests.recording.engines import needs_native

_BEGINNING = """
import ctypes, faulthandler, os, resource, signal, sys, threading, time, torch, sightline as sl
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
model = torch.nn.Linear(2, 2)
recorder = sl.trace(model, path=sys.argv[1])
recorder.start()
time.sleep(0.35)  # in the middle of a batch
for _ in range(300):
    model(torch.ones(1, 2))
"""
CRASHES = {
    "os.abort()": signal.SIGABRT,
    "ctypes.CDLL(None).abort()": signal.SIGABRT,  # without the GIL
    "ctypes.PyDLL(None).abort()": signal.SIGABRT,
    "ctypes.string_at(0)": signal.SIGSEGV,
    "ctypes.CDLL(None).memset(8, 0, 8)": signal.SIGSEGV,
    "signal.raise_signal(signal.SIGSEGV)": signal.SIGSEGV,
    "os.kill(os.getpid(), signal.SIGBUS); time.sleep(9)": signal.SIGBUS,
    "os.kill(os.getpid(), signal.SIGFPE); time.sleep(9)": signal.SIGFPE,
    "os.kill(os.getpid(), signal.SIGILL); time.sleep(9)": signal.SIGILL,
}


def ended(path: Path, ending: str, beginning: str = _BEGINNING) -> int:
    script = textwrap.dedent(beginning) + textwrap.dedent(ending)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], timeout=60, capture_output=True, check=False
    )
    return done.returncode


@needs_native
@pytest.mark.parametrize("crash", CRASHES)
def test_what_ran_before_is_recorded(tmp_path: Path, crash: str) -> None:
    assert ended(tmp_path / "run.sight", crash) == -CRASHES[crash]
    t = sl.load(tmp_path / "run.sight")
    t.validate()
    assert t.info["unfinished"]
    assert len(t.module_calls) == 300


@needs_native
@pytest.mark.parametrize("crash", ["os.abort()", "ctypes.string_at(0)", "ctypes.CDLL(None).abort()"])
def test_another_thread_crashes(tmp_path: Path, crash: str) -> None:
    ending = f"""
        threading.Thread(target=lambda: {crash}).start()
        time.sleep(30)
    """
    assert ended(tmp_path / "run.sight", ending) == -CRASHES[crash]
    assert len(sl.load(tmp_path / "run.sight").module_calls) == 300


@needs_native
def test_two_recordings_are_both_written(tmp_path: Path) -> None:
    beginning = _BEGINNING.replace(
        "recorder.start()", "recorder.start()\nother = sl.trace(path=sys.argv[1] + '.other')\nother.start()"
    )
    assert ended(tmp_path / "run.sight", "os.abort()", beginning) == -signal.SIGABRT
    for name in ("run.sight", "run.sight.other"):
        assert len(sl.load(tmp_path / name).module_calls) == 300


@needs_native
def test_where_nobody_can_write_it_ends_all_the_same(tmp_path: Path) -> None:
    """The thread that writes is the one that crashes."""
    ending = """
        writer = recorder._recorder._session.stream_writer
        writer._cutter.cut = lambda: ctypes.string_at(0)
        time.sleep(30)
    """
    began = time.monotonic()
    assert ended(tmp_path / "run.sight", ending) == -signal.SIGSEGV
    assert time.monotonic() - began < 25
    sl.load(tmp_path / "run.sight").validate()


@needs_native
def test_a_handler_of_the_program_is_left_alone(tmp_path: Path) -> None:
    beginning = _BEGINNING.replace("model =", "faulthandler.enable()\nmodel =")
    assert ended(tmp_path / "run.sight", "ctypes.string_at(0)", beginning) == -signal.SIGSEGV
    sl.load(tmp_path / "run.sight").validate()


@needs_native
def test_a_handler_that_is_enabled_later_comes_first(tmp_path: Path) -> None:
    ending = """
        faulthandler.enable()
        ctypes.string_at(0)
    """
    assert ended(tmp_path / "run.sight", ending) == -signal.SIGSEGV
    assert len(sl.load(tmp_path / "run.sight").module_calls) == 300


def test_a_forked_child_crashes_alone(tmp_path: Path) -> None:
    ending = """
        child = os.fork()
        if not child:
            ctypes.string_at(0)
        began = time.monotonic()
        assert os.waitpid(child, 0)[1] & 127 == signal.SIGSEGV
        assert time.monotonic() - began < 0.9
        recorder.stop()
        os._exit(7)
    """
    assert ended(tmp_path / "run.sight", ending) == 7
    t = sl.load(tmp_path / "run.sight")
    assert len(t.module_calls) == 300
    assert not t.info.get("unfinished")


def test_after_the_recording_nothing_is_caught(tmp_path: Path) -> None:
    ending = """
        def caught():
            line = next(line for line in open("/proc/self/status") if line.startswith("SigCgt"))
            return [number for number in (4, 6, 7, 8, 11, 15) if int(line.split()[1], 16) >> number - 1 & 1]
        recorder.stop()
        while caught():
            time.sleep(0.01)
    """
    assert ended(tmp_path / "run.sight", ending) == 0


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(3)",
        "raise SystemExit(3)",
        "threading.Thread(target=lambda: sys.exit(5)).start(); time.sleep(0.1); sys.exit(3)",
    ],
)
def test_an_exit_finishes_the_recording(tmp_path: Path, ending: str) -> None:
    assert ended(tmp_path / "run.sight", ending) == 3
    t = sl.load(tmp_path / "run.sight")
    assert len(t.module_calls) == 300
    assert not t.info.get("unfinished")


@pytest.mark.parametrize("ending", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_death_that_nobody_can_delay_leaves_the_batches_before(tmp_path: Path, ending: str) -> None:
    assert ended(tmp_path / "run.sight", f"time.sleep(1.5)\nmodel(torch.ones(1, 2))\n{ending}") != 0
    t = sl.load(tmp_path / "run.sight")
    t.validate()
    assert len(t.module_calls) >= 300
