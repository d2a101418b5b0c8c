"""Statistics batch by batch: those measured, and those that views inherit from the tensor they relabel.

The last step of a fingerprint is here too, mixing in dtype and shape: it needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sightline.assemble.batch import Tables, no_counts, no_floats
from sightline.assemble.ops import BatchOps
from sightline.assemble.values import LiveValues
from sightline.data.arrays import EMPTY, IntArray, Mask, offsets_of, positions_in
from sightline.data.trace_data import F64
from sightline.schema.streams import COUNTS, FLOATS


@dataclass
class StatisticsRows:
    """Rows of statistics, sorted by value."""

    value: IntArray
    floats: F64
    counts: IntArray
    has_lanes: Mask
    in_order: Mask  #: whether the elements are in the order in which they were measured

    @classmethod
    def empty(cls) -> StatisticsRows:
        no = np.zeros(0, dtype=bool)
        return cls(EMPTY, no_floats(), no_counts(), no, no)

    def select(self, which: IntArray | Mask) -> StatisticsRows:
        return StatisticsRows(
            self.value[which], self.floats[which], self.counts[which], self.has_lanes[which],
            self.in_order[which],
        )  # fmt: skip

    def merge(self, other: StatisticsRows) -> StatisticsRows:
        """Both, sorted by value; of two rows of a value the first."""
        both = StatisticsRows(
            np.concatenate([self.value, other.value]), np.concatenate([self.floats, other.floats]),
            np.concatenate([self.counts, other.counts]), np.concatenate([self.has_lanes, other.has_lanes]),
            np.concatenate([self.in_order, other.in_order]),
        )  # fmt: skip
        return both.select(np.unique(both.value, return_index=True)[1])


class Statistics:
    """The statistics of the live values."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._rows = StatisticsRows.empty()
        self._pending = StatisticsRows.empty()

    def add(
        self, floats: F64, counts: IntArray, live: LiveValues, first: int, ops: BatchOps
    ) -> dict[str, object]:
        """The columns for the values from row ``first`` of the live ones on."""
        lanes = np.full(len(counts), self._tables.fingerprint)
        every = np.ones(len(counts), dtype=bool)
        read = self._pending.merge(StatisticsRows(counts[:, 0], floats, counts, lanes, every))
        end = int(live.id[-1]) + 1 if len(live) else 0
        self._pending = read.select(read.value >= end)
        begin = int(live.id[first]) if first < len(live) else end
        rows = self._rows.merge(read.select(read.value < end))
        rows = rows.merge(self._inherited(rows, live, first, ops))
        self._rows = rows
        rows = rows.select(rows.value >= begin)
        metas, at = self._tables.metas, positions_in(live.id, rows.value)
        rows, at = rows.select(at >= 0), at[at >= 0]
        dtypes = [(metas[meta].dtype, metas[meta].shape) for meta in live.meta[at].tolist()]
        bits = np.where(rows.has_lanes, fingerprints_of(rows.counts[:, COUNTS:], dtypes), np.uint64(0))
        low, high, mean, std, l2 = (np.ascontiguousarray(column) for column in rows.floats.T)
        zeros, nans, infs = (np.ascontiguousarray(column) for column in rows.counts.T[1:COUNTS])
        return {
            "value": rows.value, "min": low, "max": high, "mean": mean, "std": std, "l2": l2, "zeros": zeros,
            "nans": nans, "infs": infs, "fingerprint": bits.astype(np.uint64),
        }  # fmt: skip

    @property
    def empty(self) -> bool:
        """Whether no live value has statistics."""
        return not len(self._rows.value) and not len(self._pending.value)

    def forget(self, live: LiveValues) -> None:
        """Drop the statistics of values that are no longer live."""
        if len(self._rows.value):
            self._rows = self._rows.select(live.at(self._rows.value) >= 0)

    def _inherited(self, rows: StatisticsRows, live: LiveValues, first: int, ops: BatchOps) -> StatisticsRows:
        """Rows of views that relabel a measured value; a view of a view inherits through it."""
        if not len(rows.value):
            return StatisticsRows.empty()
        operations = self._tables.operations
        relabels = np.array([one.relabels for one in operations] or [False])
        ordered = np.array([one.keeps_order for one in operations] or [False])
        local = live.producer[first:] - ops.base
        candidate = (local >= 0) & (local < len(ops.ids)) & (live.previous[first:] < 0)
        candidate[candidate] = relabels[ops.info[local[candidate]]]
        starts = offsets_of(ops.input_counts)
        at_row = {value: at for at, value in enumerate(rows.value.tolist())}
        in_order = dict(zip(rows.value.tolist(), rows.in_order.tolist(), strict=True))
        heirs: list[int] = []
        sources: list[int] = []
        keeps: list[bool] = []
        for at in np.flatnonzero(candidate).tolist():
            view, base = int(live.id[first + at]), int(live.base[first + at])
            if base < 0:  # `_unsafe_view`, which has no base though it is a view
                base = int(ops.inputs[starts[local[at]]])
            source = at_row.get(base)
            if source is None or view in at_row:
                continue
            kept = bool(ordered[ops.info[local[at]]]) and in_order[base]
            at_row[view], in_order[view] = source, kept
            heirs.append(view)
            sources.append(source)
            keeps.append(kept)
        if not heirs:
            return StatisticsRows.empty()
        return self._copy_rows(rows, live, np.array(heirs), np.array(sources), np.array(keeps))

    def _copy_rows(
        self, rows: StatisticsRows, live: LiveValues, heirs: IntArray, sources: IntArray, keeps: Mask
    ) -> StatisticsRows:
        """The rows of sources for their heirs; an expanded view repeats the elements of its base."""
        copied = rows.select(sources)
        metas = self._tables.metas
        views = [metas[meta].numel for meta in live.meta[live.at(heirs)].tolist()]
        bases = [metas[live.meta[at]].numel if at >= 0 else 0 for at in live.at(copied.value).tolist()]
        times = np.array([view / base if base else 1.0 for view, base in zip(views, bases, strict=True)])
        floats, counts = copied.floats.copy(), copied.counts.copy()
        with np.errstate(all="ignore"):  # a damaged file may hold any numbers
            floats[:, FLOATS - 1] *= np.sqrt(times)
            counts[:, 1:COUNTS] = (counts[:, 1:COUNTS] * times[:, None]).astype(np.int64)
        lanes = keeps & copied.has_lanes
        counts[~lanes, COUNTS:] = 0
        order = np.argsort(heirs, kind="stable")
        return StatisticsRows(heirs, floats, counts, lanes, keeps).select(order)


U64 = NDArray[np.uint64]


def fingerprints_of(lanes: NDArray[np.int64], dtypes: Iterable[tuple[str, tuple[int, ...]]]) -> U64:
    """Fingerprints from the lanes of tensors, a row each, and their dtypes and shapes; never zero.

    >>> a, b = fingerprints_of(np.zeros((2, 4), dtype=np.int64), [("float32", (2,)), ("float32", (1, 2))])
    >>> bool(a != b)
    True
    """
    mixed = np.array([_meta_bits(dtype, shape) for dtype, shape in dtypes], dtype=np.uint64)
    for lane in lanes.view(np.uint64).T:
        mixed = scramble(mixed ^ lane)
    mixed[mixed == 0] = 1
    return mixed


@lru_cache(maxsize=65536)
def _meta_bits(dtype: str, shape: tuple[int, ...]) -> int:
    text = f"{dtype}{list(shape)}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def scramble(numbers: U64) -> U64:
    """splitmix64, which turns consecutive numbers into random-looking ones."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
