"""Handler overhead: the time torch spends on handing an op or a call to a mode.

It passes before a handler begins and after it has ended, so the handler cannot time it. It is measured once
per process, on a trivial op, and subtracted from the durations of API calls and module calls.
"""

from __future__ import annotations

import time
from functools import lru_cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.recording.session import HandlerOverhead
from sightline.recording.torchapi import DISPATCH_MODES, FUNCTION_MODES, ModeStack, without_modes

_ROUNDS = 60


class _EmptyDispatch(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class _EmptyFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


@lru_cache(maxsize=1)
def handler_overhead() -> HandlerOverhead:
    """The overhead on this machine."""
    x = without_modes(partial(torch.zeros, 1))
    aten = _added_time(x, DISPATCH_MODES, _EmptyDispatch())
    api = _added_time(x, FUNCTION_MODES, _EmptyFunction())
    return HandlerOverhead(aten, api)


def _added_time(x: torch.Tensor, stack: ModeStack, mode: Any) -> int:
    """The shortest time of an op under a mode, less the shortest without."""

    def measure() -> int:
        plain = min(_time_once(x) for _ in range(_ROUNDS))
        stack.push(mode)
        return min(_time_once(x) for _ in range(_ROUNDS)) - plain

    return max(0, stack.run_without(measure))


def _time_once(x: torch.Tensor) -> int:
    start = time.perf_counter_ns()
    x.neg()
    return time.perf_counter_ns() - start
