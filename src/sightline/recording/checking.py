"""``check="nonfinite"``: no op may make a NaN out of inputs without, nor an infinity out of finite ones.

On a CPU every result is looked at as it is made, in one pass, and the run stops at the op. On another device
the numbers are taken there (`deferred`) along with an alarm that counts what is not finite; at the end of
module calls and steps the alarm is copied over without waiting for it, and looked at when it has arrived.
The op named is the true first one all the same, since the recording knows them all by then.

An op that is given an infinity as a plain argument makes it on purpose, as a mask does. Views show what was
looked at before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sightline.errors import NonFiniteError
from sightline.options import Check
from sightline.patterns import PathPattern, op_matches, segments_of
from sightline.recording.deferred import Deferred
from sightline.recording.measuring import Measurer, Readings, measurable, results_of
from sightline.recording.observing import Observer
from sightline.recording.operations import OP, OpInfo
from sightline.recording.readings import is_finite, read
from sightline.recording.torchapi import Tensor
from sightline.trace.data import TraceData

if TYPE_CHECKING:
    from sightline.recording.lanes import Lane, OpenCall
    from sightline.recording.session import Session

#: What an error says of a recording: the text of its first fault, or None if there is none after all.
Judge = Callable[[TraceData, Check], str | None]


class Checker(Observer):
    """Looks at every floating result, and stops the run at the first fault."""

    def __init__(
        self, session: Session, wanted: Check, measurer: Measurer | None, judge: Judge,
        build: Callable[[Session], TraceData],
    ) -> None:  # fmt: skip
        self._session = session
        self._wanted = wanted
        self._judge = judge
        self._build = build
        self._paths = [PathPattern(glob) for glob in wanted.allow or ()]
        self._measurer = measurer
        self.fingerprint = measurer is not None and measurer.fingerprint
        self.readings = Readings() if measurer is None else measurer.readings
        self.deferred = Deferred("odd") if measurer is None else measurer.deferred
        self.allowed = list(wanted.allow or ())
        self.checked = 0  #: tensors looked at
        self._aten = session.level in ("aten", "both")
        self._found = False
        self._alarm_at = 0  #: the alarm at which it is worth looking again
        self._patience = 1

    def wants(self, info: OpInfo, ids: list[int], result: Any) -> bool:
        """Not what an API call returns, which its ops have made, nor a view of what is fine."""
        if info.uninitialized or (self._aten and info.flavour != OP):
            return False
        bad = self.readings.bad
        return info.aliases < 0 or info.maybe or (bool(bad) and any(one in bad for one in ids))

    # -- where the numbers are at hand -------------------------------------------------------------------

    def op(
        self, lane: Lane, info: OpInfo, node: Any, stack: int, number: int, ids: list[int],
        args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool = False,
    ) -> None:  # fmt: skip
        """Look at the results of an op."""
        nans = infs = 0
        results = (
            (result,) if type(result) is Tensor else results_of(self._session, info, args, kwargs, result)
        )
        for tensor in results:
            found = self._look(tensor)
            if found is not None:
                nans, infs = nans + found[0], infs + found[1]
        if (nans or infs) and not (self._found and self._wanted.on == "report"):
            self._blame(lane, info, ids, args, kwargs, nan=nans > 0, inf=infs > 0)

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
        self.checked += 1
        return self.readings.bad.get(value)

    def _blame(
        self, lane: Lane, info: OpInfo, ids: list[int], args: tuple[Any, ...],
        kwargs: dict[str, Any] | None, nan: bool, inf: bool,
    ) -> None:  # fmt: skip
        """Raise, unless what is not finite was in the inputs already, or is meant to be there."""
        before = [self.readings.bad[one] for one in ids if one in self.readings.bad]
        before += self._odd_inputs(info, args, kwargs)
        had_nan, had_any = any(nans for nans, _ in before), bool(before)
        told_nan, told_inf = _told((args, kwargs or {}))
        makes_nan = nan and not had_nan and not told_nan
        makes_inf = inf and not had_any and not told_inf and not self._was_unknown(info, ids, args, kwargs)
        if (makes_nan or makes_inf) and not self._allowed(lane, info):
            if self._wanted.on == "raise":
                self._read_inputs(args, kwargs)
            text = self._judge(self._build(self._session), self._wanted)
            if text is not None:  # else it is meant, as far as the whole recording knows
                self._found = True
                if self._wanted.on == "raise":
                    raise NonFiniteError(text)

    def _was_unknown(
        self, info: OpInfo, ids: list[int], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> bool:
        """Whether an op changed in place what nobody had looked at: a mask made before the block."""
        changed = self._session.arguments.at(info.mutates, args, kwargs)
        unseen = bool(changed) and any(not self.readings.known(one) for one in ids)
        return unseen or any(type(tensor) is Tensor and tensor._is_view() for tensor in changed)

    def _read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Have the numbers of the inputs for the error; a check alone has not read what is finite."""
        if self._measurer is not None:
            return
        for tensor in self._session.arguments.tensors((args, kwargs or {}), []):
            value = self._session.values.known(tensor)
            if value is not None and value not in self.readings.bad and measurable(tensor) and tensor.is_cpu:
                self.readings.add(value, read(tensor, fingerprint=False))

    def _odd_inputs(
        self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> list[tuple[int, int]]:
        """NaNs and infinities in what an op was given, and has not changed.

        Parameters, inputs and constants are looked at only now; and what was changed through a view of it has
        other numbers than when it was looked at.
        """
        changed = {id(tensor) for tensor in self._session.arguments.at(info.mutates, args, kwargs)}
        found = []
        for tensor in self._session.arguments.tensors((args, kwargs or {}), []):
            if id(tensor) not in changed and measurable(tensor) and tensor.is_cpu and not is_finite(tensor):
                reading = read(tensor, fingerprint=False)
                value = self._session.values.known(tensor)
                if value is not None and self.readings.first_time(value):
                    self.readings.add(value, reading)
                found.append((reading.nans, reading.infs))
        return found

    def _allowed(self, lane: Lane, info: OpInfo) -> bool:
        globs = self._wanted.allow or ()
        names = [(info.name, "aten" if info.flavour == OP else "api")]
        if lane.open_op is not None:
            names.append((self._session.infos[lane.open_op[1]].name, "api"))
        if any(op_matches(glob, name, level) for glob in globs for name, level in names):
            return True
        calls = lane.calls()
        known = self._session.modules.all[calls[-1].module] if calls else None
        paths = (known.aliases or (known.path,)) if known is not None else ()
        return any(meant(segments_of(path)) for meant in self._paths for path in paths)

    # -- where they are on a device ----------------------------------------------------------------------

    def leave(
        self, session: Session, call: OpenCall, args: tuple[Any, ...], result: Any, raised: bool
    ) -> None:
        """A checkpoint: look at the alarm, if it has arrived."""
        self._checkpoint()

    def step(self, session: Session) -> None:
        """A checkpoint too."""
        self._checkpoint()

    def _checkpoint(self) -> None:
        if self._found or not self.deferred.used:
            return
        alarm = self.deferred.alarm()
        if alarm > self._alarm_at:
            self._alarm_at = alarm * self._patience  # masks may hold infinities: do not wait for each again
            self._patience = 2
            self._look_back()

    def _look_back(self) -> None:
        """Find the first fault in the recording so far; waits for the device."""
        text = self._judge(self._build(self._session), self._wanted)
        if text is not None:
            self._found = True
            if self._wanted.on == "raise":
                raise NonFiniteError(text)

    def last_word(self) -> None:
        """At the end of the block: a fault that no checkpoint has seen."""
        if not self._found and self.deferred.alarm(wait=True):
            self._look_back()

    def columns(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The numbers of what was not finite, or of everything if it was measured."""
        if self._measurer is not None:
            return self._measurer.columns()
        floats, counts = self.readings.columns()
        more_floats, more_counts = self.deferred.columns()
        return np.concatenate([floats, more_floats]), np.concatenate([counts, more_counts])


def _told(item: Any) -> tuple[bool, bool]:
    """Whether a plain argument is a NaN, and whether one is infinite: ``masked_fill(mask, -inf)``."""
    if isinstance(item, float | complex):
        parts = (item.real, item.imag)
        return any(map(math.isnan, parts)), any(map(math.isinf, parts))
    held = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
    told = [_told(part) for part in held]
    return any(nan for nan, _ in told), any(inf for _, inf in told)
