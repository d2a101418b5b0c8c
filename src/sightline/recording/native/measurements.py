"""Statistics that C++ takes of results, on a CPU and on CUDA devices, read like the plain engine's."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
import torch

from sightline.data.arrays import IntArray
from sightline.recording.native.buffers import NativeStream
from sightline.recording.native.schema_forms import dtype_name
from sightline.recording.statistics.cpu import Columns, Implied, StatisticsBuffer, TensorStatistics
from sightline.recording.statistics.device import Alarm, Cells, DeviceStatistics
from sightline.recording.statistics.fingerprints import row_weights_on
from sightline.schema.streams import COUNTS, FLOATS, LANES

_WIDTH = COUNTS + LANES + FLOATS


class NativeStatistics(StatisticsBuffer):
    """Statistics that C++ takes and holds."""

    native: ClassVar = True

    def __init__(self, recording: Any) -> None:
        self._recording = recording
        self.stream = NativeStream(recording, "statistics")
        self.nonfinite: Any = _NonFiniteCounts(recording)
        self._frozen: tuple[int, list[Implied]] | None = None

    def mark_read(self, value: int) -> bool:
        return not self._recording.is_measured(value, True)

    def is_read(self, value: int) -> bool:
        return bool(self._recording.is_measured(value, False))

    def add(self, value: int, numbers: TensorStatistics) -> None:
        """Add statistics that Python has taken."""
        *plain, lanes = numbers
        self._recording.add_statistics(value, *plain, *lanes)

    def read(self, tensor: Any, fingerprint: bool) -> TensorStatistics:
        """The statistics of a tensor in CPU memory: C++ needs a fifth of the time."""
        numbers = self._recording.read_numbers(tensor, fingerprint)
        return super().read(tensor, fingerprint) if numbers is None else TensorStatistics(*numbers)

    def columns(self) -> Columns:
        return _columns(self.stream.numbers())

    def take(self) -> Columns:
        return _columns(self.stream.take())

    @property
    def checked(self) -> int:
        return int(self._recording.checked()) if self._frozen is None else self._frozen[0]

    def copies(self) -> list[Implied]:
        """Values whose NaNs and infinities follow from those of others."""
        if self._frozen is not None:
            return self._frozen[1]
        pairs = np.frombuffer(self._recording.rows("copies", False), dtype=np.int64).reshape(-1, 3)
        return [(value, source, bool(bounded)) for value, source, bounded in pairs.tolist()]

    def freeze(self) -> None:
        self._frozen = self.checked, self.copies()
        self.stream.freeze()

    def stop_reporting(self) -> None:
        self._recording.report_nonfinite(False)


class _NonFiniteCounts:
    """The counts of NaNs and infinities of values that have any, as a mapping."""

    def __init__(self, recording: Any) -> None:
        self._recording = recording

    def get(self, value: int) -> tuple[int, int] | None:
        counts: tuple[int, int] | None = self._recording.nonfinite(value)
        return counts

    def __contains__(self, value: int) -> bool:
        return self._recording.nonfinite(value) is not None

    def __getitem__(self, value: int) -> tuple[int, int]:
        counts = self.get(value)
        if counts is None:
            raise KeyError(value)
        return counts


def _columns(rows: IntArray) -> Columns:
    table = rows.reshape(-1, _WIDTH)
    return table[:, COUNTS + LANES :].copy().view(np.float64), table[:, : COUNTS + LANES]


_ROWS: Final = 8192
_ROW_BYTES: Final = 1024


class DeviceTable:
    """The memory of a table that C++ fills."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.list = torch.zeros((_ROWS, 2), dtype=torch.int64, device=cells.device)
        self.list_here = torch.zeros((_ROWS, 2), dtype=torch.int64, pin_memory=True)
        self.number = -1
        self.rows: Any = None  #: value and elements of each row, once C++ writes no more

    def addresses(self, matrix: Any) -> list[int]:
        """The addresses that C++ needs, in its order."""
        cells = self.cells
        parts = (
            cells.sums,
            cells.counts,
            cells.alarm.count,
            cells.alarm.host_count,
            matrix,
            self.list,
            self.list_here,
        )
        return [part.data_ptr() for part in parts]


class NativeDeviceStatistics(DeviceStatistics):
    """The tables of all devices, those that C++ fills among them."""

    def __init__(self, fill: str, recording: Any, scalar_type_name: Any) -> None:
        super().__init__(fill)
        self._recording = recording
        self._scalar_type_name = scalar_type_name
        self._native: list[DeviceTable] = []
        self._open: dict[tuple[int, int], DeviceTable] = {}  # by device and stream

    def prepare(self, index: int, stream: int, scalar_type: int, many: bool, size: int) -> None:
        """Make the table, weights and kernel that C++ lacks for a dtype, on the current device and stream."""
        from sightline.recording.statistics.cuda_kernels import compiled, word_matrix

        device = torch.device("cuda", index)
        table = self._open.get((index, stream))
        if table is None or len(self._recording.table_rows(table.number)) // 16 >= _ROWS - 1:
            if table is not None and table.rows is None:  # C++ writes no more to it
                table.rows = self._rows(table)
                table.cells.send()
            table = DeviceTable(Cells(device, _ROWS, self.alarm_of(device)))
            matrix = word_matrix(device)
            table.number = self._recording.add_table(index, stream, _ROWS, *table.addresses(matrix))
            self._native.append(table)
            self._open[index, stream] = table
        if self.fill == "fingerprints":
            weights = row_weights_on(device, size // _ROW_BYTES + 64)
            self._recording.set_weights(index, weights.data_ptr(), len(weights))
        dtype = getattr(torch, dtype_name(self._scalar_type_name(scalar_type)))
        kernel: Any = None
        try:
            kernel = compiled(dtype, table.cells, self.fill, many)
        finally:  # also without one, so that C++ does not ask again
            self._recording.add_kernel(index, scalar_type, many, *(kernel or (0, 0, 0, 1, 1, 1)))

    def _rows(self, table: DeviceTable) -> Any:
        return np.frombuffer(self._recording.table_rows(table.number), dtype=np.int64).reshape(-1, 2)

    def alarm_of(self, device: torch.device) -> Alarm:
        """The alarm of a device; C++ reads it too."""
        known = device in self._alarms
        alarm = super().alarm_of(device)
        if not known and alarm.count.is_cuda:
            self._recording.watch_alarm(alarm.host_count.data_ptr())
        return alarm

    def acknowledge(self, count: int) -> None:
        self._recording.acknowledge(count)

    def freeze(self) -> None:
        for table in self._native:
            if table.rows is None:
                table.rows = self._rows(table)

    def _more_columns(self) -> list[Columns]:
        parts = []
        for table in self._native:
            rows = self._rows(table) if table.rows is None else table.rows
            parts.append(table.cells.columns(rows[:, 0], rows[:, 1]))
        return parts
