"""What it costs just to be watched: the time torch spends on handing an op, a call or a module to us.

It passes before a handler begins and after it has ended, so no clock of ours can see it. It is measured
once per process, on a trivial op, and left out of the durations of API calls and module calls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.recording.torchapi import DISPATCH_MODES, FUNCTION_MODES, ModeStack, undisturbed

_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class HandlerOverhead:
    """Nanoseconds added by an empty handler: per aten op, and per API call."""

    aten: int
    api: int


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
    """The cost of passing through, on this machine."""
    x = undisturbed(partial(torch.zeros, 1))
    aten = _added(x, DISPATCH_MODES, _EmptyDispatch())
    api = _added(x, FUNCTION_MODES, _EmptyFunction())
    return HandlerOverhead(aten, api)


def _added(x: torch.Tensor, stack: ModeStack, mode: Any) -> int:
    """The least an op takes under a mode, less the least it takes without."""

    def measured() -> int:
        plain = min(_once(x) for _ in range(_ROUNDS))
        stack.push(mode)
        return min(_once(x) for _ in range(_ROUNDS)) - plain

    return max(0, stack.set_aside(measured))


def _once(x: torch.Tensor) -> int:
    start = time.perf_counter_ns()
    x.neg()
    return time.perf_counter_ns() - start
