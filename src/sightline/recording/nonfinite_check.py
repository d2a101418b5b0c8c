"""``check="nonfinite"``: no op may make a NaN out of inputs without, nor an infinity out of finite ones.

On a CPU every result is examined as it is made, in one pass, and the run stops at the op. On another device
the statistics are taken there (`statistics.device`) along with an alarm that counts NaNs and infinities; at
the end of module calls and steps the alarm is read without waiting for the device. The op that is named is
the true first one all the same, since by then all ops are recorded.

An op that takes an infinity as a plain argument makes it on purpose, as a mask does. Views are not examined:
their base was. Results of compiled code are examined when they are first seen: returned by a module call,
read by an op, or in a variable at the end of the block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.data.index import Index
from sightline.data.nonfinite_rule import INF, NAN, argument_states, new_states
from sightline.data.trace_data import TraceData
from sightline.errors import NonFiniteError
from sightline.options import Check
from sightline.patterns import PathPattern, op_matches, segments_of
from sightline.recording.compilations import COMPILED_BACKWARD
from sightline.recording.observers import ObservedCall, ObservedOp, Observer
from sightline.recording.operations import COPY, OP, OpInfo
from sightline.recording.stacks import frames_from
from sightline.recording.statistics.cpu import Columns, Implied, StatisticsBuffer, is_finite, read
from sightline.recording.statistics.observer import (
    StatisticsObserver,
    concatenate,
    measurable,
    results_of,
    rewritten_storages,
)
from sightline.recording.torchapi import Tensor, storage_address

if TYPE_CHECKING:
    from sightline.recording.session import Session

_TRACING: Final = "sightline.tracing"


class NonFiniteChecker(Observer):
    """Examines every floating result, and stops the run at the first fault."""

    def __init__(
        self, session: Session, options: Check, statistics: StatisticsObserver | None,
        build: Callable[[Session], TraceData],
    ) -> None:  # fmt: skip
        self._session = session
        self._options = options
        self._build = build
        self._paths = [PathPattern(glob) for glob in options.allow or ()]
        self._statistics = statistics
        self.fingerprint = statistics is not None and statistics.fingerprint
        self.buffer: StatisticsBuffer = (
            session.new_statistics_buffer() if statistics is None else statistics.buffer
        )
        self.device_statistics = (
            session.new_device_statistics("nonfinite") if statistics is None else statistics.device_statistics
        )
        self.allowed = list(options.allow or ())
        self._checked = 0
        self._aten = session.level in ("aten", "both")
        self.ops = self.calls = not self.buffer.native
        self.api = not self._aten
        self._reported = False
        self._alarm_limit = 0  #: the count above which the recording is checked again
        self._patience = 1
        self._copies: list[Implied] = []  #: results that hold the elements of an examined value
        self._rewritten: set[int] = set()  # storages that were changed through a view of them
        self._examined: set[int | None] = set()  # values of regions
        self._nonfinite = 0  #: how many tensors of regions are not finite
        self._nonfinite_limit = 1
        self._tensors_before = {id(tensor): ref(tensor) for tensor in _variables()}

    def wants(self, event: ObservedOp) -> bool:
        """Not an API call, whose ops are examined, nor a view of finite elements."""
        if self._aten and event.info.flavour != OP:
            return False
        if self.buffer.native:
            return event.nonfinite
        if event.info.uninitialized:
            return False
        return self._may_change(event.info, event.ids) or (
            bool(self._session.regions) and any(not self.buffer.is_read(one) for one in event.ids)
        )

    def _may_change(self, info: OpInfo, ids: list[int]) -> bool:
        """Whether a result may be anything but a view of finite elements."""
        nonfinite = self.buffer.nonfinite
        return info.aliases < 0 or info.maybe or (bool(nonfinite) and any(one in nonfinite for one in ids))

    def forget(self, tensor: Any) -> bool:
        """Drop the weak reference to a tensor; whether there was one, for `restore`."""
        return self._tensors_before.pop(id(tensor), None) is not None

    def forget_all(self) -> None:
        """Drop the weak references to all tensors."""
        self._tensors_before.clear()

    def restore(self, tensor: Any) -> None:
        """Put a reference back that `forget` has dropped."""
        self._tensors_before[id(tensor)] = ref(tensor)

    @property
    def checked(self) -> int:
        """How many tensors were examined."""
        return self._checked + self.buffer.checked

    # -- tensors in CPU memory ---------------------------------------------------------------------------

    def op(self, event: ObservedOp) -> None:
        """Examine the results of an op."""
        info = event.info
        if self._session.regions:
            self._examine_regions((event.args, event.kwargs or {}))
            if not self._may_change(info, event.ids):
                return
        if info.preserves == COPY and self._is_a_copy(event):
            return
        if info.mutates:
            self._rewritten |= rewritten_storages(self._session, event)
        nans = infs = 0
        plain = type(event.result) is Tensor
        for tensor in (event.result,) if plain else results_of(self._session, event):
            counts = self._examine(tensor)
            if counts is not None:
                nans, infs = nans + counts[0], infs + counts[1]
        if (nans or infs) and not (self._reported and self._options.on == "report"):
            self._check_op(event, nan=nans > 0, inf=infs > 0)

    def _examine(self, tensor: Any) -> tuple[int, int] | None:
        """The counts of NaNs and infinities of a tensor, if it has any and they are known by now."""
        if not measurable(tensor):
            return None
        value = self._session.values.find(tensor)
        if value is None:
            return None
        if not self.buffer.is_read(value):
            self.buffer.mark_read(value)
            if not tensor.is_cpu:
                self.device_statistics.add(value, tensor)
            elif not is_finite(tensor):
                self.buffer.add(value, read(tensor, fingerprint=False))
        self._checked += not self.buffer.native  # else C++ has counted it
        return self.buffer.nonfinite.get(value)

    def _is_a_copy(self, event: ObservedOp) -> bool:
        """Whether a result holds the elements of an examined, finite input, and all are in its range."""
        ids, result = event.ids, event.result
        if len(ids) != 1 or not self.buffer.is_read(ids[0]) or ids[0] in self.buffer.nonfinite:
            return False
        source, value = event.args[0], self._session.values.find(result)
        if (
            value is None
            or source.device != result.device
            or not _is_range_within(result.dtype, source.dtype)
        ):
            return False
        if self._rewritten and storage_address(source) in self._rewritten:
            return False
        if self.buffer.mark_read(value):
            self._copies.append((value, ids[0], False))
        self._checked += 1
        return True

    def _check_op(self, event: ObservedOp, nan: bool, inf: bool) -> None:
        """Check the recording so far, if the rule blames this op: that may show that it is allowed."""
        before = [self.buffer.nonfinite[one] for one in event.ids if one in self.buffer.nonfinite]
        before += self._nonfinite_inputs(event)
        inputs = INF * bool(before) | NAN * any(nans for nans, _ in before)
        changed = self._session.arguments.at(event.info.mutates, event.args, event.kwargs)
        # It may change in place a mask that was made before the block and never examined. A parameter is no
        # mask: an infinite one shows in the forward pass, before an optimizer changes it.
        may_be_mask = any(not isinstance(one, torch.nn.Parameter) for one in changed)
        unexamined = may_be_mask and any(not self.buffer.is_read(one) for one in event.ids)
        outputs = NAN * nan | INF * (inf and not unexamined)
        requested = argument_states((event.args, event.kwargs or {}))
        if new_states(outputs, inputs, requested) and not self._allowed(event):
            if self._options.on == "raise":
                self._read_inputs(event)
            self._check_recording()

    def _read_inputs(self, event: ObservedOp) -> None:
        """Take the statistics of the inputs for the error; a check alone takes none of finite tensors."""
        if self._statistics is not None:
            return
        for tensor in self._session.arguments.tensors((event.args, event.kwargs or {}), []):
            value = self._session.values.find(tensor)
            if (
                value is not None
                and value not in self.buffer.nonfinite
                and measurable(tensor)
                and tensor.is_cpu
            ):
                self.buffer.add(value, read(tensor, fingerprint=False))

    def _nonfinite_inputs(self, event: ObservedOp) -> list[tuple[int, int]]:
        """NaNs and infinities in the inputs that an op has not changed.

        Parameters, inputs and constants are examined only now, and again after a change through a view.
        """
        given = self._session.arguments.at(event.info.mutates, event.args, event.kwargs)
        changed = {id(tensor) for tensor in given}
        counts = []
        for tensor in self._session.arguments.tensors((event.args, event.kwargs or {}), []):
            if id(tensor) not in changed and measurable(tensor) and tensor.is_cpu and not is_finite(tensor):
                numbers = read(tensor, fingerprint=False)
                value = self._session.values.find(tensor)
                if value is not None and self.buffer.mark_read(value):
                    self.buffer.add(value, numbers)
                counts.append((numbers.nans, numbers.infs))
        return counts

    def _allowed(self, event: ObservedOp) -> bool:
        globs = self._options.allow or ()
        names = [(event.info.name, "aten" if event.info.flavour == OP else "api")]
        if event.api is not None:
            names.append((event.api.name, "api"))
        if any(op_matches(glob, name, level) for glob in globs for name, level in names):
            return True
        record = self._session.modules.all[event.modules[-1]] if event.modules else None
        paths = (record.aliases or (record.path,)) if record is not None else ()
        return any(pattern(segments_of(path)) for pattern in self._paths for path in paths)

    # -- results of compiled code ------------------------------------------------------------------------

    def _examine_regions(self, tree: Any) -> None:
        """Examine tensors that were not examined: results of compiled code are among them."""
        if self._reported:
            return
        unseen = []
        for tensor in self._session.arguments.tensors(tree, []):
            value = self._session.values.find(tensor)
            if value is None or value in self._examined:
                continue
            # C++ may have examined it before it notified us: then it is seen here for the first time.
            if not self.buffer.is_read(value) or (self.buffer.native and value in self.buffer.nonfinite):
                unseen.append(tensor)
        self._examined.update(self._session.values.find(tensor) for tensor in unseen)
        self._nonfinite += sum(self._examine(tensor) is not None for tensor in unseen)
        if self._nonfinite >= self._nonfinite_limit:
            self._nonfinite_limit = 2 * self._nonfinite  # masks may hold infinities: do not check for each
            # An input of a region may have had a NaN already, and must not be blamed on the region.
            for value, tensor in self._session.values.live_tensors():
                if not self.buffer.is_read(value) and measurable(tensor):
                    if tensor.is_cpu and not is_finite(tensor):
                        self.buffer.mark_read(value)
                        self.buffer.add(value, read(tensor, fingerprint=False))
            self._check_recording()

    # -- tensors on a device -----------------------------------------------------------------------------

    def leave(self, call: ObservedCall) -> None:
        """A checkpoint: read the alarm."""
        if self._session.regions and not call.raised:
            self._examine_regions(call.result)
        self._checkpoint()

    def step(self) -> None:
        """A checkpoint too."""
        self._checkpoint()

    def _checkpoint(self) -> None:
        if self._reported or not self.device_statistics.used:
            return
        alarm = self.device_statistics.alarm()
        if alarm > self._alarm_limit:
            self._alarm_limit = alarm * self._patience  # masks may hold infinities: do not wait for each
            self._patience = 2
            self.device_statistics.acknowledge(self._alarm_limit)
            self._check_recording()

    def _check_recording(self) -> None:
        """Report the first fault in the recording so far, if there is one; waits for the device."""
        from sightline.analysis.nonfinite import first_nonfinite

        fault = first_nonfinite(Index(self._build(self._session)), allow=self._options.allow or ())
        if fault is not None:
            self._reported = True
            self.buffer.stop_reporting()
            if self._options.on == "raise":
                raise NonFiniteError(fault.text())

    def check_at_end(self) -> None:
        """At the end of the block: report a fault that no checkpoint has seen."""
        if self._session.regions and not self._reported:
            new = [
                one for one in _variables() if self._tensors_before.get(id(one), lambda: None)() is not one
            ]
            if any(info.name == COMPILED_BACKWARD for info in self._session.infos):
                new += [one.grad for _, one in self._session.modules.parameters() if one.grad is not None]
            for tensor in new:
                self._session.values.value(tensor)
            self._nonfinite_limit = min(self._nonfinite_limit, self._nonfinite + 1)
            self._examine_regions(new)
        if not self._reported and (self._nonfinite or self.device_statistics.alarm(wait=True)):
            self._check_recording()

    def requested(self) -> dict[str, Any]:
        """The globs of ops and modules that may make a NaN."""
        return {"check": {"allow": self.allowed}}

    def columns(self) -> Columns:
        """The statistics of the tensors with NaNs or infinities, or of all with ``stats=``."""
        if self._statistics is not None:
            return self._statistics.columns()
        return self._with_copies(*concatenate(self.buffer.columns(), self.device_statistics.columns()))

    def take(self, last: bool) -> Columns:
        """The new statistics, which are removed; those of devices come with the last call."""
        if self._statistics is not None:
            return self._statistics.take(last)
        taken = self.buffer.take()
        return self._with_copies(*concatenate(taken, self.device_statistics.columns())) if last else taken

    def _with_copies(self, floats: NDArray[np.float64], counts: NDArray[np.int64]) -> Columns:
        """Add rows for copies: they have the numbers of their originals."""
        copies = self._copies + self.buffer.copies()
        rows = {value: row for row, value in enumerate(counts[:, 0].tolist())} if copies else {}
        added = [
            (value, rows.setdefault(value, rows[of]), bounded) for value, of, bounded in copies if of in rows
        ]
        if not added:
            return floats, counts
        values, sources, bounded = np.array(added, dtype=np.int64).T
        copied = counts[sources].copy()
        copied[bounded == 1, 3] = 0
        copied[:, 0] = values
        return np.concatenate([floats, floats[sources]]), np.concatenate([counts, copied])


@cache
def _is_range_within(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a number of one dtype stays finite in another."""
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow
    return torch.finfo(wide).max >= torch.finfo(narrow).max


def _variables() -> list[Any]:
    """The tensors in the variables of the block's own frame, which has called `sightline.tracing`."""
    called = False
    for at in frames_from(sys._getframe(1)):
        ours = at.f_globals.get("__name__") == _TRACING
        if called and not ours:
            return [one for one in at.f_locals.values() if isinstance(one, Tensor)]
        called = ours
    return []
