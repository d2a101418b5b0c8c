"""What a training loop does that no op shows: which parameters an optimizer holds, its rates, its scheduler.

It is read where an optimizer steps and where a scheduler does, never for an op. The norms of gradients in CPU
memory are taken in a few of the steps, by one call of torch's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple
from weakref import ref

import torch

from sightline.recording.torchapi import Tensor, undisturbed
from sightline.trace.source_files import cell_name, installed_file, torch_file

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep

MOST_STEPS: Final = 256  #: so many are written down, the first ones; all are counted
_MOST_NORMS: Final = 10  #: steps 0, 1, 3, 7 … in which gradients are measured
_MOST_NAMES: Final = 20_000

#: File, line and function of the line that is not torch's, and of the user's own if that is another.
Place = list[Any]


class Held(NamedTuple):
    """An optimizer that has stepped."""

    alive: ref[Any]
    number: int
    told: dict[str, Any]


class Schedule(NamedTuple):
    """A scheduler that was made, or has stepped."""

    alive: ref[Any]
    told: dict[str, Any]


class TrainingLog:
    """The optimizers and schedulers of one recording."""

    def __init__(self) -> None:
        self._optimizers: dict[int, Held] = {}
        self._schedulers: dict[int, Schedule] = {}
        self._told: list[dict[str, Any]] = []  # the optimizers in order
        self._schedules: list[dict[str, Any]] = []
        self._steps: list[list[Any]] = []
        self._norms: list[tuple[int, list[str], Any]] = []
        self.count = 0  #: steps of all optimizers

    # -- optimizers --------------------------------------------------------------------------------------

    def stepping(
        self, optimizer: Any, modules: Any, frame: FrameType | None, time: int, *, closure: bool = False
    ) -> None:
        """An optimizer is about to step; with a ``closure`` it computes the gradients itself."""
        held = self._held(optimizer, modules, frame)
        groups = optimizer.param_groups
        graded = sum(one.grad is not None for group in groups for one in group["params"])
        rates = [rate for group in groups if (rate := _number(group.get("lr"))) is not None]
        self.count += 1
        held.told["steps"] += 1
        if len(self._steps) < MOST_STEPS:
            low, high = (min(rates), max(rates)) if rates else (None, None)
            self._steps.append([held.number, time, -1 if closure else graded, low, high])
        steps = held.told["steps"]
        if graded and steps & (steps + 1) == 0 and len(self._norms) < _MOST_NORMS * len(self._told):
            self._measure(steps - 1, modules)

    def _held(self, optimizer: Any, modules: Any, frame: FrameType | None) -> Held:
        found = self._optimizers.get(id(optimizer))
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if found is None or found.alive() is not optimizer:
            told: dict[str, Any] = {
                "type": type(optimizer).__name__, "parameters": -1, "names": [], "unknown": 0, "foreign": 0,
                "steps": 0,
                "place": place_of(frame),
            }  # fmt: skip
            found = self._optimizers[id(optimizer)] = Held(ref(optimizer), len(self._told), told)
            self._told.append(told)
        if found.told["parameters"] != count or found.told["unknown"]:
            held = [one for group in optimizer.param_groups for one in group["params"]]
            names = [modules.tensor_name(one) for one in held]
            known = [name for name in names if name is not None]
            found.told["names"] = [name for _, name in known[:_MOST_NAMES]]
            found.told["parameters"], found.told["unknown"] = count, count - len(known)
            strange = (one for one, name in zip(held, names, strict=True) if name is None)
            found.told["foreign"] = sum(one.grad is not None for one in strange)
        return found

    def _measure(self, step: int, modules: Any) -> None:
        """The norms of the gradients that parameters hold now; on a device only statistics tell them."""
        grads = {
            name: parameter.grad for name, parameter in modules.parameters() if _is_plain(parameter.grad)
        }
        if grads:
            self._norms.append((step, list(grads), undisturbed(partial(_norms, list(grads.values())))))

    # -- schedulers --------------------------------------------------------------------------------------

    def scheduled(self, scheduler: Any, frame: FrameType | None) -> None:
        """A scheduler is about to set its rates: at its making, or because it steps."""
        optimizer = scheduler.optimizer
        making = bool(_is_making(frame))
        found = self._schedulers.get(id(scheduler))
        if found is None or found.alive() is not scheduler:
            told: dict[str, Any] = {
                "type": type(scheduler).__name__, "optimizer": -1, "steps": 0, "early": False, "made": None,
                "place": None,
            }  # fmt: skip
            found = self._schedulers[id(scheduler)] = Schedule(ref(scheduler), told)
            self._schedules.append(told)
        told = found.told
        if making:
            told["made"] = told["made"] or place_of(frame)
            return
        if not told["steps"]:
            told["early"] = told["made"] is not None and not self._has_stepped(optimizer)
            told["place"] = place_of(frame)
        told["steps"] += 1

    def _has_stepped(self, optimizer: Any) -> bool:
        held = self._optimizers.get(id(optimizer))
        known = held is not None and held.alive() is optimizer
        return known or bool(getattr(optimizer, "_opt_called", False))

    def told(self) -> dict[str, Any]:
        """All of it as plain data."""
        for scheduler in self._schedulers.values():
            alive = scheduler.alive()
            held = None if alive is None else self._optimizers.get(id(getattr(alive, "optimizer", None)))
            if held is not None and alive is not None and held.alive() is alive.optimizer:
                scheduler.told["optimizer"] = held.number
        return {
            "optimizers": [dict(told) for told in self._told],
            "schedulers": [dict(told) for told in self._schedules],
            "steps": list(self._steps),
            "count": self.count,
        }

    def link(self, optimizer: Any) -> None:
        """Remember which schedulers are an optimizer's, while all of them live."""
        held = self._optimizers.get(id(optimizer))
        for scheduler in self._schedulers.values() if held is not None else ():
            alive = scheduler.alive()
            if alive is not None and alive.optimizer is optimizer:
                scheduler.told["optimizer"] = held.number  # type: ignore[union-attr]

    def norms(self) -> list[list[Any]]:
        """The norms of gradients by step and name."""
        return [list(row) for row in self._norms]


