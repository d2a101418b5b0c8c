"""Recordings that begin and end out of step with the user's modes: these come and go as without a recording.

Every order is tried, and after each event the modes of the user that are on, and where a new tensor is made,
are compared with the same events without a recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations_with_replacement, permutations
from typing import Any

import pytest
import torch
import torch.utils._device
import torch.utils._python_dispatch as dispatch_flags
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import sightline as sl
from tests.recording.nets import aten

FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OwnExit(Function):
    """One with an end of its own, as many a user's has."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "function": Function,
    "own exit": OwnExit,
    "dispatch": Dispatch,
    "device": lambda: torch.device("meta"),
    "default device": default_device,
}


def theirs() -> list[str]:
    """The modes on both stacks that are not ours."""
    found = [
        type(mode) for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    ]
    return [kind.__name__ for kind in found if not kind.__module__.startswith("sightline.")]


def reset() -> None:
    """Whatever a misnested block of the user's own has left."""
    while _get_current_function_mode_stack():
        torch._C._pop_torch_function_stack()
    while _get_current_dispatch_mode_stack():
        torch._C._pop_torch_dispatch_stack(None)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = None
    torch.utils._device.CURRENT_DEVICE = None
    for flag in FLAGS:
        setattr(dispatch_flags, flag, False)


def play(order: tuple[int, ...], kinds: tuple[str, ...], *traces: sl.trace | None) -> list[Any]:
    """Blocks, and after them traces, that begin and end in an order: at their first and second mention."""
    blocks: list[Any] = [BLOCKS[kind]() for kind in kinds]
    begun: set[int] = set()
    seen: list[Any] = []
    for number in order:
        first = number not in begun
        begun.add(number)
        try:
            if number < len(blocks):
                blocks[number].__enter__() if first else blocks[number].__exit__(None, None, None)
            elif (trace := traces[number - len(blocks)]) is not None:
                trace.start() if first else trace.stop()
        except (AssertionError, RuntimeError) as error:
            seen.append(type(error))
        seen.append((theirs(), torch.ones(1).device.type))
    return seen


def orders(count: int) -> list[tuple[int, ...]]:
    return sorted(set(permutations([*range(count)] * 2)))


def overlap(order: tuple[int, ...]) -> bool:
    """Whether the first two blocks end in the order they began in."""
    begun = [number for number in order if number < 2]
    return begun in ([0, 1, 0, 1], [1, 0, 1, 0])


@pytest.mark.parametrize("ops", ["both", "api", "aten", "none"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_one_block_in_every_order(kind: str, ops: Any) -> None:
    for order in orders(2):
        plain = play(order, (kind,), None)
        assert play(order, (kind,), sl.trace(ops=ops)) == plain, order
        assert not theirs()


@pytest.mark.parametrize("kinds", [*combinations_with_replacement(BLOCKS, 2)], ids=" and ".join)
def test_two_blocks_in_every_order(kinds: tuple[str, str]) -> None:
    for order in orders(3):
        if kinds == ("device", "default device") and overlap(order):
            continue  # torch loses count itself, and then takes any mode that is on for a mistake
        plain = play(order, kinds, None)
        reset()
        found = play(order, kinds, sl.trace())
        reset()
        assert found == plain, order


@pytest.mark.parametrize("kind", BLOCKS)
def test_two_recordings_and_a_block_in_every_order(kind: str) -> None:
    for order in orders(3):
        plain = play(order, (kind,), None, None)
        assert play(order, (kind,), sl.trace(), sl.trace(ops="aten")) == plain, order


def test_all_is_recorded_before_and_after() -> None:
    trace = sl.trace()
    with Function(), Dispatch(), torch.device("meta"):
        trace.start()
        torch.ones(1)
    torch.zeros(1)
    t = trace.stop()
    assert [op.name for op in t.ops] == ["torch.ones", "ones", "torch.zeros", "zeros"]
    assert [str(value) for op in t.ops.where(level="api") for value in op.outputs] == [
        "f32[1]@meta",
        "f32[1]",
    ]
    assert aten(t) == ["ones", "zeros"]


def test_a_generator_that_holds_a_recording_open() -> None:
    def steps() -> Iterator[str]:
        with sl.trace() as t:
            for _ in range(3):
                yield torch.ones(1).device.type
        assert aten(t) == ["ones"] * 3

    with torch.device("meta"), Dispatch():
        running = steps()
        assert next(running) == "meta"
    assert next(running) == "cpu"
    with torch.device("meta"), Dispatch():
        assert next(running) == "meta"
        assert next(running, "end") == "end"
        assert theirs() == ["DeviceContext", "Dispatch"]
    assert not theirs()


def test_one_that_is_never_finished() -> None:
    def steps() -> Iterator[int]:
        with sl.trace():
            torch.ones(1)
            yield 0

    with torch.device("meta"):
        running = steps()
        next(running)
    assert torch.ones(1).device.type == "cpu"
    del running
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("kind", ["function", "dispatch", "device"])
def test_an_exception_ends_the_block(kind: str) -> None:
    trace = sl.trace()

    def fails() -> None:
        trace.start()
        torch.ones(2, 3, device="cpu") @ torch.ones(2, 3, device="cpu")

    with pytest.raises(RuntimeError) as caught, BLOCKS[kind]():  # its traceback has frames of ours
        fails()
    assert caught.value.__traceback__ is not None
    assert not theirs()
    torch.ones(1)
    assert aten(trace.stop())[-1] == "ones"


def test_stopped_inside_a_handler_and_then_left() -> None:
    trace = sl.trace()

    class Stopping(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            trace.stop()  # our own mode is set aside here, and put back afterwards
            return super().__torch_function__(func, types, args, kwargs or {})

    with torch.device("meta"):
        trace.start()
        torch.ones(2, device="cpu").as_subclass(Stopping).relu()
    assert not theirs()
    with sl.trace():  # what torch has put back is taken off now
        pass


def test_a_thread_that_ends_inside() -> None:
    trace = sl.trace()

    def work() -> None:
        torch.device("meta").__enter__()
        trace.start()
        torch.ones(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert aten(trace.stop()) == ["ones"]


def test_compiled_code_runs_in_between() -> None:
    compiled = torch.compile(lambda x: x.relu() + 1, backend="eager")
    trace = sl.trace()
    with Function():
        trace.start()
        compiled(torch.ones(3))
    assert not theirs()
    compiled(torch.ones(3))
    trace.stop()
    torch.compiler.reset()
