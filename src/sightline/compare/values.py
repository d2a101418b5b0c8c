"""Whether two values are equal: to the last bit, up to rounding, or not.

The comparison uses the best that both recordings have: captured tensors, else statistics with fingerprints.
Averages over many elements cancel rounding errors, so mean and norm are held to a tighter tolerance.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sightline.compare.side import Side
from sightline.data.rows import ValueNumbers
from sightline.errors import SightlineError

if TYPE_CHECKING:
    from sightline.data.tensors import CapturedTensor


class State(IntEnum):
    """The result of comparing two values."""

    UNKNOWN = 0  #: not measured on both sides
    SAME = 1  #: to the last bit
    CLOSE = 2  #: as far as rounding explains
    DIFFERENT = 3


class Verdict(NamedTuple):
    """The state of a pair of values, their relative error, and the means of the comparison."""

    state: State
    error: float
    by: str  #: "tensor", "fingerprint" or "statistics"; "" where they were not measured

    @property
    def agrees(self) -> bool:
        return self.state is State.SAME or self.state is State.CLOSE


UNKNOWN: Final = Verdict(State.UNKNOWN, math.nan, "")
_SAME: Final = Verdict(State.SAME, 0.0, "fingerprint")

#: Tolerances in roundings, for elements and for averages: a constant, and a part that grows with the square
#: root of the number of ops behind a value.
_ELEMENTS: Final = (16.0, 4.0)
_AVERAGES: Final = (2.0, 0.75)
_MASK_FILL: Final = 6e4  #: masks are filled with numbers beyond this, in any precision
_EXTRA_ZEROS: Final = 0.04  #: of all elements, that one side may have more than the other
_FEW: Final = 8.0  #: averages of few elements vary more: by this over the root of their number


class ValueComparer:
    """Compares values of one recording with values of the other."""

    def __init__(self, a: Side, b: Side, rtol: float | None, atol: float | None, by: str) -> None:
        self._a, self._b = a, b
        self._rtol, self._atol = rtol, atol
        self._by = by
        self._bits_a, self._bits_b = a.fingerprints, b.fingerprints
        self._fast = by in ("auto", "statistics", "fingerprints")
        self._cache: dict[tuple[int, int], Verdict] = {}
        self._faults: dict[str, str] = {}
        #: Whether both recordings have something to compare values by.
        self.measured = by != "none" and all(len(side.stats) or side.data.captures for side in (a, b))

    def __call__(self, one: int, other: int) -> Verdict:
        """The verdict on a pair of values."""
        bits = self._bits_a[one]
        if bits and bits == self._bits_b[other] and self._fast:
            return _SAME
        key = (one, other)
        verdict = self._cache.get(key)
        if verdict is None:
            verdict = self._by_tensor(one, other) or self._by_statistics(one, other)
            self._cache[key] = verdict
        return verdict

    # -- statistics ----------------------------------------------------------------------------

    def rounding(self, one: int, other: int) -> float:
        """The coarsest rounding behind either of two values."""
        return max(self._a.history[one], self._b.history[other]) or 2.0**-24

    def _by_statistics(self, one: int, other: int) -> Verdict:
        """The verdict by statistics or fingerprints."""
        first, second = self._a.numbers(one), self._b.numbers(other)
        if self._by in ("tensors", "none") or first is None or second is None:
            return UNKNOWN
        if self._by == "fingerprints":
            both = self._bits_a[one] and self._bits_b[other]
            return Verdict(State.DIFFERENT, math.nan, "fingerprint") if both else UNKNOWN
        error = distance(first, second, self._a.numel[one], self._b.numel[other])
        if math.isinf(error.elements):
            return Verdict(State.DIFFERENT, error.worst, "statistics")
        if self._rtol is not None or self._atol is not None:
            scale = max(first.l2 / math.sqrt(max(1, self._a.numel[one])), 0.0)
            fits = error.worst <= (self._rtol or 0.0) + ((self._atol or 0.0) / scale if scale else 0.0)
        else:
            elements, averages = self.tolerances(one, other)
            fits = error.elements <= elements and error.averages <= averages
        if fits and _is_masked(first):  # the filled elements hide all others
            return UNKNOWN
        return Verdict(State.CLOSE if fits else State.DIFFERENT, error.worst, "statistics")

    def tolerances(self, one: int, other: int) -> tuple[float, float]:
        """The errors of elements and of averages that rounding explains, given the ops behind two values."""
        unit = self.rounding(one, other)
        depth = math.sqrt(max(self._a.depth[one], self._b.depth[other]))
        few = 1 + _FEW / math.sqrt(max(1, self._a.numel[one]))
        return (
            unit * (_ELEMENTS[0] + _ELEMENTS[1] * depth),
            unit * (_AVERAGES[0] + _AVERAGES[1] * depth) * few,
        )

    # -- captured tensors --------------------------------------------------------------------------

    @cached_property
    def _captured(self) -> tuple[dict[int, CapturedTensor], dict[int, CapturedTensor]]:
        return _captured_tensors(self._a), _captured_tensors(self._b)

    def _elements(self, captured: CapturedTensor, name: str) -> NDArray[np.float64] | None:
        """The elements of a kept tensor, or None; ``faults`` says why they cannot be read."""
        try:
            return np.asarray(captured.numpy()).astype(np.float64)
        except (SightlineError, OSError) as error:
            self._faults.setdefault(name, str(error).removesuffix("."))
            return None
        except (TypeError, ValueError):  # of a dtype that numpy does not have
            return None

    @property
    def faults(self) -> list[str]:
        """A sentence for each recording whose kept tensors cannot all be read."""
        instead = "their statistics are compared"
        return [f"not all kept tensors of {name} can be read, {instead}: {fault}"
                for name, fault in self._faults.items()]  # fmt: skip

    def _by_tensor(self, one: int, other: int) -> Verdict | None:
        """The verdict by the elements, where both were captured whole and have one shape."""
        if self._by not in ("auto", "tensors"):
            return None
        if one not in self._captured[0] or other not in self._captured[1]:
            return None
        first, second = self._captured[0][one], self._captured[1][other]
        if first.shape != second.shape:
            return None
        x, y = self._elements(first, "a"), self._elements(second, "b")
        if x is None or y is None:
            return None
        with np.errstate(all="ignore"):
            if np.array_equal(x, y, equal_nan=True):
                return Verdict(State.SAME, 0.0, "tensor")
            finite = np.isfinite(x) & np.isfinite(y)
            if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
                return Verdict(State.DIFFERENT, math.inf, "tensor")
            errors, sizes = np.abs(x - y)[finite], np.abs(x)[finite]
            error_norm, norm = float(np.linalg.norm(errors)), float(np.linalg.norm(sizes))
            if self._rtol is not None or self._atol is not None:
                fits = bool((errors <= (self._atol or 0.0) + (self._rtol or 0.0) * sizes).all())
            else:
                fits = error_norm <= self.tolerances(one, other)[0] * norm
            error = error_norm / norm if norm else math.inf
        return Verdict(State.CLOSE if fits else State.DIFFERENT, error, "tensor")


class Distance(NamedTuple):
    """The distance of two sets of statistics, relative to the size of the elements."""

    elements: float  #: of the extremes; infinite where NaNs, infinities or sizes differ
    averages: float  #: mean, deviation and norm

    @property
    def worst(self) -> float:
        return max(self.elements, self.averages)


def distance(first: ValueNumbers, second: ValueNumbers, count: int, other_count: int) -> Distance:
    """The distance of two tensors by their statistics."""
    if first.nans != second.nans or first.infs != second.infs or count != other_count:
        return Distance(math.inf, math.inf)
    if math.isnan(first.l2) or math.isnan(second.l2):  # nothing finite in either
        same = math.isnan(first.l2) == math.isnan(second.l2)
        return Distance(0.0, 0.0) if same else Distance(math.inf, math.inf)
    finite = max(1, count - first.nans - first.infs)
    size = max(first.l2, second.l2) / math.sqrt(finite)
    if size == 0.0:
        return Distance(0.0, 0.0)
    lows, highs = abs(first.min - second.min), abs(first.max - second.max)
    top = max(abs(first.min), abs(first.max), abs(second.min), abs(second.max), size)
    if _is_masked(first) and _is_masked(second):  # only the maximum says anything
        top = max(abs(first.max), abs(second.max))
        return Distance(highs / top if 0.0 < top < _MASK_FILL else 0.0, 0.0)
    extremes = max(lows, highs) / top
    extra_zeros = abs(first.zeros - second.zeros)
    averages = max(
        extra_zeros / finite if extra_zeros / finite > _EXTRA_ZEROS and extra_zeros > 2 else 0.0,
        abs(first.mean - second.mean) / size,
        abs(first.std - second.std) / size,
        abs(first.l2 - second.l2) / max(first.l2, second.l2),
    )
    return Distance(extremes, averages)


def _is_masked(numbers: ValueNumbers) -> bool:
    return numbers.min <= -_MASK_FILL


def _captured_tensors(side: Side) -> dict[int, CapturedTensor]:
    """The tensors that were captured whole, by value."""
    data = side.data
    if not data.captures or data.store is None:
        return {}
    from sightline.data.tensors import Tensors

    tensors = Tensors(data.captures, data.store)
    return {info.value: tensors[info.key] for info in data.captures if info.value >= 0 and info.whole}