def _is_plain(grad: Any) -> bool:
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return False
    return bool(grad.is_cpu and grad.is_floating_point())


def _norms(grads: list[Any]) -> list[float]:
    with torch.no_grad():
        found: list[float] = [float(norm) for norm in torch._foreach_norm(grads, 2.0)]
    return found


def place_of(frame: FrameType | None) -> Place:
    """Where a frame of torch's was called from: the first line that is not torch's, and the user's own."""
    found: list[Place] = []
    for at in _outwards(frame):
        file = at.f_code.co_filename
        if torch_file(file) or file.startswith(_PACKAGE):
            continue
        if not found or not installed_file(file):
            found.append([cell_name(file), at.f_lineno, at.f_code.co_qualname])
        if not installed_file(file):
            break
    return [*found[0], *(found[-1] if len(found) > 1 else [])] if found else []


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_making(frame: FrameType | None) -> bool:
    """Whether a scheduler sets its rates for the first time, from its own ``__init__``."""
    for at in _outwards(frame):
        if not torch_file(at.f_code.co_filename) and not at.f_code.co_filename.startswith(_PACKAGE):
            return False
        if at.f_code.co_name == "_initial_step":
            return True
    return False


def _number(rate: Any) -> float | None:
    """A learning rate; one that is on a device is not waited for."""
    if isinstance(rate, int | float):
        return float(rate)
    if isinstance(rate, Tensor) and rate.is_cpu and rate.numel() == 1:
        return float(undisturbed(partial(float, rate)))
    return None


class SchedulerWatch:
    """Sees schedulers set their rates while anything records: they say so by a context of their own."""

    def __init__(self) -> None:
        self._real: Any = None

    def install(self, tell: Any) -> None:
        """Have ``tell(scheduler, frame)`` called whenever one is about to."""
        context = getattr(torch.optim.lr_scheduler, "_enable_get_lr_call", None)
        real = getattr(context, "__enter__", None)
        if context is None or real is None:  # another torch: nothing is known of schedulers
            return

        def enter(self: Any) -> Any:
            tell(self.o, sys._getframe(1))
            return real(self)

        self._real = context, real, enter
        context.__enter__ = enter

    def remove(self) -> None:
        """Give it back, unless somebody has put another there since."""
        if self._real is not None:
            context, real, enter = self._real
            if context.__enter__ is enter:
                context.__enter__ = real
            self._real = None
