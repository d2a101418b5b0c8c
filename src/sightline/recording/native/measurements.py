"""Statistics that C++ takes of results, on a CPU and on CUDA devices, read like the plain engine's."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
import torch

from sightline.recording.cpu_statistics import Columns, Implied, StatisticsBuffer, TensorStatistics
from sightline.recording.device_statistics import Alarm, Cells, DeviceStatistics
from sightline.recording.fingerprints import row_weights_on
from sightline.recording.native.buffers import NativeStream
from sightline.recording.native.schema_forms import dtype_name
from sightline.trace.assembly.arrays import IntArray
from sightline.trace.assembly.layout import COUNTS, FLOATS, LANES

_WIDTH = COUNTS + LANES + FLOATS


class NativeStatistics(StatisticsBuffer):
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

    def add(self, value: int, reading: TensorStatistics) -> None:
        """Keep what Python has read."""
        *numbers, lanes = reading
        self._recording.add_reading(value, *numbers, *lanes)

    def read(self, tensor: Any, fingerprint: bool) -> TensorStatistics:
        """The numbers of a tensor in CPU memory: C++ needs a fifth of the time."""
        found = self._recording.read_numbers(tensor, fingerprint)
        return super().read(tensor, fingerprint) if found is None else TensorStatistics(*found)

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


def _columns(rows: IntArray) -> Columns:
    table = rows.reshape(-1, _WIDTH)
    return table[:, COUNTS + LANES :].copy().view(np.float64), table[:, : COUNTS + LANES]


_ROWS: Final = 8192
_ROW_BYTES: Final = 1024


class DeviceTable:
    """What Python holds of a table of C++'s: its memory."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.list = torch.zeros((_ROWS, 2), dtype=torch.int64, device=cells.device)
        self.list_here = torch.zeros((_ROWS, 2), dtype=torch.int64, pin_memory=True)
        self.number = -1
        self.rows: Any = None  #: value and elements of each row, once C++ writes no more

    def addresses(self, matrix: Any) -> list[int]:
        """What C++ has to know, in its order."""
        cells = self.cells
        parts = (
            cells.sums,
            cells.counts,
            cells.alarm.count,
            cells.alarm.bell,
            matrix,
            self.list,
            self.list_here,
        )
        return [part.data_ptr() for part in parts]


class NativeDeviceStatistics(DeviceStatistics):
    """The tables of all devices, those of C++ among them."""

    def __init__(self, fill: str, recording: Any, scalar_type_name: Any) -> None:
        super().__init__(fill)
        self._recording = recording
        self._scalar_type_name = scalar_type_name
        self._native: list[DeviceTable] = []
        self._open: dict[tuple[int, int], DeviceTable] = {}  # by device and stream

    def prepare(self, index: int, stream: int, scalar_type: int, many: bool, size: int) -> None:
        """Make what C++ is missing to measure tensors of a dtype, on the current device and stream."""
        from sightline.recording.cuda_kernels import compiled, word_matrix

        device = torch.device("cuda", index)
        held = self._open.get((index, stream))
        if held is None or self._used(held) >= _ROWS - 1:
            if held is not None:
                self._finish(held)
            held = DeviceTable(Cells(device, _ROWS, self.alarm_of(device)))
            matrix = word_matrix(device)
            held.number = self._recording.add_table(index, stream, _ROWS, *held.addresses(matrix))
            self._native.append(held)
            self._open[index, stream] = held
        if self.fill == "fingerprints":
            weights = row_weights_on(device, size // _ROW_BYTES + 64)
            self._recording.set_weights(index, weights.data_ptr(), len(weights))
        dtype = getattr(torch, dtype_name(self._scalar_type_name(scalar_type)))
        kernel: Any = None
        try:
            kernel = compiled(dtype, held.cells, self.fill, many)
        finally:  # without one Python is not asked again
            self._recording.add_kernel(index, scalar_type, many, *(kernel or (0, 0, 0, 1, 1, 1)))

    def _used(self, table: DeviceTable) -> int:
        return len(self._recording.table_rows(table.number)) // 16

    def _finish(self, table: DeviceTable) -> None:
        """C++ writes no more to a table: begin to copy it."""
        if table.rows is None:
            table.rows = self._rows(table)
            table.cells.send()

    def _rows(self, table: DeviceTable) -> Any:
        return np.frombuffer(self._recording.table_rows(table.number), dtype=np.int64).reshape(-1, 2)

    def alarm_of(self, device: torch.device) -> Alarm:
        """What counts the NaNs and infinities of a device; C++ hears it too."""
        known = device in self._alarms
        alarm = super().alarm_of(device)
        if not known and alarm.count.is_cuda:
            self._recording.watch_bell(alarm.bell.data_ptr())
        return alarm

    def heard(self, count: int) -> None:
        """So much of what is not finite was looked into."""
        self._recording.heard(count)

    def freeze(self) -> None:
        """C++ is about to forget what it has written."""
        for table in self._native:
            if table.rows is None:
                table.rows = self._rows(table)

    def _more_columns(self) -> list[Columns]:
        parts = []
        for table in self._native:
            rows = self._rows(table) if table.rows is None else table.rows
            parts.append(table.cells.columns(rows[:, 0], rows[:, 1]))
        return parts
