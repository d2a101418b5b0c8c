"""The statistics of one tensor in CPU memory, in as few passes over its elements as possible.

Five fast passes (extremes, sum, squares, zeros, fingerprint), and more only for NaNs and infinities and
where single precision is not enough. Zeros are counted by numpy, ten times faster than by torch. `device`
may not wait for a result and makes every pass; here a pass that an earlier result makes needless is left out.
"""

from __future__ import annotations

import math
from array import array
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.recording.statistics.fingerprints import as_array, cpu_lanes, plain_nan
from sightline.schema.streams import COUNTS, FLOATS, LANES

#: A variance this much smaller than the square of the mean has lost its digits in one pass.
_CANCELLED: Final = 1e-4
_TINY: Final = 1e-30
_NO_LANES: Final = [0] * LANES


class TensorStatistics(NamedTuple):
    """The statistics of one tensor; all but the counts are over the finite elements."""

    min: float
    max: float
    mean: float
    std: float
    l2: float
    zeros: int
    nans: int
    infs: int
    lanes: list[int]


#: A value, the value it was made from, and whether it is bounded: then it has only the NaNs of the other.
Implied = tuple[int, int, bool]
Columns = tuple[NDArray[np.float64], NDArray[np.int64]]


class StatisticsBuffer:
    """The statistics taken so far, by value."""

    native: ClassVar = False  #: C++ measures the results of ops, and reports NaNs and infinities

    def __init__(self) -> None:
        self.floats = array("d")
        self.counts = array("q")
        self._read = bytearray()  # by value id: whether it was read
        self.nonfinite: dict[int, tuple[int, int]] = {}  #: value -> counts of NaNs and infinities, if any

    def mark_read(self, value: int) -> bool:
        """Mark a value as read; False if it was already."""
        if value >= len(self._read):
            self._read.extend(bytes(max(4096, value + 1 - len(self._read))))
        if self._read[value]:
            return False
        self._read[value] = 1
        return True

    def is_read(self, value: int) -> bool:
        """Whether a value was read."""
        return value < len(self._read) and bool(self._read[value])

    def add(self, value: int, numbers: TensorStatistics) -> None:
        """Add the statistics of a value."""
        self.floats.fromlist([numbers.min, numbers.max, numbers.mean, numbers.std, numbers.l2])
        self.counts.fromlist([value, numbers.zeros, numbers.nans, numbers.infs, *numbers.lanes])
        if numbers.nans or numbers.infs:
            self.nonfinite[value] = (numbers.nans, numbers.infs)

    def read(self, tensor: Any, fingerprint: bool) -> TensorStatistics:
        """The statistics of a tensor in CPU memory."""
        return read(tensor, fingerprint)

    def columns(self) -> Columns:
        """All statistics, a row per value."""
        rows = len(self.counts) // (COUNTS + LANES)  # written last, so their floats are complete
        floats = np.frombuffer(self.floats[: rows * FLOATS], dtype=np.float64).reshape(-1, FLOATS)
        counts = np.frombuffer(self.counts[: rows * (COUNTS + LANES)], dtype=np.int64)
        return floats, counts.reshape(-1, COUNTS + LANES)

    def take(self) -> Columns:
        """All statistics, which are removed."""
        floats, counts = self.columns()
        del self.floats[: floats.size]
        del self.counts[: counts.size]
        return floats, counts

    @property
    def checked(self) -> int:
        """How many tensors C++ has examined."""
        return 0

    def freeze(self) -> None:
        """Copy the statistics of C++, which are about to be freed."""

    def stop_reporting(self) -> None:
        """Have C++ report no more NaNs and infinities."""

    def copies(self) -> list[Implied]:
        """Values whose NaNs and infinities follow from those of others, as C++ has found."""
        return []


def is_finite(tensor: Any) -> bool:
    """Whether all elements are finite, in one pass: a sum of finite numbers is finite unless it overflows."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.itemsize == 1:  # torch adds up no float8
        tensor = tensor.float()
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def read(tensor: Any, fingerprint: bool) -> TensorStatistics:
    """The statistics of a tensor with at least one element."""
    flat = flattened(tensor)
    # Integers as doubles, which hold all those that tokens and counters are.
    numbers = flat.double() if not flat.is_floating_point() else flat
    if numbers.dtype not in (torch.float32, torch.float64):
        numbers = numbers.float()
    low, high = torch.aminmax(numbers)
    least, most = low.item(), high.item()
    if not (math.isfinite(least) and math.isfinite(most)):
        return _read_nonfinite(flat, numbers, fingerprint)
    count = numbers.numel()
    total, squares = numbers.sum().item(), torch.dot(numbers, numbers).item()
    if not (math.isfinite(total) and math.isfinite(squares)) or (squares < _TINY and (most or least)):
        if flat.dtype == torch.float64:
            return _read_extreme(flat, max(most, -least), fingerprint)
        wide = numbers.double()
        total, squares = wide.sum().item(), torch.dot(wide, wide).item()
    mean = total / count
    spread = squares - total * mean
    if spread < _CANCELLED * squares and least != most:
        centred = numbers - mean
        spread = torch.dot(centred, centred).item()
    return TensorStatistics(
        least, most, mean, math.sqrt(max(spread, 0.0) / (count - 1)) if count > 1 else 0.0,
        math.sqrt(squares), _zeros(numbers) if least <= 0 <= most else 0, 0, 0,
        cpu_lanes(flat) if fingerprint else _NO_LANES,
    )  # fmt: skip


def _zeros(numbers: Any) -> int:
    return int(np.count_nonzero(as_array(numbers) == 0))


def flattened(tensor: Any) -> Any:
    """The elements in row-major order; of complex ones the real and imaginary parts."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    flat = tensor.detach().contiguous().view(-1)
    # A single element counts as contiguous whatever its stride.
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def _read_nonfinite(flat: Any, numbers: Any, fingerprint: bool) -> TensorStatistics:
    """The statistics of elements with NaNs or infinities among them: the rest is read by itself."""
    wrong = torch.isnan(numbers)
    fine = torch.isfinite(numbers)
    nans = int(wrong.sum())
    infs = numbers.numel() - nans - int(fine.sum())
    lanes = _NO_LANES
    if fingerprint:
        lanes = cpu_lanes(torch.where(wrong, plain_nan(flat.dtype), flat) if nans else flat)
    rest = numbers[fine]
    if not len(rest):
        nan = float("nan")
        return TensorStatistics(nan, nan, nan, nan, nan, 0, nans, infs, lanes)
    read_rest = read(rest, fingerprint=False)
    return read_rest._replace(nans=nans, infs=infs, lanes=lanes)


def _read_extreme(flat: Any, largest: float, fingerprint: bool) -> TensorStatistics:
    """Doubles whose squares overflow or underflow: they are divided by the largest first."""
    low, high = torch.aminmax(flat)
    scaled = read(flat / largest, fingerprint=False)
    return scaled._replace(
        min=low.item(), max=high.item(), mean=scaled.mean * largest, std=scaled.std * largest,
        l2=scaled.l2 * largest, zeros=_zeros(flat),
        lanes=cpu_lanes(flat) if fingerprint else _NO_LANES,
    )  # fmt: skip
