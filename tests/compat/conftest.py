"""Tests here look at whole stacks: each runs on a thread of its own, without the test runner above it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sightline.compat.dl_backtrace
from sightline.compat.torchspy import CallTracer, TensorSaver
from tests.compat.spied_models import Stack


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run a test on a new thread, and wait for it."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pyfuncitem.obj, **arguments).result()
    return True


@pytest.fixture
def model() -> Stack:
    return Stack()


@pytest.fixture
def saver(tmp_path: Path) -> TensorSaver:
    return TensorSaver(tmp_path)


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[CallTracer]:
    tracer = CallTracer(tmp_path)
    yield tracer
    tracer.remove_hooks()


@pytest.fixture
def stand_in() -> Iterator[None]:
    """The package under the other tool's name."""
    sys.modules["dl_backtrace"] = sightline.compat.dl_backtrace
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "dl_backtrace"]:
        del sys.modules[name]
