"""Whatever the user's exception is like, it leaves the block as itself, and the recording is finished."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import pytest
import torch

import sightline as sl
from sightline.errors import CaptureError
from sightline.recording import recorder
from sightline.recording.captures import CaptureObserver
from tests.recording.engines import needs_native

X = torch.ones(2, 3)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


class Unspeakable(RuntimeError):
    def __str__(self) -> str:
        raise SystemExit("not even that")


class Noteless(Exception):
    def add_note(self, note: str, /) -> None:
        raise ValueError("no notes")


class Guarded(Exception):
    """Its attributes can be neither read nor set."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise LookupError(name)


class Unequal(Exception):
    __hash__ = None  # type: ignore[assignment]  # that is the point

    def __eq__(self, other: object) -> bool:
        raise LookupError("no comparison")

    def __bool__(self) -> bool:
        raise LookupError("no truth")


def circular() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


KINDS: dict[str, Callable[[], BaseException]] = {
    "frozen": Frozen,
    "unspeakable": Unspeakable,
    "noteless": Noteless,
    "guarded": Guarded,
    "unequal": Unequal,
    "circular": circular,
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
    "generator exit": GeneratorExit,
}


class Failing(torch.nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.errors = [error]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.relu()
        raise self.errors[0]


def left_by(error: BaseException, trace: sl.trace) -> BaseException | None:
    """What leaves a block in which an error is raised by a module."""
    model = Failing(error)
    try:
        with trace:
            model(X)
    except BaseException as caught:  # noqa: BLE001  # it may be anything
        return caught
    return None


@pytest.fixture(params=["memory", "path"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A recording in memory and one that is written while it runs, which must be finished."""
    options = {"path": tmp_path / "run.sight"} if request.param == "path" else {}
    yield options
    assert not [thread for thread in threading.enumerate() if thread.name == "sightline-stream-writer"]
    if options:
        assert not (tmp_path / "run.sight" / "rank0.journal").exists()
        assert "relu" in [op.name for op in sl.load(tmp_path / "run.sight").ops]


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_it_leaves_the_block_as_itself(kind: str, options: dict[str, Any]) -> None:
    error = KINDS[kind]()
    trace = sl.trace(**options)
    assert left_by(error, trace) is error
    t = trace.stop()
    assert t.info["exception"].startswith(type(error).__name__)
    assert type(error).__name__ in str(t)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("guarded", "interrupt")])
def test_it_gains_its_note_and_loses_our_frames(kind: str) -> None:
    error = KINDS[kind]()
    left_by(error, sl.trace())
    assert re.match(
        r"sightline: raised at \S*test_exceptions\.py:\d+ in Failing\.forward", error.__notes__[0]
    )
    names = [at.name for at in traceback.extract_tb(error.__traceback__)]
    assert names[0] == "left_by"
    assert names[-1] == "forward"


def test_what_cannot_be_said_is_said_to_be_so() -> None:
    left_by(Unspeakable(), trace := sl.trace())
    assert trace.stop().info["exception"] == "Unspeakable: <exception str() failed>"


def without_lines(function: Callable[[], NoReturn]) -> Callable[[], NoReturn]:
    """A function whose code has no line numbers, as some compilers make it."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(co_linetable=b""), function.__globals__)


def test_a_frame_without_a_line_number(options: dict[str, Any]) -> None:
    def fails() -> NoReturn:
        X.relu()
        raise ValueError("mine")

    bare = without_lines(fails)
    with pytest.raises(ValueError, match="mine") as plain:
        bare()
    with pytest.raises(ValueError, match="mine") as caught, sl.trace(**options) as t:
        bare()
    expected: Any = plain.value.__traceback__
    at: Any = caught.value.__traceback__
    assert at.tb_next.tb_frame.f_code is bare.__code__
    assert at.tb_next.tb_lineno == expected.tb_next.tb_lineno  # None, or -1 before Python 3.11.4
    assert at.tb_next.tb_lineno in (None, -1)
    assert t.info["exception"] == "ValueError: mine"


@pytest.mark.faults
@pytest.mark.parametrize("step", ["leave_out_own_frames", "exception_text", "explain_failure"])
def test_a_fault_of_ours_is_counted_and_shown(
    step: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> NoReturn:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(recorder, step, broken)
    error = ValueError("mine")
    trace = sl.trace(**options)
    assert left_by(error, trace) is error
    t = trace.stop()
    assert t.info["fault_count"] == 1
    assert t.info["faults"] == [f"ZeroDivisionError: ours (broken:{broken.__code__.co_firstlineno + 1})"]
    assert "ZeroDivisionError: ours" in str(t)


@pytest.mark.faults
def test_even_a_full_disk_does_not_replace_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: CaptureObserver) -> NoReturn:
        raise CaptureError("the disk is full")

    monkeypatch.setattr(CaptureObserver, "finish", full)
    error = ValueError("mine")
    trace = sl.trace(capture=True, **options)
    assert left_by(error, trace) is error
    assert "CaptureError: the disk is full" in trace.stop().info["faults"][0]
    with pytest.raises(CaptureError, match="the disk is full"), sl.trace(capture=True):
        X.relu()


@pytest.mark.faults
def test_of_a_decorated_function_too() -> None:
    error = Guarded()

    @sl.trace()
    def run() -> NoReturn:
        X.relu()
        raise error

    with pytest.raises(Guarded) as caught:
        run()
    assert caught.value is error


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "python"])
@pytest.mark.parametrize(
    ("fails", "name"),
    [
        (lambda x: torch.ones(()) @ x, "@"),
        (lambda x: torch.einsum("ij->k", x), "torch.einsum"),
        (lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(5, dtype=torch.long)), "F.cross_entropy"),
    ],
    ids=["matmul", "einsum", "cross_entropy"],
)
def test_an_op_that_fails_before_the_ops_it_is_made_of_is_named(engine: Any, fails: Any, name: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught, sl.trace(engine=engine):
        fails(torch.ones(3, 4))
    assert caught.value.__notes__[0].startswith(f"sightline: {name} failed at ")
