"""The lines of the function around a recorded block, however the block is entered."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import sightline as sl
from tests.recording.engines import BOTH_ENGINES


class _Wrapper:
    """A context manager of a user's own, which enters the block itself."""

    def __init__(self, engine: Any) -> None:
        self._block = sl.trace(engine=engine)

    def __enter__(self) -> sl.Trace:
        return self._block.__enter__()

    def __exit__(self, *error: object) -> None:
        self._block.__exit__(*error)  # type: ignore[arg-type]


@contextmanager
def _generator(engine: Any) -> Generator[sl.Trace]:
    with sl.trace(engine=engine) as t:
        yield t


def _by_with(engine: Any) -> sl.Trace:
    with sl.trace(engine=engine) as t:
        torch.ones(2).sin()
        torch.ones(2).cos()
    return t


def _by_stack(engine: Any) -> sl.Trace:
    with ExitStack() as stack:
        t = stack.enter_context(sl.trace(engine=engine))
        torch.ones(2).sin()
        torch.ones(2).cos()
    return t


def _by_wrapper(engine: Any) -> sl.Trace:
    with _Wrapper(engine) as t:
        torch.ones(2).sin()
        torch.ones(2).cos()
    return t


def _by_generator(engine: Any) -> sl.Trace:
    with _generator(engine) as t:
        torch.ones(2).sin()
        torch.ones(2).cos()
    return t


def _by_start(engine: Any) -> sl.Trace:
    block = sl.trace(engine=engine)
    block.start()
    torch.ones(2).sin()
    torch.ones(2).cos()
    return block.stop()


@BOTH_ENGINES
@pytest.mark.parametrize("enter", [_by_with, _by_stack, _by_wrapper, _by_generator, _by_start])
def test_each_op_has_its_own_line(enter: Callable[[Any], sl.Trace], engine: str) -> None:
    t = enter(engine)
    lines = {}
    for op in t.ops.where(level="aten"):
        assert op.frame is not None
        assert op.frame.function == enter.__name__
        lines[op.name] = op.frame.code
    assert lines["sin"] == "torch.ones(2).sin()"
    assert lines["cos"] == "torch.ones(2).cos()"


@BOTH_ENGINES
def test_a_generator_is_resumed_from_several_lines(engine: Any) -> None:
    def batches() -> Generator[sl.Trace]:
        with sl.trace(engine=engine) as t:
            yield t
            torch.ones(2).sin()
            yield t
            torch.ones(2).cos()

    running = batches()
    t = next(running)
    next(running)
    list(running)
    callers = {}
    for op in t.ops.where(level="aten"):
        assert op.frame is not None
        assert op.frame.parent is not None
        callers[op.name] = op.frame.parent.code
    assert (callers["sin"], callers["cos"]) == ("next(running)", "list(running)")
