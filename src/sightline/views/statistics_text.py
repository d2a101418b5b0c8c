"""The statistics of values as views write them: ``0 … 1.42, mean 0.406, std 0.467, 3 NaN``.

`StatisticsIndex` looks them up, for one value or for several together; a `ValueStatistics` is written in
full after an op, or as one cell of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sightline.argument_checks import argument_text
from sightline.data.trace_data import TraceData
from sightline.errors import UsageError
from sightline.hints import Hint
from sightline.notation import number_text
from sightline.views.rendering import Span

#: NaN is always a mistake; an infinity may be intended, as in a mask.
WRONG: Final = (("NaN", "error"), ("Inf", "warn"))


@dataclass(frozen=True, slots=True)
class ValueStatistics:
    """The statistics of one value, or of several taken together.

    >>> relu = ValueStatistics(0.0, 1.42, 0.406, 0.467, size=16)
    >>> relu.text, relu.range
    ('0 … 1.42, mean 0.406, std 0.467', '0 … 1.42')
    """

    low: float  #: of the finite elements, as are the next three; NaN where there are none
    high: float
    mean: float
    std: float
    nans: int = 0
    infs: int = 0
    size: int = 1  #: elements
    values: int = 1  #: tensors

    @property
    def range(self) -> str:
        """``0 … 1.42``; one number where all are the same; empty where none is finite."""
        if math.isnan(self.low):
            return ""
        if self.low != self.high:
            return f"{number_text(self.low)} … {number_text(self.high)}"
        alone = self.size <= 1 or self.nans or self.infs
        return number_text(self.low) if alone else f"all {number_text(self.low)}"

    @property
    def wrong(self) -> tuple[Span, ...]:
        """How many elements are not finite, in highlighted spans: ``3 NaN``, ``all NaN``."""
        spans: list[Span] = []
        for (name, style), count in zip(WRONG, (self.nans, self.infs), strict=True):
            if count:
                text = f"{count:,} {name}" if count < self.size else f"all {name}" if self.size > 1 else name
                spans += [Span(", "), Span(text, style)]
        return tuple(spans[1:])

    @property
    def spans(self) -> tuple[Span, ...]:
        """All of it on one line. Of several values only the range is shown: their means differ."""
        spans = [Span(self.range)] if self.range else []
        if spans and self.low != self.high and self.values == 1:
            spans.append(Span(f", mean {number_text(self.mean)}, std {number_text(self.std)}", "dim"))
        wrong = self.wrong
        return (*spans, Span(", "), *wrong) if spans and wrong else (*spans, *wrong)

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)

    @property
    def spread(self) -> tuple[str, str]:
        """Mean and standard deviation for a narrow column, with the same number of decimals.

        >>> ValueStatistics(0.0, 1.42, 0.406, 0.467, size=16).spread
        ('0.41', '0.47')
        >>> ValueStatistics(-3, 3, 9e-9, 0.996, size=16).spread
        ('0', '1')
        """
        if math.isnan(self.mean):
            return ("NaN" if self.nans else "Inf" if self.infs else ""), ""
        if self.size == 1 or not 0 < self.std < math.inf:
            return number_text(self.mean), ""
        digits = 1 - math.floor(math.log10(self.std))
        return f"{round(self.mean, digits) + 0.0:.3g}", f"{self.std:.2g}"


class StatisticsIndex:
    """The statistics that a view shows; false where it shows none.

    ``show`` is the view's ``stats=``: None shows them where they were recorded.
    """

    def __init__(self, data: TraceData, show: bool | None = None) -> None:
        if show is not None and not isinstance(show, bool):
            raise UsageError(f"stats={argument_text(show)} must be True, False or None.")
        if show and not len(data.stats):
            raise UsageError(
                f"{Hint.option('stats')}: this trace has no statistics; record it with "
                f"{Hint.recording('stats')}."
            )
        self._data = data
        self._shown = bool(len(data.stats)) and show is not False

    def __bool__(self) -> bool:
        return self._shown

    @cached_property
    def _rows(self) -> dict[int, tuple[float, float, float, float, int, int]]:
        stats = self._data.stats
        columns = (stats.min, stats.max, stats.mean, stats.std, stats.nans, stats.infs)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return dict(zip(stats.value.tolist(), rows, strict=True))

    def one(self, value: int) -> ValueStatistics | None:
        """The statistics of a value, if they were taken and are shown."""
        row = self._rows.get(value) if self._shown else None
        return (
            None
            if row is None
            else ValueStatistics(*row, size=self._sizes[int(self._data.values.meta[value])])
        )

    def of(self, values: Iterable[int]) -> ValueStatistics | None:
        """Those of several values taken together; None where none was measured."""
        measured = [statistics for statistics in map(self.one, values) if statistics is not None]
        if len(measured) <= 1:
            return measured[0] if measured else None
        return _pooled(measured)

    def of_results(self, values: Sequence[int]) -> ValueStatistics | None:
        """Those of several values without views, which hold no new numbers, if there are others."""
        if not self._shown:
            return None
        columns = self._data.values
        own = [value for value in values if columns.base[value] < 0 or columns.previous[value] >= 0]
        return self.of(own) or self.of(values)

    @cached_property
    def _sizes(self) -> list[int]:
        return [meta.numel for meta in self._data.metas]


def _pooled(parts: list[ValueStatistics]) -> ValueStatistics:
    """Several statistics as one: the widest range, and mean and deviation over all elements."""
    finite = [part for part in parts if not math.isnan(part.low)]
    weights = [max(part.size - part.nans - part.infs, 0) for part in finite]
    total, mean, std = sum(weights), math.nan, math.nan
    if any(weights):
        with suppress(ArithmeticError, ValueError):  # impossible numbers, from a damaged file
            # In units of the largest number: its square may not fit a double.
            unit = max(max(abs(part.low), abs(part.high)) for part in finite) or 1.0
            means = [part.mean / unit for part in finite]
            middle = sum(n * share for n, share in zip(weights, means, strict=True)) / total
            squares = sum(
                max(n - 1, 0) * (part.std / unit) ** 2 + n * (share - middle) ** 2
                for n, part, share in zip(weights, finite, means, strict=True)
            )
            mean, std = middle * unit, math.sqrt(squares / max(total - 1, 1)) * unit
    return ValueStatistics(
        min((part.low for part in finite), default=math.nan),
        max((part.high for part in finite), default=math.nan),
        mean, std, sum(part.nans for part in parts), sum(part.infs for part in parts),
        sum(part.size for part in parts), len(parts),
    )  # fmt: skip
