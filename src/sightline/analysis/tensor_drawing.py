"""A tensor made small enough to draw: how its numbers are distributed, and the means of as many cells as fit.

Numbers that do not fit are averaged, but a NaN or an infinity is never averaged away: its cell is marked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_SAMPLE: Final = 1 << 20  #: elements that a distribution is taken from


def as_float64(given: Array) -> F64:
    """As float64, without warnings about overflow; of complex numbers their magnitudes."""
    with np.errstate(all="ignore"):
        return (np.abs(given) if given.dtype.kind == "c" else given).astype(np.float64)


def scale_unit(low: float, high: float) -> float:
    """A scale to divide by, since the square or the sum of doubles may overflow."""
    return max(abs(low), abs(high)) or 1.0


def finite_sample(given: Array) -> F64:
    """The finite numbers of a tensor, evenly sampled where there are very many."""
    flat = given.reshape(-1)
    wide = as_float64(flat[:: max(1, flat.size // _SAMPLE)])
    return wide[np.isfinite(wide)]


def histogram(sample: F64, bins: int) -> I64 | None:
    """How many numbers are in each of some equal stretches of their range; None for fewer than two values.

    >>> histogram(np.array([0.0, 1.0, 1.0, 4.0]), 4).tolist()
    [1, 2, 0, 1]
    """
    low, high = (float(sample.min()), float(sample.max())) if sample.size else (0.0, 0.0)
    if sample.size < 3 or low == high:
        return None
    unit = scale_unit(low, high)
    shares = (sample / unit - low / unit) / (high / unit - low / unit)
    counts: I64 = np.bincount(np.minimum((shares * bins).astype(np.int64), bins - 1), minlength=bins)
    return counts


@dataclass(frozen=True, slots=True)
class Cells:
    """The means of the finite numbers in as many cells as fit, and which cells hold a NaN or an infinity.

    Means, and the range of them, are in shares of ``unit``.
    """

    means: F64
    nans: Array
    infs: Array
    low: float
    high: float
    unit: float

    @classmethod
    def of(cls, shown: F64, most: Sequence[int]) -> Self:
        """The cells of a tensor, at most so many along each dimension."""
        finite = np.isfinite(shown)
        held = shown[finite]
        unit = scale_unit(float(held.min()), float(held.max())) if held.size else 1.0
        parts = [np.where(finite, shown, 0.0) / unit, finite, np.isnan(shown), np.isinf(shown)]
        for axis, limit in enumerate(most):
            count = min(shown.shape[axis], limit)
            edges = np.arange(count) * shown.shape[axis] // count
            parts = [np.add.reduceat(part.astype(np.float64), edges, axis=axis) for part in parts]
        total, there, nans, infs = parts
        means = np.where(there > 0, total / np.maximum(there, 1), np.nan)
        known = means[there > 0]
        low, high = (float(known.min()), float(known.max())) if known.size else (math.nan, math.nan)
        return cls(means, nans > 0, infs > 0, low, high, unit)
