"""Recording processes that end in odd ways, at random moments: what each leaves is what is promised."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import sightline as sl
from sightline.errors import SightlineError
from sightline.recording.engine_choice import resolve_engine
from tests.fuzz.running import Failure

SECONDS = 120  #: that one process may take
#: How a process ends, and its exit code: `None` where torch or Python decides it.
ENDINGS: dict[str, tuple[str, int | None]] = {
    "exit": ("sys.exit(3)", 3),
    "exit in a thread": ("in_thread(lambda: sys.exit(5)); sys.exit(3)", 3),
    "error": ("torch.ones(2) @ torch.ones(3)", 1),
    "error in a thread": ("in_thread(lambda: 1 / 0); sys.exit(3)", 3),
    "exit handler that fails": ("atexit.register(lambda: 1 / 0); sys.exit(3)", 3),
    "exit handler that stops": ("atexit.register(recorder.stop); sys.exit(3)", 3),
    # torch itself aborts at times where a daemon thread is in it when Python ends.
    "exit while a thread runs": ("threading.Thread(target=forever, daemon=True).start(); sys.exit(3)", None),
    "stop in a thread": ("in_thread(recorder.stop); sys.exit(3)", 3),
    "abort": ("os.abort()", -signal.SIGABRT),
    "abort without the GIL": ("ctypes.CDLL(None).abort()", -signal.SIGABRT),
    "abort in a thread": ("in_thread(os.abort)", -signal.SIGABRT),
    "crash": ("ctypes.string_at(0)", -signal.SIGSEGV),
    "crash in a thread": ("in_thread(lambda: ctypes.string_at(0))", -signal.SIGSEGV),
    "crash while it stops": ("threading.Timer(0.01, ctypes.string_at, (0,)).start(); recorder.stop()", None),
    "kill while it stops": ("threading.Timer(0.02, die).start(); recorder.stop()", None),
    "os._exit": ("os._exit(3)", 3),
    "SIGKILL": ("die()", -signal.SIGKILL),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
    "SIGTERM twice": ("[os.kill(os.getpid(), 15) for _ in '12']; time.sleep(30)", -signal.SIGTERM),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", None),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(30)", -signal.SIGHUP),
    "fork and exit": ("os.fork() and os.wait(); sys.exit(3)", 3),
    "fork and crash": ("os.fork() or ctypes.string_at(0); os.wait(); sys.exit(3)", 3),
    "recursion": ("f = lambda: f(); f()", 1),
    "folder removed": ("os.chdir('/'); shutil.rmtree(sys.argv[1]); sys.exit(3)", 3),
    "files closed": ("os.closerange(3, 200); sys.exit(3)", None),
}  # fmt: skip
#: Endings after which nothing may be lost, on any engine and on the native one.
_WHOLE = {"exit", "exit in a thread", "error", "error in a thread", "exit handler that fails",
          "exit handler that stops", "stop in a thread", "fork and exit", "fork and crash",
          "recursion"}  # fmt: skip
_WHOLE_NATIVE = {
    "SIGTERM",
    "abort",
    "abort without the GIL",
    "abort in a thread",
    "crash",
    "crash in a thread",
}
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"stats": True}, {"capture": True}, {"last": 200}, {"ops": "none"}, {"check": "nonfinite"},
)  # fmt: skip

_SCRIPT = """
import atexit, ctypes, mmap, os, random, resource, shutil, signal, struct, sys, threading, time
import torch, sightline as sl
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.signal(signal.SIGINT, signal.default_int_handler)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
progress = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 8)

def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def forever():
    while True:
        torch.ones(2).exp()

recorder = sl.trace(model, path=sys.argv[1], engine={engine!r}, **{options!r})
recorder.start()
end = time.monotonic() + {seconds}
steps = 0
while time.monotonic() < end:
    model(torch.ones(2, 3)).sum().backward()
    steps += 1
    struct.pack_into("q", progress, 0, steps)
{ending}
"""


def check_endings(count: int, seed: int, folder: Path) -> list[Failure]:
    """End recording processes; what went wrong."""
    engines = ("native", "python") if resolve_engine("auto") == "native" else ("python",)
    every = list(itertools.product(ENDINGS, engines))
    random.Random(seed).shuffle(every)
    failed = []
    for number in range(seed, seed + count):
        ending, engine = every[(number - seed) % len(every)]
        chance = random.Random(number)
        options = chance.choice(WAYS)
        where = folder / str(number)
        where.mkdir(parents=True)
        wrong = _wrong(ending, engine, options, chance.uniform(0.0, 0.9) ** 2, where)
        failed += [Failure("ending", number, f"{ending}, {engine} {options}", what) for what in wrong]
        shutil.rmtree(where, ignore_errors=True)
    return failed


def _wrong(ending: str, engine: str, options: dict[str, Any], seconds: float, where: Path) -> list[str]:
    """What is wrong with the recording that a process left, or with how it ended."""
    statement, expected = ENDINGS[ending]
    path, progress = where / "run.sight", where / "progress"
    progress.write_bytes(bytes(8))
    script = textwrap.dedent(_SCRIPT).format(
        engine=engine, options=options, seconds=seconds, ending=statement
    )
    command = [sys.executable, "-c", script, str(path), str(progress)]
    try:
        done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return [f"it took more than {SECONDS} s"]
    if expected is not None and done.returncode != expected:
        return [f"it ended by {done.returncode}, not {expected}: {done.stderr[-300:]}"]
    if ending == "folder removed":
        return [] if not path.exists() else ["a folder that was removed is there again"]
    (steps,) = struct.unpack("q", progress.read_bytes())
    try:
        t = sl.load(path)
        t.validate()
        text = str(t)
    except SightlineError as error:
        return [f"{type(error).__name__}: {error}"]
    wrong = [f"{text} has no first line"] if not text else []
    wrong += [f"a fault: {fault}" for fault in t.info["faults"]]
    found = int((t.data.calls.parent < 0).sum())
    is_whole = ending in _WHOLE or (ending in _WHOLE_NATIVE and engine == "native")
    if is_whole and "last" not in options and found != steps:
        wrong.append(f"{found} steps of {steps}")
    if found > steps + 1:
        wrong.append(f"{found} steps, and only {steps} ran")
    return wrong
