"""A tensor on a screen: what its numbers are like, how they are distributed, and what they look like.

One dimension is drawn as a line of bars, two as a map of shades; of more, a slice is. What does not fit is
averaged, but a NaN or an infinity is never averaged away: its cell is ``N`` or ``∞``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from sightline.analysis.tensor_drawing import (
    F64,
    Array,
    Cells,
    as_float64,
    finite_sample,
    histogram,
    scale_unit,
)
from sightline.errors import UsageError
from sightline.notation import number_text
from sightline.views.rendering import Line, Span, line
from sightline.views.statistics_text import ValueStatistics
from sightline.views.table_layout import NARROWEST

BARS: Final = "▁▂▃▄▅▆▇█"
SHADES: Final = "·░▒▓█"
NAN, INF = "N", "∞"
_COLUMNS: Final = 72
_ROWS: Final = 24
_BINS: Final = 48
_CHUNK: Final = 1 << 22  #: elements looked at together: a tensor may be larger than what is free
_QUANTILES: Final = (1, 25, 50, 75, 99)
_MARGIN: Final = 11  #: columns for the titles of facts


def array_statistics(given: Array) -> ValueStatistics:
    """What the numbers of a tensor are like; of complex ones their magnitudes.

    >>> array_statistics(np.array([1.0, -1.0, np.nan])).text
    '-1 … 1, mean 0, std 1.41, 1 NaN'
    """
    nans = infs = count = 0
    low, high = math.inf, -math.inf
    for wide in _chunks(given):
        finite = wide[np.isfinite(wide)]
        nans += int(np.isnan(wide).sum())
        infs += int(np.isinf(wide).sum())
        count += finite.size
        low, high = min(low, float(finite.min(initial=low))), max(high, float(finite.max(initial=high)))
    if not count:
        return ValueStatistics(math.nan, math.nan, math.nan, math.nan, nans, infs, size=given.size)
    unit = scale_unit(low, high)
    mean = sum(float((wide[np.isfinite(wide)] / unit).sum()) for wide in _chunks(given)) / count
    squares = sum(float(((wide[np.isfinite(wide)] / unit - mean) ** 2).sum()) for wide in _chunks(given))
    std = math.sqrt(squares / max(count - 1, 1))
    return ValueStatistics(low, high, mean * unit, std * unit, nans, infs, size=given.size)


def _chunks(given: Array) -> Iterator[F64]:
    flat = given.reshape(-1)
    return (as_float64(flat[at : at + _CHUNK]) for at in range(0, flat.size, _CHUNK))


def tensor_lines(given: Array, chosen: Sequence[int] = (), room: int | None = None) -> Iterator[Line]:
    """The facts about a tensor's numbers and its drawing, in ``room`` columns.

    ``chosen`` are the first indices of the slice.
    """
    most = _COLUMNS if room is None else min(_COLUMNS, max(room, NARROWEST))
    yield from _facts(given)
    if not given.size or not given.ndim:
        return
    yield from _distribution(given)
    at = _indices(given.shape, chosen)
    shown = as_float64(np.asarray(given[at]))
    yield line()
    yield line((_slice_text(at, shown.shape, most), "dim"))
    if not shown.ndim:
        yield line(number_text(float(shown)))
    else:
        yield from (_bars if shown.ndim == 1 else _map)(shown, most)


# -- facts -----------------------------------------------------------------------------------------


def _facts(given: Array) -> Iterator[Line]:
    seen = array_statistics(given)
    complex_ = " of the magnitudes" if given.dtype.kind == "c" else ""
    yield _fact_line("numbers", *(seen.spans or (Span("there are none"),)), Span(complex_, "dim"))
    sample = finite_sample(given)
    if sample.size > 1 and seen.low != seen.high:
        values = np.percentile(sample, _QUANTILES, method="nearest").tolist()
        told = (f"{q} % {number_text(value)}" for q, value in zip(_QUANTILES, values, strict=True))
        yield _fact_line("quantiles", Span(" · ".join(told)))
    zeros = int(given.size - np.count_nonzero(given))
    if zeros:
        yield _fact_line("zeros", Span(f"{zeros:,} of {given.size:,} ({100 * zeros / given.size:.1f} %)"))


def _fact_line(title: str, *spans: Span) -> Line:
    return line((f"{title:<{_MARGIN}}", "dim"), *spans, hang=_MARGIN)


def _distribution(given: Array) -> Iterator[Line]:
    """How often each stretch of the range occurs, as bars."""
    sample = finite_sample(given)
    counts = histogram(sample, _BINS)
    if counts is None:
        return
    bars = "".join(" " if not n else BARS[_level(n / counts.max(), len(BARS))] for n in counts.tolist())
    ends = number_text(float(sample.min())), number_text(float(sample.max()))
    yield _fact_line("spread", Span(f"{ends[0]} "), Span(bars, "number"), Span(f" {ends[1]}"))


def _level(share: float, count: int) -> int:
    """Which of ``count`` levels a share from 0 to 1 is."""
    return min(int(share * count), count - 1)


# -- cellss --------------------------------------------------------------------------------------


def _indices(shape: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """The first indices of the slice that is drawn: those chosen, then 0 until two dimensions are left."""
    if len(chosen) > len(shape):
        raise UsageError(f"--slice has {len(chosen)} indices; the tensor has {len(shape)} dimensions.")
    for dimension, (at, size) in enumerate(zip(chosen, shape, strict=False)):
        if not -size <= at < size:
            raise UsageError(f"--slice {at} is out of dimension {dimension}, which has {size} entries.")
    found = [at % size for at, size in zip(chosen, shape, strict=False)]
    return (*found, *[0] * (len(shape) - len(found) - 2))


def _slice_text(at: Sequence[int], shape: Sequence[int], most: int) -> str:
    """Which part is drawn: ``[0, :, :]  rows 0 … 7, columns 0 … 63``."""
    told = [f"[{', '.join([*map(str, at), *':' * len(shape)])}]"] if at else []
    words = ("entries",) if len(shape) == 1 else ("rows", "columns")
    sizes = ", ".join(f"{word} 0 … {size - 1}" for word, size in zip(words, shape, strict=False))
    fits = all(size <= limit for size, limit in zip(shape, (_ROWS, most)[-len(shape) :], strict=False))
    return "  ".join([*told, *([sizes] if sizes else [])]) + ("" if fits else ", averaged")


class _DrawnCells(Cells):
    """Cells as signs on a screen."""

    __slots__ = ()

    def spans(self, signs: str, wide: int = 1, row: int | tuple[()] = ()) -> tuple[Span, ...]:
        """A row of cells."""
        cells = zip(
            self.means[row].tolist(),
            self.nans[row].tolist(),
            self.infs[row].tolist(),
            strict=True,
        )
        return _merge_spans([self._span(*cell, signs, wide) for cell in cells])

    def _span(self, mean: float, nan: bool, inf: bool, signs: str, wide: int) -> Span:
        if nan or inf:
            return Span((NAN if nan else INF) * wide, "error" if nan else "warn")
        share = (mean - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return Span(signs[_level(share, len(signs))] * wide, "op" if mean < 0 else "number")

    def legend(self, signs: str) -> Line:
        """What the signs stand for: of bars the ends will do, and where all are the same that one."""
        known = [(sign, at / (len(signs) - 1)) for at, sign in enumerate(signs)]
        if self.low == self.high:
            known = [(signs[len(signs) // 2], 0.0)]
        elif signs == BARS:
            known = [known[0], known[-1]]
        values = [(sign, (self.low * (1 - share) + self.high * share) * self.unit) for sign, share in known]
        spans = [Span(f"{sign} {number_text(value)}", "dim") for sign, value in values if value == value]
        spans += [Span(f"{NAN} NaN", "error")] if self.nans.any() else []
        spans += [Span(f"{INF} Inf", "warn")] if self.infs.any() else []
        return Line(tuple(part for span in spans for part in (span, Span("   "))))


def _bars(shown: F64, most: int) -> Iterator[Line]:
    cells = _DrawnCells.of(shown, [most])
    yield Line(cells.spans(BARS))
    yield cells.legend(BARS)


def _map(shown: F64, most: int) -> Iterator[Line]:
    cells = _DrawnCells.of(shown, [_ROWS, most])
    wide = 2 if shown.shape[1] * 2 <= most else 1  # a cell of a terminal is twice as high as it is wide
    for row in range(len(cells.means)):
        yield Line(cells.spans(SHADES, wide, row))
    yield cells.legend(SHADES)


def _merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbours of one style as one span."""
    made: list[Span] = []
    for span in spans:
        if made and made[-1].style == span.style:
            made[-1] = Span(made[-1].text + span.text, span.style)
        else:
            made.append(span)
    return tuple(made)
