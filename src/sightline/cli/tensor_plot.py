"""A tensor on a screen: the statistics of its numbers, their distribution, and a drawing.

One dimension is drawn as a line of bars, two as a map of shades; of more, a slice is. A drawing that does not
fit is averaged, but a NaN or an infinity is never averaged away: its cell is ``N`` or ``∞``.
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
from sightline.views.rendering import Line, Span, fact_line, line
from sightline.views.statistics_text import ValueStatistics
from sightline.views.table_layout import NARROWEST

BARS: Final = "▁▂▃▄▅▆▇█"
SHADES: Final = "·░▒▓█"
NAN, INF = "N", "∞"
_COLUMNS: Final = 72
_ROWS: Final = 24
_BINS: Final = 48
_CHUNK: Final = 1 << 22  #: elements read together: a tensor may be larger than the free memory
_QUANTILES: Final = (1, 25, 50, 75, 99)


def array_statistics(tensor: Array) -> ValueStatistics:
    """The statistics of a tensor; of complex numbers, those of their magnitudes.

    >>> array_statistics(np.array([1.0, -1.0, np.nan])).text
    '-1 … 1, mean 0, std 1.41, 1 NaN'
    """
    nans = infs = count = 0
    low, high = math.inf, -math.inf
    for chunk in _chunks(tensor):
        finite = chunk[np.isfinite(chunk)]
        nans += int(np.isnan(chunk).sum())
        infs += int(np.isinf(chunk).sum())
        count += finite.size
        low, high = min(low, float(finite.min(initial=low))), max(high, float(finite.max(initial=high)))
    if not count:
        return ValueStatistics(math.nan, math.nan, math.nan, math.nan, nans, infs, size=tensor.size)
    unit = scale_unit(low, high)
    mean = sum(float((chunk[np.isfinite(chunk)] / unit).sum()) for chunk in _chunks(tensor)) / count
    squares = sum(float(((chunk[np.isfinite(chunk)] / unit - mean) ** 2).sum()) for chunk in _chunks(tensor))
    std = math.sqrt(squares / max(count - 1, 1))
    return ValueStatistics(low, high, mean * unit, std * unit, nans, infs, size=tensor.size)


def _chunks(tensor: Array) -> Iterator[F64]:
    flat = tensor.reshape(-1)
    return (as_float64(flat[at : at + _CHUNK]) for at in range(0, flat.size, _CHUNK))


def tensor_lines(tensor: Array, indices: Sequence[int] = (), room: int | None = None) -> Iterator[Line]:
    """The facts about a tensor's numbers and its drawing, in ``room`` columns.

    ``indices`` are the first indices of the slice; further ones are 0, until two dimensions are left.
    """
    most = _COLUMNS if room is None else min(_COLUMNS, max(room, NARROWEST))
    yield from _facts(tensor)
    if not tensor.size or not tensor.ndim:
        return
    if len(indices) > tensor.ndim:
        raise UsageError(f"--slice has {len(indices)} indices; the tensor has {tensor.ndim} dimensions.")
    for dimension, (index, size) in enumerate(zip(indices, tensor.shape, strict=False)):
        if not -size <= index < size:
            raise UsageError(f"--slice {index} is out of dimension {dimension}, which has {size} entries.")
    at = [index % size for index, size in zip(indices, tensor.shape, strict=False)]
    at += [0] * (tensor.ndim - len(at) - 2)
    drawn = as_float64(np.asarray(tensor[tuple(at)]))
    part = [f"[{', '.join([*map(str, at), *':' * drawn.ndim])}]"] if at else []
    names = ("entries",) if drawn.ndim == 1 else ("rows", "columns")
    sizes = ", ".join(f"{name} 0 … {size - 1}" for name, size in zip(names, drawn.shape, strict=False))
    limits = (_ROWS, most)[-drawn.ndim :]
    fits = all(size <= limit for size, limit in zip(drawn.shape, limits, strict=False))
    yield line()
    yield line(("  ".join([*part, *([sizes] if sizes else [])]) + ("" if fits else ", averaged"), "dim"))
    yield from _drawing(drawn, most)


def _facts(tensor: Array) -> Iterator[Line]:
    statistics = array_statistics(tensor)
    complex_ = " of the magnitudes" if tensor.dtype.kind == "c" else ""
    yield fact_line("numbers", *(statistics.spans or (Span("there are none"),)), Span(complex_, "dim"))
    sample = finite_sample(tensor)
    if sample.size > 1 and statistics.low != statistics.high:
        values = np.percentile(sample, _QUANTILES, method="nearest").tolist()
        quantiles = (f"{q} % {number_text(value)}" for q, value in zip(_QUANTILES, values, strict=True))
        yield fact_line("quantiles", " · ".join(quantiles))
    zeros = int(tensor.size - np.count_nonzero(tensor))
    if zeros:
        yield fact_line("zeros", f"{zeros:,} of {tensor.size:,} ({100 * zeros / tensor.size:.1f} %)")
    counts = histogram(sample, _BINS) if tensor.ndim else None
    if counts is not None:
        bars = "".join(" " if not n else BARS[_level(n / counts.max(), len(BARS))] for n in counts.tolist())
        ends = number_text(float(sample.min())), number_text(float(sample.max()))
        yield fact_line("spread", f"{ends[0]} ", (bars, "number"), f" {ends[1]}")


def _level(share: float, count: int) -> int:
    """The level, of ``count``, of a share from 0 to 1."""
    return min(int(share * count), count - 1)


def _drawing(drawn: F64, most: int) -> Iterator[Line]:
    """A number, a line of bars or a map of shades, and the legend."""
    if not drawn.ndim:
        yield line(number_text(float(drawn)))
    elif drawn.ndim == 1:
        bars = _DrawnCells.of(drawn, [most])
        yield Line(bars.spans(BARS))
        yield bars.legend(BARS)
    else:
        cells = _DrawnCells.of(drawn, [_ROWS, most])
        wide = 2 if drawn.shape[1] * 2 <= most else 1  # a cell of a terminal is twice as high as it is wide
        for row in range(len(cells.means)):
            yield Line(cells.spans(SHADES, wide, row))
        yield cells.legend(SHADES)


class _DrawnCells(Cells):
    """Cells as signs on a screen."""

    __slots__ = ()

    def spans(self, signs: str, wide: int = 1, row: int | tuple[()] = ()) -> tuple[Span, ...]:
        """A row of cells; neighbours of one style are one span."""
        spans: list[Span] = []
        columns = (self.means[row].tolist(), self.nans[row].tolist(), self.infs[row].tolist())
        for mean, nan, inf in zip(*columns, strict=True):
            if nan or inf:
                span = Span((NAN if nan else INF) * wide, "error" if nan else "warn")
            else:
                share = (mean - self.low) / (self.high - self.low) if self.high > self.low else 0.5
                span = Span(signs[_level(share, len(signs))] * wide, "op" if mean < 0 else "number")
            if spans and spans[-1].style == span.style:
                span = Span(spans.pop().text + span.text, span.style)
            spans.append(span)
        return tuple(spans)

    def legend(self, signs: str) -> Line:
        """The meaning of the signs: of bars those of the ends, of equal cells that of the one sign."""
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
