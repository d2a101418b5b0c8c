"""Statistics of tensors on a device: computed and kept there, fetched when the recording is over.

Nothing here waits for the device. Each tensor gets a row of a table on its own device: extremes, sum and sum
of squares, counts and the lanes of the fingerprint. A table that is full is copied to the host in the
background. On CUDA one fused kernel fills a row in one pass; elsewhere, and without Triton, torch's own
reductions do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from sightline.recording.statistics.cpu import Columns, flattened
from sightline.recording.statistics.fingerprints import LANES, lanes_of, plain_nan

_ROWS: Final = 2048
_SUMS: Final = 4  # min, max, sum, sum of squares
_COUNTS: Final = 4  # elements, zeros, nans, infs; the lanes follow


class DeviceStatistics:
    """The tables of all devices."""

    def __init__(self, fill: str) -> None:
        self.fill = fill  #: "nonfinite": only NaNs and infinities are counted; "numbers"; "fingerprints": all
        self._tables: dict[torch.device, list[Table]] = {}
        self._alarms: dict[torch.device, Alarm] = {}

    @property
    def used(self) -> bool:
        """Whether any tensor was on a device."""
        return bool(self._alarms)

    def alarm(self, wait: bool = False) -> int:
        """How many NaNs and infinities the devices have counted, as of the last finished copy, or all."""
        return sum(int(alarm.count) if wait else alarm.received() for alarm in self._alarms.values())

    def add(self, value: int, tensor: Any) -> None:
        """Take the statistics of a tensor, on its device."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # our kernel would become part of the captured graph
        self.table(tensor.device).add(value, tensor)

    def table(self, device: torch.device) -> Table:
        """The table of a device that has room."""
        tables = self._tables.setdefault(device, [])
        if not tables or tables[-1].full:
            if tables:
                tables[-1].send()
            tables.append(Table(device, self.fill, self.alarm_of(device)))
        return tables[-1]

    def acknowledge(self, count: int) -> None:
        """The check has examined an alarm of this count."""

    def freeze(self) -> None:
        """Copy the statistics of C++, which are about to be freed."""

    def alarm_of(self, device: torch.device) -> Alarm:
        """The alarm of a device."""
        if device not in self._alarms:
            self._alarms[device] = Alarm(device)
        return self._alarms[device]

    def columns(self) -> Columns:
        """All statistics so far; waits for the devices."""
        parts = [table.columns() for tables in self._tables.values() for table in tables]
        parts += self._more_columns()
        floats = np.concatenate([np.zeros((0, 5)), *(part[0] for part in parts)])
        counts = np.concatenate([np.zeros((0, 4 + LANES), dtype=np.int64), *(part[1] for part in parts)])
        return floats, counts

    def _more_columns(self) -> list[Columns]:
        """The statistics of C++."""
        return []


