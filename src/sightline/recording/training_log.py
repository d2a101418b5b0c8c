"""The facts of a training loop that no op shows: optimizers, learning rates, schedulers.

It is read when an optimizer or a scheduler steps, never for an op. The norms of gradients in CPU memory are
taken in a few of the steps, by one call of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple
from weakref import ref

import torch

from sightline.data.file_owners import cell_name, installed_file, torch_file
from sightline.recording.stacks import frames_from
from sightline.recording.torchapi import Tensor, foreach_norm, unobserved
from sightline.tensor_memory import has_memory

MAX_STEPS: Final = 256  #: the first ones are stored; all are counted
_MAX_NORMS: Final = 10  #: steps 0, 1, 3, 7 … in which gradients are measured
_MAX_NAMES: Final = 20_000
_MAX_TURNS: Final = 32  #: points of a group's learning rate, which may rise and fall in cycles
_MAX_GROUPS: Final = 64

#: File, line and function of the first line outside torch; and of the user's own line, if that is another.
Location = list[Any]


class RateCurve:
    """The learning rate of a parameter group over all steps: the first, where it turns, the last."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self.more = 0  #: turning points that were not kept

    def add(self, rate: float) -> None:
        """The rate of the next step."""
        points = self.points
        if not points or (len(points) < _MAX_TURNS and rate != points[-1] and self._turns(rate)):
            points.append(rate)
        elif rate != points[-1]:
            self.more += self._turns(rate)
            points[-1] = rate

    def _turns(self, rate: float) -> bool:
        points = self.points
        return len(points) < 2 or (rate > points[-1]) != (points[-1] > points[-2])

    def data(self) -> list[Any]:
        """As the trace stores it."""
        return [self.more, *self.points]


class OptimizerRecord(NamedTuple):
    """An optimizer that has stepped."""

    reference: ref[Any]
    number: int
    data: dict[str, Any]  #: as the trace stores it
    rates: list[RateCurve]  #: of its parameter groups


class SchedulerRecord(NamedTuple):
    """A scheduler that was constructed, or has stepped."""

    reference: ref[Any]
    data: dict[str, Any]  #: as the trace stores it


class TrainingLog:
    """The optimizers and schedulers of one recording."""

    def __init__(self) -> None:
        self._optimizers: dict[int, OptimizerRecord] = {}  # by id of the optimizer
        self._schedulers: dict[int, SchedulerRecord] = {}
        self._in_order: list[OptimizerRecord] = []  # of the first step
        self._scheduler_data: list[dict[str, Any]] = []
        self._steps: list[list[Any]] = []
        self._norms: list[tuple[int, list[str], Any]] = []
        self.count = 0  #: steps of all optimizers

    # -- optimizers --------------------------------------------------------------------------------------

    def note_step(
        self, optimizer: Any, modules: Any, frame: FrameType | None, time: int, *, closure: bool = False
    ) -> None:
        """An optimizer is about to step; with a ``closure`` it computes the gradients itself."""
        record = self._record(optimizer, modules, frame)
        groups = optimizer.param_groups
        with_gradient = sum(one.grad is not None for group in groups for one in group["params"])
        known = [_number(group.get("lr")) for group in groups]
        rates = [rate for rate in known if rate is not None]
        for curve, rate in zip(record.rates, known, strict=False):
            if rate is not None:
                curve.add(rate)
        self.count += 1
        record.data["steps"] += 1
        if len(self._steps) < MAX_STEPS:
            low, high = (min(rates), max(rates)) if rates else (None, None)
            self._steps.append([record.number, time, -1 if closure else with_gradient, low, high])
        steps = record.data["steps"]
        measure = with_gradient and steps & (steps + 1) == 0
        if measure and len(self._norms) < _MAX_NORMS * len(self._in_order):
            # Only those in CPU memory; the norms of others would have to be waited for.
            norms = unobserved(partial(_norms, modules.parameters()))
            if norms:
                self._norms.append((steps - 1, list(norms), list(norms.values())))

    def _record(self, optimizer: Any, modules: Any, frame: FrameType | None) -> OptimizerRecord:
        record = self._optimizers.get(id(optimizer))
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if record is None or record.reference() is not optimizer:
            data: dict[str, Any] = {
                "type": type(optimizer).__name__, "parameters": -1, "names": [], "unknown": 0, "foreign": 0,
                "idle": [], "steps": 0, "place": caller_location(frame),
            }  # fmt: skip
            record = OptimizerRecord(ref(optimizer), len(self._in_order), data, [])
            self._optimizers[id(optimizer)] = record
            self._in_order.append(record)
        data = record.data
        for _ in optimizer.param_groups[len(record.rates) : _MAX_GROUPS]:
            if data["steps"]:  # add_param_group, in the middle of the run
                data.setdefault("later_groups", []).append([len(record.rates), data["steps"]])
            record.rates.append(RateCurve())
        if data["parameters"] != count or data["unknown"]:
            parameters = held_parameters(optimizer)
            names = [modules.tensor_name(one) for one in parameters]
            known = [name for name in names if name is not None]
            data["names"] = [name for _, name in known[:_MAX_NAMES]]
            data["parameters"], data["unknown"] = count, count - len(known)
            foreign = [at for at, name in enumerate(names) if name is None]
            without = {at for at in foreign if parameters[at].grad is None}
            data["foreign"] = len(foreign) - len(without)
            # Those without a gradient in every step so far. A sharded one may be empty in this process.
            idle = {at for at in without if parameters[at].requires_grad and parameters[at].numel()}
            data["idle"] = sorted(idle.intersection(data["idle"]) if data["steps"] else idle)
        return record

    # -- schedulers --------------------------------------------------------------------------------------

    def note_schedule(self, scheduler: Any, frame: FrameType | None) -> None:
        """A scheduler is about to set its rates: in its ``__init__``, or because it steps."""
        optimizer = scheduler.optimizer
        record = self._schedulers.get(id(scheduler))
        if record is None or record.reference() is not scheduler:
            data: dict[str, Any] = {
                "type": type(scheduler).__name__, "optimizer": -1, "steps": 0, "early": False, "made": None,
                "place": None,
            }  # fmt: skip
            record = self._schedulers[id(scheduler)] = SchedulerRecord(ref(scheduler), data)
            self._scheduler_data.append(data)
        data = record.data
        if _is_in_init(frame):
            data["made"] = data["made"] or caller_location(frame)
            return
        if not data["steps"]:
            data["early"] = data["made"] is not None and not (
                self._find(optimizer) is not None or bool(getattr(optimizer, "_opt_called", False))
            )
            data["place"] = caller_location(frame)
        data["steps"] += 1

    def _find(self, optimizer: Any) -> OptimizerRecord | None:
        """The record of an optimizer that has stepped; one that wraps another has the groups of that one."""
        groups = getattr(optimizer, "param_groups", None)
        for record in self._optimizers.values():
            known = record.reference()
            if known is not None and (known is optimizer or known.param_groups is groups):
                return record
        return None

    def summary(self) -> dict[str, Any]:
        """All of it as plain data."""
        for record in self._schedulers.values():
            scheduler = record.reference()
            owner = self._find(getattr(scheduler, "optimizer", None))
            if owner is not None:
                record.data["optimizer"] = owner.number
        return {
            "optimizers": [
                record.data | {"rates": [curve.data() for curve in record.rates]} for record in self._in_order
            ],
            "schedulers": [dict(data) for data in self._scheduler_data],
            "steps": list(self._steps),
            "count": self.count,
        }

    def link(self, optimizer: Any) -> None:
        """Note which schedulers belong to an optimizer, while all of them are alive."""
        owner = self._optimizers.get(id(optimizer))
        if owner is None:
            return
        for record in self._schedulers.values():
            scheduler = record.reference()
            if scheduler is not None and self._find(scheduler.optimizer) is owner:
                record.data["optimizer"] = owner.number

    def norms(self) -> list[list[Any]]:
        """The norms of gradients by step and name."""
        return [list(row) for row in self._norms]


