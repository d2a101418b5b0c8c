"""The numbers that C++ takes of results of ops, as the other engine's `Readings` show theirs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from sightline.recording.native.tables import NativeStream
from sightline.recording.readings import Columns, Implied, Reading, Readings
from sightline.trace.assembly.layout import COUNTS, FLOATS, LANES
from sightline.trace.assembly.numbers import Numbers

_WIDTH = COUNTS + LANES + FLOATS


class NativeReadings(Readings):
    """Reads and writes what C++ keeps."""

    native: ClassVar = True

    def __init__(self, recording: Any) -> None:
        self._recording = recording
        self.stream = NativeStream(recording, "readings")
        self.bad: Any = _Odd(recording)
        self._frozen: tuple[int, list[Implied]] | None = None

    def first_time(self, value: int) -> bool:
        """Whether a value has not been read; from now on it has."""
        return not self._recording.looked_at(value, True)

    def known(self, value: int) -> bool:
        """Whether a value was looked at."""
        return bool(self._recording.looked_at(value, False))

    def add(self, value: int, reading: Reading) -> None:
        """Keep what Python has read."""
        *numbers, lanes = reading
        self._recording.add_reading(value, *numbers, *lanes)

    def read(self, tensor: Any, fingerprint: bool) -> Reading:
        """The numbers of a tensor in CPU memory: C++ needs a fifth of the time."""
        found = self._recording.read_numbers(tensor, fingerprint)
        return super().read(tensor, fingerprint) if found is None else Reading(*found)

    def columns(self) -> Columns:
        """What was read: a row each."""
        return _columns(self.stream.numbers())

    def take(self) -> Columns:
        """What was read, which is then no longer here."""
        return _columns(self.stream.take())

    @property
    def checked(self) -> int:
        """How many tensors C++ has looked at."""
        return int(self._recording.checked()) if self._frozen is None else self._frozen[0]

    def copies(self) -> list[Implied]:
        """Values whose NaNs and infinities follow from those of others."""
        if self._frozen is not None:
            return self._frozen[1]
        pairs = np.frombuffer(self._recording.rows("copies", False), dtype=np.int64).reshape(-1, 3)
        return [(value, source, bool(bounded)) for value, source, bounded in pairs.tolist()]

    def freeze(self) -> None:
        """Hold what there is: C++ is about to forget it."""
        self._frozen = self.checked, self.copies()
        self.stream.freeze()

    def stop_telling(self) -> None:
        """Nobody wants to hear of what is not finite any more."""
        self._recording.tell_odd(False)


class _Odd:
    """How many NaNs and infinities values have, of those that have any."""

    def __init__(self, recording: Any) -> None:
        self._recording = recording

    def get(self, value: int) -> tuple[int, int] | None:
        found: tuple[int, int] | None = self._recording.odd(value)
        return found

    def __contains__(self, value: int) -> bool:
        return self._recording.odd(value) is not None

    def __getitem__(self, value: int) -> tuple[int, int]:
        found = self.get(value)
        if found is None:
            raise KeyError(value)
        return found


def _columns(rows: Numbers) -> Columns:
    table = rows.reshape(-1, _WIDTH)
    return table[:, COUNTS + LANES :].copy().view(np.float64), table[:, : COUNTS + LANES]
