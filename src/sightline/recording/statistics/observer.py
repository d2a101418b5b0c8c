"""``stats=``: the statistics of every floating result, right after its op, and of integers that modules get.

On a CPU they are taken at once. On any other device they are computed and stay there: `statistics.device`
fetches them when the recording is over. A view that only relabels the elements of a tensor is not read: it
gets the statistics of its base when the trace is built. Where the order differs, so does the fingerprint,
which takes a pass of its own if ``fingerprint="views"``. Of integers and masks only arguments of modules are
measured: tokens say whether two batches are equal, while results such as positions say little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sightline.options import Stats
from sightline.patterns import PathPattern, op_matches, segments_of
from sightline.recording.observers import ObservedCall, ObservedOp, Observer
from sightline.recording.operations import OP, OpInfo
from sightline.recording.statistics.cpu import Columns
from sightline.recording.tensor_registry import PLAIN_TENSORS
from sightline.recording.torchapi import Parameter, Tensor, storage_address
from sightline.tensor_memory import has_memory

if TYPE_CHECKING:
    from sightline.recording.session import Session

#: Floating and complex dtypes whose elements are numbers that can be read, as in C++'s ``format_of``.
_FLOATS: Final = frozenset(
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
     torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64,
     torch.complex128]
)  # fmt: skip
_INTEGERS: Final = frozenset(
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
     torch.bool]
)  # fmt: skip
#: Integers are read as doubles. A batch of tokens is smaller; a mask for each pair of tokens is not read.
_MOST_INTEGERS: Final = 1 << 20


def measurable(tensor: Any, integers: bool = False) -> bool:
    """Whether statistics of a tensor can be taken: it holds numbers in readable memory, and is not empty.

    Of integers and masks only those that are not too many to convert.
    """
    if type(tensor) not in PLAIN_TENSORS:
        return False
    if tensor.dtype not in _FLOATS and not (integers and tensor.dtype in _INTEGERS):
        return False
    if not has_memory(tensor) or tensor.numel() == 0:
        return False
    return tensor.dtype in _FLOATS or tensor.numel() <= _MOST_INTEGERS


class StatisticsObserver(Observer):
    """Takes the statistics of the results of ops and module calls."""

    def __init__(self, session: Session, options: Stats) -> None:
        self._session = session
        self._options = options
        self.fingerprint = bool(options.fingerprint)
        self._views = options.fingerprint == "views"
        self._selection = Selection(session, options.modules, options.ops)
        self._parameters = options.parameters
        self._aten = session.level in ("aten", "both")
        self.buffer = session.new_statistics_buffer()
        self.ops = self.calls = not self.buffer.native
        self.api = not self._aten
        self._rewritten: set[int] = set()  # storages that were changed through a view of them
        self.device_statistics = session.new_device_statistics(
            "fingerprints" if options.fingerprint else "numbers"
        )

    def wants(self, event: ObservedOp) -> bool:
        """Not an API call, whose ops are measured, nor a view of a measured tensor."""
        info = event.info
        if self.buffer.native or info.uninitialized or (self._aten and info.flavour != OP):
            return False
        return not info.relabels or self._is_rewritten(event.result) or (self._views and not info.keeps_order)

    def op(self, event: ObservedOp) -> None:
        """Measure the results of an op."""
        info, args, result = event.info, event.args, event.result
        if not self._selection(event) or (info.relabels and not self._reads_view(args, result)):
            return
        count = len(self.buffer.nonfinite)
        if type(result) is Tensor and not info.mutates:
            self.read(result)
        else:
            for tensor in results_of(self._session, event):
                self.read(tensor)
        if info.mutates:
            self._rewritten |= rewritten_storages(self._session, event)
        elif len(self.buffer.nonfinite) > count:  # a parameter, or an older tensor, may explain it
            for tensor in self._session.arguments.tensors((args, event.kwargs or {}), []):
                self.read(tensor if tensor._base is None else tensor._base)
                self.read(tensor)

    def _reads_view(self, args: tuple[Any, ...], view: Any) -> bool:
        """Whether a view of all elements of a tensor is measured itself.

        It is if its base has changed, or for its fingerprint: not for a parameter that is not measured, nor
        for a view that shows elements more than once.
        """
        if self._is_rewritten(view) or not args or type(view) is not Tensor or view.is_nested:
            return True
        base = args[0]._base if type(args[0]) is Tensor and args[0]._base is not None else args[0]
        if type(base) is Parameter and not self._parameters:
            return False
        return not any(step == 0 and size > 1 for step, size in zip(view.stride(), view.shape, strict=True))

    def _is_rewritten(self, view: Any) -> bool:
        return bool(self._rewritten) and type(view) is Tensor and storage_address(view) in self._rewritten

    def enter(self, call: ObservedCall) -> None:
        """Measure the arguments of a module that no op has made."""
        if not self._selection.call(call):
            return
        for tensor in self._session.arguments.tensors((call.args, call.kwargs or {}), []):
            self.read(tensor, integers=True)
        module = self._session.modules.all[call.module].ref() if self._parameters else None
        if module is not None:
            for parameter in (*module._parameters.values(), *module._buffers.values()):
                self.read(parameter)

    def leave(self, call: ObservedCall) -> None:
        """Measure the result of a module, where aten ops are not recorded or compiled code made it."""
        measured = self._aten and not self._session.regions
        if measured or call.raised or not self._selection.call(call):
            return
        for tensor in self._session.arguments.tensors(call.result, []):
            self.read(tensor)

    def read(self, tensor: Any, integers: bool = False) -> None:
        """Take the statistics of a tensor, once."""
        if not measurable(tensor, integers):
            return
        value = self._session.values.find(tensor)
        if value is None or not self.buffer.mark_read(value):
            return
        if tensor.is_cpu:
            self.buffer.add(value, self.buffer.read(tensor, self.fingerprint))
        else:
            self.device_statistics.add(value, tensor)

    def requested(self) -> dict[str, Any]:
        """The globs of modules and ops."""
        return {"stats": {"modules": list(self._options.modules or ()), "ops": list(self._options.ops or ())}}

    def columns(self) -> Columns:
        """All statistics so far; waits for the devices."""
        return concatenate(self.buffer.columns(), self.device_statistics.columns())

    def take(self, last: bool) -> Columns:
        """The new statistics, which are removed; those of devices come with the last call."""
        taken = self.buffer.take()
        return concatenate(taken, self.device_statistics.columns()) if last else taken

    def selects_op(self, info: OpInfo) -> bool:
        """Whether the globs on ops select an op."""
        return self._options.ops is None or self._selection.op(info)

    def selects_module(self, number: int) -> bool:
        """Whether the globs on modules select a module."""
        return self._selection.module(number)

    @property
    def native_options(self) -> tuple[int, bool, bool, bool]:
        """For C++: fingerprints (2) or numbers (1), and whether views, parameters, only some modules."""
        return 2 if self.fingerprint else 1, self._views, self._parameters, self.selects_modules

    @property
    def selects_modules(self) -> bool:
        """Whether only ops in some modules are measured."""
        return self._options.modules is not None


def concatenate(first: Columns, second: Columns) -> Columns:
    """The rows of both."""
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


class Selection:
    """The ops and calls that globs select; each op and module is matched once."""

    def __init__(self, session: Session, modules: Any, ops: Any) -> None:
        self._session = session
        self._modules = None if modules is None else [PathPattern(glob) for glob in modules]
        self._ops = ops
        self._selected_ops: dict[int, bool] = {}
        self._selected_modules: dict[tuple[int, bool], bool] = {}

    def __call__(self, event: ObservedOp) -> bool:
        if self._ops is not None and not self.op(event.info):
            return False
        return self._modules is None or (bool(event.modules) and self.module(event.modules[-1]))

    def op(self, info: OpInfo) -> bool:
        """Whether an op is selected."""
        selected = self._selected_ops.get(info.number)
        if selected is None:
            level = "aten" if info.flavour == OP else "api"
            selected = any(op_matches(glob, info.name, level) for glob in self._ops or ())
            self._selected_ops[info.number] = selected
        return selected

    def call(self, call: ObservedCall) -> bool:
        """Whether the module of a call is selected."""
        return self._modules is None or self.module(call.module)

    def module(self, number: int, exactly: bool = False) -> bool:
        """Whether a module is selected, or one that contains it; under any of its paths."""
        selected = self._selected_modules.get((number, exactly))
        if selected is None:
            record = self._session.modules.all[number]
            paths = [segments_of(path) for path in record.aliases or (record.path,)]
            selected = any(
                (pattern.exactly(path) if exactly else pattern(path))
                for pattern in self._modules or ()
                for path in paths
            )
            self._selected_modules[number, exactly] = selected
        return selected


def results_of(session: Session, event: ObservedOp) -> list[Any]:
    """The tensors an op returned, and those it changed in place without returning them."""
    arguments = session.arguments
    changed = arguments.at(event.info.mutates, event.args, event.kwargs)
    return arguments.tensors(event.result, []) + changed


def rewritten_storages(session: Session, event: ObservedOp) -> set[int]:
    """The storages that an op changed through a view: their new versions were not read."""
    changed = session.arguments.at(event.info.mutates, event.args, event.kwargs)
    return {storage_address(one) for one in changed if type(one) is Tensor and one._is_view()}