def held_parameters(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer, numbered as in its ``state_dict()``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _norms(parameters: list[tuple[str, Any]]) -> dict[str, float]:
    """The norms of gradients that can be read now, by name."""
    grads = {}
    for name, parameter in parameters:
        grad = parameter.grad
        if type(grad) is Tensor and has_memory(grad) and grad.is_cpu and grad.is_floating_point():
            grads[name] = grad
    if not grads:
        return {}
    return dict(zip(grads, map(float, foreach_norm(list(grads.values()), 2.0)), strict=True))


def caller_location(frame: FrameType | None) -> Location:
    """The line that called a frame of torch, and the user's own line, if that is another."""
    locations: list[Location] = []
    for at in frames_from(frame):
        file = at.f_code.co_filename
        if torch_file(file):
            continue
        if not locations or not installed_file(file):
            locations.append([cell_name(file), at.f_lineno, at.f_code.co_qualname])
        if not installed_file(file):
            break
    return [*locations[0], *(locations[-1] if len(locations) > 1 else [])] if locations else []


def _is_in_init(frame: FrameType | None) -> bool:
    """Whether a scheduler sets its rates for the first time, from its own ``__init__``."""
    for at in frames_from(frame):
        if not torch_file(at.f_code.co_filename):
            return False
        if at.f_code.co_name == "_initial_step":
            return True
    return False


def _number(rate: Any) -> float | None:
    """A learning rate as a number; None for one on a device, which would have to be waited for."""
    if isinstance(rate, int | float):
        return float(rate)
    if not isinstance(rate, Tensor):
        return None
    return unobserved(lambda: float(rate) if rate.is_cpu and rate.numel() == 1 and has_memory(rate) else None)


class SchedulerPatch:
    """Notices when schedulers set their rates, by the context manager that torch enters for it."""

    def __init__(self) -> None:
        self._patched: Any = None

    def install(self, notify: Callable[[Any, FrameType], None]) -> None:
        """Have ``notify(scheduler, frame)`` called before a scheduler sets its rates. Safe to call again."""
        if self._patched is not None:
            return
        context = getattr(torch.optim.lr_scheduler, "_enable_get_lr_call", None)
        real = getattr(context, "__enter__", None)
        if context is None or real is None:  # another torch: schedulers are not recorded
            return

        def enter(self: Any) -> Any:
            notify(self.o, sys._getframe(1))
            return real(self)

        self._patched = context, real, enter
        context.__enter__ = enter

    def remove(self) -> None:
        """Put torch's method back, unless it was replaced by another since."""
        if self._patched is not None:
            context, real, enter = self._patched
            if context.__enter__ is enter:
                context.__enter__ = real
            self._patched = None