class Alarm:
    """A count of NaNs and infinities on a device, which the host can read without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        #: Pinned memory of the host, to which the device copies the count.
        self.host_count = (
            torch.zeros(1, dtype=torch.int64, pin_memory=True) if self.count.is_cuda else self.count
        )
        self._received = self.host_count.numpy() if self.count.is_cuda else None

    def received(self) -> int:
        """The count as of the last finished copy."""
        return int(self.count if self._received is None else self._received[0])

    def publish(self) -> None:
        """Copy the count to the host, which the fused kernels do by themselves."""
        if self.host_count is not self.count:
            self.host_count.copy_(self.count, non_blocking=True)


class Cells:
    """The memory of a table, on one device."""

    def __init__(self, device: torch.device, rows: int, alarm: Alarm) -> None:
        self.device, self.alarm = device, alarm
        exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no doubles
        self.sums = torch.zeros((rows, _SUMS), dtype=exact, device=device)
        self.sums[:, 0] = float("inf")
        self.sums[:, 1] = -float("inf")
        self.counts = torch.zeros((rows, _COUNTS + LANES), dtype=torch.int64, device=device)

    def send(self) -> None:
        """Begin to copy to the host; no row is added afterwards."""
        self.sums, self.counts = _to_host(self.sums), _to_host(self.counts)

    def columns(self, values: Sequence[int], sizes: Sequence[int]) -> Columns:
        """Min, max, mean, std and l2 of each tensor; and its value, zeros, NaNs, infinities and lanes."""
        rows = len(values)
        if self.sums.is_pinned():
            torch.cuda.synchronize(self.device)
        sums = self.sums[:rows].cpu().numpy().astype(np.float64)
        counted = self.counts[:rows].cpu().numpy()
        nans, infs = counted[:, 2], counted[:, 3]
        fine = np.array(sizes, dtype=np.int64) - nans - infs
        with np.errstate(all="ignore"):
            mean = sums[:, 2] / fine
            variance = np.maximum(sums[:, 3] - sums[:, 2] * mean, 0.0) / np.maximum(fine - 1, 1)
            floats = np.stack([sums[:, 0], sums[:, 1], mean, np.sqrt(variance), np.sqrt(sums[:, 3])], axis=1)
        floats[fine == 0] = np.nan
        counts = counted.copy()
        counts[:, 0] = values
        return floats, counts


class Table:
    """A few thousand rows on one device, and the values they belong to."""

    def __init__(self, device: torch.device, fill: str, alarm: Alarm) -> None:
        self._ordered = fill == "fingerprints"
        self._plain = partial(_fill, fingerprint=fill == "fingerprints")
        self._fused = _fused(device, fill)
        self._cells = Cells(device, _ROWS, alarm)
        self.values: list[int] = []
        self._sizes: list[int] = []

    @property
    def full(self) -> bool:
        return len(self.values) == _ROWS

    def add(self, value: int, tensor: Any) -> None:
        """Fill the next row."""
        if not tensor.is_contiguous() or tensor.is_complex() or tensor.is_neg():
            # Only a fingerprint sees the order; a copy would take three times as long as reading.
            if self._ordered or tensor.is_complex() or tensor.is_neg() or not _is_dense(tensor):
                tensor = flattened(tensor)
        at, cells = len(self.values), self._cells
        self.values.append(value)
        self._sizes.append(tensor.numel())
        if self._fused is None or not self._fused(tensor, cells, at):
            self._plain(tensor, cells, at)
            cells.alarm.publish()

    def send(self) -> None:
        """Begin to copy to the host; no row is added afterwards."""
        self._cells.send()

    def columns(self) -> Columns:
        """The statistics of each tensor; waits for the device."""
        return self._cells.columns(self.values, self._sizes)


def _is_dense(tensor: Any) -> bool:
    """Whether the elements fill memory without gaps, in any order."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _fill(tensor: Any, cells: Cells, at_row: int, fingerprint: bool) -> None:
    """Fill one row by torch's own reductions; nothing waits."""
    flat, sums, counts = tensor.reshape(-1), cells.sums[at_row], cells.counts[at_row]
    is_integer = not flat.is_floating_point()
    numbers = flat.to(sums.dtype) if is_integer or flat.dtype == torch.float64 else flat.float()
    wrong, fine = torch.isnan(numbers), torch.isfinite(numbers)
    finite = torch.where(fine, numbers, 0)
    sums[0] = torch.where(fine, numbers, float("inf")).min()
    sums[1] = torch.where(fine, numbers, -float("inf")).max()
    sums[2] = finite.sum(dtype=sums.dtype)
    sums[3] = finite.square().sum(dtype=sums.dtype)
    counts[1] = (numbers == 0).sum()
    counts[2] = wrong.sum()
    counts[3] = numbers.numel() - counts[2] - fine.sum()
    cells.alarm.count.add_(counts[2] + counts[3])
    if fingerprint:
        plain = flat if is_integer else torch.where(wrong, plain_nan(flat.dtype).to(flat.device), flat)
        counts[_COUNTS:] = lanes_of(plain)


def _to_host(table: Any) -> Any:
    if not table.is_cuda:
        return table.cpu()
    host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return host.copy_(table, non_blocking=True)


def _fused(device: torch.device, fill: str) -> Callable[..., bool] | None:
    """The one-pass kernel, where Triton is installed, as with torch's CUDA builds."""
    if device.type != "cuda":
        return None
    try:
        from sightline.recording.statistics.cuda_kernels import count, fits, measure
    except ImportError:
        return None
    kernel = count if fill == "nonfinite" else partial(measure, fingerprint=fill == "fingerprints")

    broken = False

    def fused(tensor: Any, cells: Cells, at_row: int) -> bool:
        nonlocal broken
        if broken or not fits(tensor):
            return False
        try:
            if device.index == torch.cuda.current_device():
                kernel(tensor, cells, at_row)
            else:
                with torch.cuda.device(device):
                    kernel(tensor, cells, at_row)
        except Exception:  # a Triton that does not compile it: torch's own reductions do
            broken = True
        return not broken

    return fused
