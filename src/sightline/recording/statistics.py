"""``stats=``: the numbers of every floating result, read while the tensor is there.

On a CPU they are read at once. On any other device they are computed there and stay there: `deferred` keeps
them, and fetches them when the recording is over. A view that only relabels the elements of a tensor is
not read: it has the numbers of its base, which the build gives it. Its fingerprint is another where the order
is another, and takes a pass of its own, where that was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sightline.options import Stats
from sightline.patterns import PathPattern, op_matches, segments_of
from sightline.recording.cpu_statistics import Columns
from sightline.recording.observers import ObservedCall, ObservedOp, Observer
from sightline.recording.operations import OP, OpInfo
from sightline.recording.torchapi import Parameter, Tensor, is_functorch_wrapped, storage_address
from sightline.recording.values import PLAIN_TENSORS

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

_STRIDED: Final = torch.strided


def measurable(tensor: Any) -> bool:
    """Whether a tensor has numbers of its own that can be read: floating, strided, not fake, not empty."""
    return (
        type(tensor) in PLAIN_TENSORS
        and (tensor.is_floating_point() or tensor.is_complex())
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.numel() > 0
        and not is_functorch_wrapped(tensor)
    )


class StatisticsObserver(Observer):
    """Reads the numbers of what ops and module calls return."""

    def __init__(self, session: SessionBase, wanted: Stats) -> None:
        self._session = session
        self._wanted = wanted
        self.fingerprint = bool(wanted.fingerprint)
        self._views = wanted.fingerprint == "views"
        self._chosen = Chosen(session, wanted.modules, wanted.ops)
        self._parameters = wanted.parameters
        self._aten = session.level in ("aten", "both")
        self.readings = session.new_readings()
        self.ops = self.calls = not self.readings.native
        self.api = not self._aten
        self._rewritten: set[int] = set()  # storages that were changed through a view of them
        self.deferred = session.new_deferred("fingerprints" if wanted.fingerprint else "numbers")

    def wants(self, event: ObservedOp) -> bool:
        """Not what an API call returns, which its ops have made, nor what shows what was read."""
        info = event.info
        if self.readings.native or info.uninitialized or (self._aten and info.flavour != OP):
            return False
        return not info.relabels or self._is_rewritten(event.result) or (self._views and not info.keeps_order)

    def op(self, event: ObservedOp) -> None:
        """Read the results of an op."""
        info, args, result = event.info, event.args, event.result
        if not self._chosen(event) or (info.relabels and not self._is_read(args, result)):
            return
        bad = len(self.readings.bad)
        if type(result) is Tensor and not info.mutates:
            self.read(result)
        else:
            for tensor in results_of(self._session, event):
                self.read(tensor)
        if info.mutates:
            self._note_rewritten(event)
        elif len(self.readings.bad) > bad:  # a parameter, or what was made before the block, may explain it
            for tensor in self._session.arguments.tensors((args, event.kwargs or {}), []):
                self.read(tensor if tensor._base is None else tensor._base)
                self.read(tensor)

    def _is_read(self, args: tuple[Any, ...], view: Any) -> bool:
        """Whether a view of all elements of a tensor is read all the same.

        It is if its base has changed, or for its fingerprint: not of a parameter, which nobody has read, nor
        of a view that shows elements more than once.
        """
        if self._is_rewritten(view) or not args or type(view) is not Tensor:
            return True
        base = args[0]._base if type(args[0]) is Tensor and args[0]._base is not None else args[0]
        if type(base) is Parameter and not self._parameters:
            return False
        return not any(step == 0 and size > 1 for step, size in zip(view.stride(), view.shape, strict=True))

    def _note_rewritten(self, event: ObservedOp) -> None:
        """What was changed through a view has a new version, which nobody has read."""
        for tensor in self._session.arguments.at(event.info.mutates, event.args, event.kwargs):
            if type(tensor) is Tensor and tensor._is_view():
                self._rewritten.add(storage_address(tensor))

    def _is_rewritten(self, view: Any) -> bool:
        return bool(self._rewritten) and type(view) is Tensor and storage_address(view) in self._rewritten

    def enter(self, call: ObservedCall) -> None:
        """Read what a module is given, where no op has made it."""
        if not self._chosen.call(call):
            return
        for tensor in self._session.arguments.tensors((call.args, call.kwargs or {}), []):
            self.read(tensor)
        module = self._session.modules.all[call.module].ref() if self._parameters else None
        if module is not None:
            for held in (*module._parameters.values(), *module._buffers.values()):
                self.read(held)

    def leave(self, call: ObservedCall) -> None:
        """Read what a module returns, where ops are not seen."""
        if self._aten or call.raised or not self._chosen.call(call):
            return
        for tensor in self._session.arguments.tensors(call.result, []):
            self.read(tensor)

    def read(self, tensor: Any) -> None:
        """Read a tensor, if it was not read before."""
        if not measurable(tensor):
            return
        value = self._session.values.known(tensor)
        if value is None or not self.readings.first_time(value):
            return
        if tensor.is_cpu:
            self.readings.add(value, self.readings.read(tensor, self.fingerprint))
        else:
            self.deferred.add(value, tensor)

    def asked(self) -> dict[str, Any]:
        """What is to be measured."""
        return {"stats": {"modules": list(self._wanted.modules or ()), "ops": list(self._wanted.ops or ())}}

    def columns(self) -> Columns:
        """Everything read so far; waits for the devices."""
        return joined(self.readings.columns(), self.deferred.columns())

    def take(self, last: bool) -> Columns:
        """What was read, which is then no longer here; what the devices have comes with the last."""
        taken = self.readings.take()
        return joined(taken, self.deferred.columns()) if last else taken

    def chooses_op(self, info: OpInfo) -> bool:
        """Whether the results of an op are measured, as far as its name tells."""
        return self._wanted.ops is None or self._chosen.op(info)

    def chooses_module(self, number: int) -> bool:
        """Whether what runs in a module is measured."""
        return self._chosen.module(number)

    @property
    def native_options(self) -> tuple[int, bool, bool, bool]:
        """How deep C++ is to look, whether at views too, at parameters, and only in certain modules."""
        return 2 if self.fingerprint else 1, self._views, self._parameters, self.some_modules

    @property
    def some_modules(self) -> bool:
        """Whether only what runs in certain modules is measured."""
        return self._wanted.modules is not None


def joined(first: Columns, second: Columns) -> Columns:
    """Rows of one and of the other."""
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


class Chosen:
    """Which ops and calls are meant by globs; each op and module is looked at once."""

    def __init__(self, session: SessionBase, modules: Any, ops: Any) -> None:
        self._session = session
        self._modules = None if modules is None else [PathPattern(glob) for glob in modules]
        self._ops = ops
        self._known_ops: dict[int, bool] = {}
        self._known_modules: dict[tuple[int, bool], bool] = {}

    def __call__(self, event: ObservedOp) -> bool:
        if self._ops is not None and not self.op(event.info):
            return False
        return self._modules is None or (bool(event.modules) and self.module(event.modules[-1]))

    def op(self, info: OpInfo) -> bool:
        """Whether an op is meant."""
        found = self._known_ops.get(info.number)
        if found is None:
            level = "aten" if info.flavour == OP else "api"
            found = any(op_matches(glob, info.name, level) for glob in self._ops or ())
            self._known_ops[info.number] = found
        return found

    def call(self, call: ObservedCall) -> bool:
        """Whether a call is of a module that is meant."""
        return self._modules is None or self.module(call.module)

    def module(self, number: int, exactly: bool = False) -> bool:
        """Whether a module is meant, or with one of the modules that hold it; under any of its paths."""
        found = self._known_modules.get((number, exactly))
        if found is None:
            known = self._session.modules.all[number]
            paths = [segments_of(path) for path in known.aliases or (known.path,)]
            found = any(
                (meant.exactly(path) if exactly else meant(path))
                for meant in self._modules or ()
                for path in paths
            )
            self._known_modules[number, exactly] = found
        return found


def results_of(session: SessionBase, event: ObservedOp) -> list[Any]:
    """The tensors an op returned, and those it changed in place without returning them."""
    arguments = session.arguments
    changed = arguments.at(event.info.mutates, event.args, event.kwargs)
    return arguments.tensors(event.result, []) + changed
