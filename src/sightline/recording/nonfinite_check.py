"""``check="nonfinite"``: no op may make a NaN out of inputs without, nor an infinity out of finite ones.

On a CPU every result is looked at as it is made, in one pass, and the run stops at the op. On another device
the numbers are taken there (`deferred`) along with an alarm that counts what is not finite; at the end of
module calls and steps the alarm is copied over without waiting for it, and looked at when it has arrived.
The op named is the true first one all the same, since the recording knows them all by then.

An op that is given an infinity as a plain argument makes it on purpose, as a mask does. Views show what was
looked at before. What compiled code returns is looked at when it is first seen: by the module call that
returns it, by the op that reads it, or in a variable at the end of the block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.errors import NonFiniteError
from sightline.options import Check
from sightline.patterns import PathPattern, op_matches, segments_of
from sightline.recording.compiled_code import COMPILED_BACKWARD
from sightline.recording.cpu_statistics import Columns, Implied, StatisticsBuffer, is_finite, read
from sightline.recording.observers import ObservedCall, ObservedOp, Observer
from sightline.recording.operations import COPY, OP, OpInfo
from sightline.recording.statistics import StatisticsObserver, joined, measurable, results_of
from sightline.recording.torchapi import Tensor, storage_address
from sightline.trace.data import TraceData
from sightline.trace.nonfinite_rule import INF, NAN, argument_states, new_states

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

_DOOR: Final = "sightline.tracing"

#: What an error says of a recording: the text of its first fault, or None if there is none after all.
Judge = Callable[[TraceData, Check], str | None]


class NonFiniteChecker(Observer):
    """Looks at every floating result, and stops the run at the first fault."""

    def __init__(
        self, session: SessionBase, wanted: Check, measurer: StatisticsObserver | None, judge: Judge,
        build: Callable[[SessionBase], TraceData],
    ) -> None:  # fmt: skip
        self._session = session
        self._wanted = wanted
        self._judge = judge
        self._build = build
        self._paths = [PathPattern(glob) for glob in wanted.allow or ()]
        self._measurer = measurer
        self.fingerprint = measurer is not None and measurer.fingerprint
        self.readings: StatisticsBuffer = session.new_readings() if measurer is None else measurer.readings
        self.deferred = session.new_deferred("odd") if measurer is None else measurer.deferred
        self.allowed = list(wanted.allow or ())
        self._checked = 0
        self._aten = session.level in ("aten", "both")
        self.ops = self.calls = not self.readings.native
        self.api = not self._aten
        self._found = False
        self._alarm_at = 0  #: the alarm at which it is worth looking again
        self._patience = 1
        self._copies: list[Implied] = []  #: results that hold what was looked at
        self._rewritten: set[int] = set()  # storages that were changed through a view of them
        self._met: set[int | None] = set()  # values that were looked at here
        self._odd = 0  #: tensors found that are not finite and that no op made
        self._odd_at = 1
        self._before = {id(tensor): ref(tensor) for tensor in _variables()}

    def wants(self, event: ObservedOp) -> bool:
        """Not what an API call returns, which its ops have made, nor a view of what is fine."""
        if self._aten and event.info.flavour != OP:
            return False
        if self.readings.native:
            return event.odd
        if event.info.uninitialized:
            return False
        return self._may_change(event.info, event.ids) or (
            bool(self._session.regions) and any(not self.readings.known(one) for one in event.ids)
        )

    def _may_change(self, info: OpInfo, ids: list[int]) -> bool:
        """Whether a result is anything but a view of what is fine."""
        bad = self.readings.bad
        return info.aliases < 0 or info.maybe or (bool(bad) and any(one in bad for one in ids))

    @property
    def checked(self) -> int:
        """How many tensors were looked at."""
        return self._checked + self.readings.checked

    # -- where the numbers are at hand -------------------------------------------------------------------

    def op(self, event: ObservedOp) -> None:
        """Look at the results of an op."""
        info = event.info
        if self._session.regions:
            self._look_at_regions((event.args, event.kwargs or {}))
            if not self._may_change(info, event.ids):
                return
        if info.preserves == COPY and self._is_a_copy(event):
            return
        if info.mutates:
            self._note_rewritten(self._session.arguments.at(info.mutates, event.args, event.kwargs))
        nans = infs = 0
        plain = type(event.result) is Tensor
        for tensor in (event.result,) if plain else results_of(self._session, event):
            found = self._look(tensor)
            if found is not None:
                nans, infs = nans + found[0], infs + found[1]
        if (nans or infs) and not (self._found and self._wanted.on == "report"):
            self._blame(event, nan=nans > 0, inf=infs > 0)

    def _look(self, tensor: Any) -> tuple[int, int] | None:
        """NaNs and infinities of a tensor, if it has any and they are known by now."""
        if not measurable(tensor):
            return None
        value = self._session.values.known(tensor)
        if value is None:
            return None
        if not self.readings.known(value):
            self.readings.first_time(value)
            if not tensor.is_cpu:
                self.deferred.add(value, tensor)
            elif not is_finite(tensor):
                self.readings.add(value, read(tensor, fingerprint=False))
        self._checked += not self.readings.native  # else C++ has counted it
        return self.readings.bad.get(value)

    def _note_rewritten(self, changed: list[Any]) -> None:
        """What was changed through a view is not what was looked at."""
        for tensor in changed:
            if type(tensor) is Tensor and tensor._is_view():
                self._rewritten.add(storage_address(tensor))

    def _is_a_copy(self, event: ObservedOp) -> bool:
        """Whether a result holds the elements of what was looked at and is finite, none out of range."""
        ids, result = event.ids, event.result
        if len(ids) != 1 or not self.readings.known(ids[0]) or ids[0] in self.readings.bad:
            return False
        source, value = event.args[0], self._session.values.known(result)
        if value is None or source.device != result.device or not _holds(result.dtype, source.dtype):
            return False
        if self._rewritten and storage_address(source) in self._rewritten:
            return False
        if self.readings.first_time(value):
            self._copies.append((value, ids[0], False))
        self._checked += 1
        return True

    def _blame(self, event: ObservedOp, nan: bool, inf: bool) -> None:
        """Have the recording so far judged, if the rule blames this op; raise if the judge does, too."""
        before = [self.readings.bad[one] for one in event.ids if one in self.readings.bad]
        before += self._odd_inputs(event)
        inputs = INF * bool(before) | NAN * any(nans for nans, _ in before)
        outputs = NAN * nan | INF * (inf and not self._was_unknown(event))
        requested = argument_states((event.args, event.kwargs or {}))
        if new_states(outputs, inputs, requested) and not self._allowed(event):
            if self._wanted.on == "raise":
                self._read_inputs(event)
            text = self._judge(self._build(self._session), self._wanted)
            if text is not None:  # else it is meant, as far as the whole recording knows
                self._found = True
                self.readings.stop_telling()
                if self._wanted.on == "raise":
                    raise NonFiniteError(text)

    def _was_unknown(self, event: ObservedOp) -> bool:
        """Whether an op changed in place what nobody had looked at: a mask made before the block.

        A parameter is no mask: an infinite one shows in the forward pass, before an optimizer changes it.
        """
        given = self._session.arguments.at(event.info.mutates, event.args, event.kwargs)
        changed = [tensor for tensor in given if not isinstance(tensor, torch.nn.Parameter)]
        return bool(changed) and any(not self.readings.known(one) for one in event.ids)

    def _read_inputs(self, event: ObservedOp) -> None:
        """Have the numbers of the inputs for the error; a check alone has not read what is finite."""
        if self._measurer is not None:
            return
        for tensor in self._session.arguments.tensors((event.args, event.kwargs or {}), []):
            value = self._session.values.known(tensor)
            if value is not None and value not in self.readings.bad and measurable(tensor) and tensor.is_cpu:
                self.readings.add(value, read(tensor, fingerprint=False))

    def _odd_inputs(self, event: ObservedOp) -> list[tuple[int, int]]:
        """NaNs and infinities in what an op was given, and has not changed.

        Parameters, inputs and constants are looked at only now; and what was changed through a view of it has
        other numbers than when it was looked at.
        """
        given = self._session.arguments.at(event.info.mutates, event.args, event.kwargs)
        changed = {id(tensor) for tensor in given}
        found = []
        for tensor in self._session.arguments.tensors((event.args, event.kwargs or {}), []):
            if id(tensor) not in changed and measurable(tensor) and tensor.is_cpu and not is_finite(tensor):
                reading = read(tensor, fingerprint=False)
                value = self._session.values.known(tensor)
                if value is not None and self.readings.first_time(value):
                    self.readings.add(value, reading)
                found.append((reading.nans, reading.infs))
        return found

    def _allowed(self, event: ObservedOp) -> bool:
        globs = self._wanted.allow or ()
        names = [(event.info.name, "aten" if event.info.flavour == OP else "api")]
        if event.api is not None:
            names.append((event.api.name, "api"))
        if any(op_matches(glob, name, level) for glob in globs for name, level in names):
            return True
        known = self._session.modules.all[event.modules[-1]] if event.modules else None
        paths = (known.aliases or (known.path,)) if known is not None else ()
        return any(meant(segments_of(path)) for meant in self._paths for path in paths)

    # -- what came out of compiled code ------------------------------------------------------------------

    def _look_at_regions(self, held: Any) -> None:
        """Look at tensors that nobody has looked at: what compiled code made is among them."""
        if self._found:
            return
        unseen = [one for one in self._session.arguments.tensors(held, []) if self._is_of_a_region(one)]
        self._met.update(self._session.values.known(tensor) for tensor in unseen)
        self._odd += sum(self._look(tensor) is not None for tensor in unseen)
        if self._odd >= self._odd_at:
            self._odd_at = 2 * self._odd  # masks may hold infinities: do not look back for each
            self._look_at_everything_alive()
            self._look_back()

    def _is_of_a_region(self, tensor: Any) -> bool:
        known = self._session.values.known(tensor)
        if known is None or known in self._met:
            return False
        # C++ has looked at it before it told of it; then it is met here for the first time.
        return not self.readings.known(known) or (self.readings.native and known in self.readings.bad)

    def _look_at_everything_alive(self) -> None:
        """Before a region is blamed: what it was given may have come with a NaN, and was never looked at."""
        for value, tensor in self._session.values.living():
            if not self.readings.known(value) and measurable(tensor):
                if tensor.is_cpu and not is_finite(tensor):
                    self.readings.first_time(value)
                    self.readings.add(value, read(tensor, fingerprint=False))

    # -- where they are on a device ----------------------------------------------------------------------

    def leave(self, call: ObservedCall) -> None:
        """A checkpoint: look at the alarm, if it has arrived."""
        if self._session.regions and not call.raised:
            self._look_at_regions(call.result)
        self._checkpoint()

    def step(self) -> None:
        """A checkpoint too."""
        self._checkpoint()

    def _checkpoint(self) -> None:
        if self._found or not self.deferred.used:
            return
        alarm = self.deferred.alarm()
        if alarm > self._alarm_at:
            self._alarm_at = alarm * self._patience  # masks may hold infinities: do not wait for each again
            self._patience = 2
            self.deferred.heard(self._alarm_at)
            self._look_back()

    def _look_back(self) -> None:
        """Find the first fault in the recording so far; waits for the device."""
        text = self._judge(self._build(self._session), self._wanted)
        if text is not None:
            self._found = True
            self.readings.stop_telling()
            if self._wanted.on == "raise":
                raise NonFiniteError(text)

    def last_word(self) -> None:
        """At the end of the block: a fault that no checkpoint has seen."""
        if self._session.regions and not self._found:
            made = [one for one in _variables() if self._before.get(id(one), _nothing)() is not one]
            if any(info.name == COMPILED_BACKWARD for info in self._session.infos):
                made += [one.grad for _, one in self._session.modules.parameters() if one.grad is not None]
            for tensor in made:
                self._session.values.value(tensor)
            self._odd_at = min(self._odd_at, self._odd + 1)
            self._look_at_regions(made)
        if not self._found and (self._odd or self.deferred.alarm(wait=True)):
            self._look_back()

    def asked(self) -> dict[str, Any]:
        """What may make a NaN."""
        return {"check": {"allow": self.allowed}}

    def columns(self) -> Columns:
        """The numbers of what was not finite, or of everything if it was measured."""
        if self._measurer is not None:
            return self._measurer.columns()
        return self._with_copies(*joined(self.readings.columns(), self.deferred.columns()))

    def take(self, last: bool) -> Columns:
        """The same, which is then no longer here; what the devices have comes with the last."""
        if self._measurer is not None:
            return self._measurer.take(last)
        taken = self.readings.take()
        return self._with_copies(*joined(taken, self.deferred.columns())) if last else taken

    def _with_copies(self, floats: NDArray[np.float64], counts: NDArray[np.int64]) -> Columns:
        """Copies have the numbers of what they were made from."""
        copies = self._copies + self.readings.copies()
        rows = {value: row for row, value in enumerate(counts[:, 0].tolist())} if copies else {}
        made = [
            (value, rows.setdefault(value, rows[of]), bounded) for value, of, bounded in copies if of in rows
        ]
        if not made:
            return floats, counts
        values, sources, bounded = np.array(made, dtype=np.int64).T
        copied = counts[sources].copy()
        copied[bounded == 1, 3] = 0
        copied[:, 0] = values
        return np.concatenate([floats, floats[sources]]), np.concatenate([counts, copied])


@cache
def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a number of one dtype stays finite in another."""
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow
    return torch.finfo(wide).max >= torch.finfo(narrow).max


def _variables() -> list[Any]:
    """The tensors in the variables of the block's own frame, which has called `sightline.tracing`."""
    at: FrameType | None = sys._getframe(1)
    asked = False
    while at is not None:
        ours = at.f_globals.get("__name__") == _DOOR
        if asked and not ours:
            return [one for one in at.f_locals.values() if isinstance(one, Tensor)]
        asked, at = ours, at.f_back
    return []


def _nothing() -> None:
    """What a reference that was never made points to."""
