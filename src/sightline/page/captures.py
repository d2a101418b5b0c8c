"""Captured tensors for the page: a histogram of the numbers of each, and a small map."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sightline.analysis.tensor_drawing import Cells, as_float64, finite_sample, histogram
from sightline.data.dtypes import nbytes_of
from sightline.data.tensors import CapturedTensor
from sightline.data.trace_data import CaptureInfo, TraceData
from sightline.errors import SightlineError
from sightline.page.kept_rows import Kept
from sightline.page.sections import Sections, Strings

MOST_TENSORS: Final = 400  #: drawn on a page, which names the number left out
_MOST_BYTES: Final = 64 << 20  #: of one tensor
_BINS: Final = 40
_ROWS, _COLUMNS = 32, 64  #: cells of a map
_SHADES: Final = 255  #: the darkest shade of a cell
_NAN, _INF = -1, -2  #: cells with such a number in them


class _Drawn(NamedTuple):
    """One captured tensor, drawn."""

    info: CaptureInfo
    value: int  #: its number on the page
    bins: list[int]
    low: float
    high: float
    slice: str  #: the part that the map shows: ``[0, :, :]``; "" for all of it
    cells: list[list[int]]
    least: float  #: the smallest mean of a cell
    most: float


def add_captures(sections: Sections, data: TraceData, values: Kept, strings: Strings) -> None:
    """Add the drawings of captured tensors, the first ones of a recording with very many."""
    drawings = [drawn for info in data.captures[:MOST_TENSORS] if (drawn := _drawn(data, info, values))]
    sections.column("captures.value", np.array([each.value for each in drawings], dtype=np.int32))
    sections.column("captures.key", strings.all_of(each.info.key for each in drawings))
    sections.column("captures.slice", strings.all_of(each.slice for each in drawings))
    for name in ("low", "high", "least", "most"):
        sections.floats(
            f"captures.{name}", np.array([getattr(each, name) for each in drawings], dtype=np.float64)
        )
    sections.column("captures.bin_count", np.array([len(each.bins) for each in drawings], dtype=np.int32))
    sections.column(
        "captures.bins", np.array([count for each in drawings for count in each.bins], dtype=np.int64)
    )
    sections.column("captures.rows", np.array([len(each.cells) for each in drawings], dtype=np.int32))
    sections.column(
        "captures.cell_count", np.array([sum(map(len, each.cells)) for each in drawings], dtype=np.int32)
    )
    flat = [cell for each in drawings for row in each.cells for cell in row]
    sections.column("captures.cells", np.array(flat, dtype=np.int16))


def _drawn(data: TraceData, info: CaptureInfo, values: Kept) -> _Drawn | None:
    """A tensor that belongs to a value of the page, drawn; None where it cannot be read or is very large."""
    value = values.one(info.value if info.value >= 0 else None)
    size = nbytes_of(info.dtype, info.shape)
    if value < 0 or data.store is None or size is None or not 0 < size <= _MOST_BYTES:
        return None
    try:
        numbers = CapturedTensor(info, data.store).numpy()
    except SightlineError:  # a damaged file: the rest of the page is right
        return None
    sample = finite_sample(numbers)
    low, high = (float(sample.min()), float(sample.max())) if sample.size else (np.nan, np.nan)
    counts = histogram(sample, _BINS)
    bins = [] if counts is None else counts.tolist()
    first = (0,) * (numbers.ndim - 2)
    shown = as_float64(np.atleast_2d(numbers[first])) if info.whole else as_float64(np.zeros((0, 0)))
    text = f"[{', '.join([*map(str, first), ':', ':'])}]" if first else ""
    if shown.size < 2:
        return _Drawn(info, value, bins, low, high, "", [], np.nan, np.nan)
    cells = Cells.of(shown, [_ROWS, _COLUMNS])
    spread = cells.high - cells.low
    shares = (cells.means - cells.low) / spread if spread > 0 else np.full_like(cells.means, 0.5)
    shades = np.round(np.nan_to_num(shares) * _SHADES).astype(np.int64)
    marked = np.select([cells.nans, cells.infs], [_NAN, _INF], shades).tolist()
    return _Drawn(info, value, bins, low, high, text, marked, cells.low * cells.unit,
                  cells.high * cells.unit)  # fmt: skip
