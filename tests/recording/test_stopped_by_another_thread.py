"""Another thread stops a recording while the first still runs: the run goes on, the recording is sound."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from tests.recording.engines import BOTH_ENGINES

KEPT = pytest.mark.parametrize("kept", ["memory", "path"])


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def no_mode_left() -> Iterator[None]:
    """The modes of a recording that another thread has stopped go with the next one on their thread."""
    yield
    with sl.trace(engine="python"):
        pass


def layers() -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))


def is_sound(t: sl.Trace) -> None:
    t.validate()
    assert t.info["faults"] == []
    for key in t.tensors:
        assert t.tensors[key].raw.nbytes
    assert str(t)


@BOTH_ENGINES
@KEPT
@pytest.mark.parametrize("what", ["module", "op", "gradient"])
def test_a_tensor_that_is_being_captured_is_in_the_recording(
    engine: Any, kept: str, what: str, tmp_path: Path
) -> None:
    capturing, stopping = threading.Event(), threading.Event()
    role = {"module": "output", "op": "op", "gradient": "gradient"}[what]

    def when(candidate: Any) -> bool:
        if candidate.role == role and not capturing.is_set():
            capturing.set()
            assert stopping.wait(60)
            time.sleep(0.1)  # the other thread stops meanwhile
        return True

    options = sl.Capture(when=when, ops="*" if what == "op" else None, gradients=what == "gradient")
    path: dict[str, Any] = {"path": tmp_path / "run.sight"} if kept == "path" else {}
    model = layers()
    tracer = sl.trace(model, capture=options, engine=engine, **path)
    stopped: list[sl.Trace] = []

    def stop() -> None:
        assert capturing.wait(60)
        stopping.set()
        stopped.append(tracer.stop())

    other = threading.Thread(target=stop)
    other.start()
    tracer.start()
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    other.join()
    (t,) = stopped
    is_sound(t)
    assert [info.role for info in t.data.captures].count(role) == 1
    if kept == "path":
        is_sound(sl.load(tmp_path / "run.sight"))


@BOTH_ENGINES
@KEPT
@pytest.mark.parametrize(
    "options",
    [
        {"capture": True},
        {"capture": sl.Capture(ops="*", gradients=True)},
        {"stats": True, "check": "nonfinite"},
    ],
    ids=["modules", "ops", "statistics"],
)
@pytest.mark.usefixtures("often")
def test_at_any_moment(engine: Any, kept: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = layers()
    for number in range(10):
        path: dict[str, Any] = {"path": tmp_path / f"{number}.sight"} if kept == "path" else {}
        tracer = sl.trace(model, engine=engine, **options, **path)
        stopped: list[sl.Trace] = []

        def stop(tracer: Any = tracer, stopped: Any = stopped, number: int = number) -> None:
            time.sleep(0.0004 * number)
            stopped.append(tracer.stop())

        tracer.start()
        other = threading.Thread(target=stop)
        other.start()
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
        other.join()
        is_sound(stopped[0])


@BOTH_ENGINES
def test_a_recording_is_read_while_tensors_are_captured(engine: Any) -> None:
    model = layers()
    done = threading.Event()
    missing: list[str] = []

    def read() -> None:
        while not done.is_set():
            missing.extend(key for key in t.tensors if not t.tensors[key].raw.nbytes)
        missing.append("")  # it has come to its end

    with sl.trace(model, capture=True, engine=engine) as t:
        other = threading.Thread(target=read)
        other.start()
        for _ in range(20):
            model(torch.ones(2, 4))
        done.set()
        other.join()
    assert missing == [""]


@BOTH_ENGINES
def test_the_last_call_of_the_stopping_thread_is_captured(engine: Any) -> None:
    with sl.trace(capture=sl.Capture(ops="*softmax*"), ops="api", engine=engine) as t:
        kept = torch.ones(2).softmax(-1)  # its end is known when all is read
    assert [one.shape for one in t.tensors.where()] == [kept.shape]
