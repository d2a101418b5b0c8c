"""Statistics batch by batch: what was read, and what views inherit from the tensor they relabel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sightline.trace.assembly.arrays import NONE, Mask, Numbers, dense, offsets_of
from sightline.trace.assembly.batch import Tables, no_counts, no_floats
from sightline.trace.assembly.layout import COUNTS, FLOATS
from sightline.trace.assembly.ops import Ops
from sightline.trace.assembly.values import LiveValues
from sightline.trace.data import F64, TensorMeta
from sightline.trace.fingerprint import fingerprints_of


@dataclass
class StatisticsRows:
    """Rows of statistics, sorted by value."""

    value: Numbers
    floats: F64
    counts: Numbers
    has_lanes: Mask
    in_order: Mask  #: whether a view has its elements in the order in which they were read

    @classmethod
    def none(cls) -> StatisticsRows:
        no = np.zeros(0, dtype=bool)
        return cls(NONE, no_floats(), no_counts(), no, no)

    def taken(self, which: Numbers | Mask) -> StatisticsRows:
        return StatisticsRows(
            self.value[which], self.floats[which], self.counts[which], self.has_lanes[which],
            self.in_order[which],
        )  # fmt: skip

    def joined(self, other: StatisticsRows) -> StatisticsRows:
        """Both, sorted by value; of two rows of one value the first."""
        both = StatisticsRows(
            np.concatenate([self.value, other.value]), np.concatenate([self.floats, other.floats]),
            np.concatenate([self.counts, other.counts]), np.concatenate([self.has_lanes, other.has_lanes]),
            np.concatenate([self.in_order, other.in_order]),
        )  # fmt: skip
        return both.taken(np.unique(both.value, return_index=True)[1])


class Statistics:
    """Of the values that may still be looked at."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._known = StatisticsRows.none()
        self._later = StatisticsRows.none()

    def add(
        self, floats: F64, counts: Numbers, living: LiveValues, first: int, ops: Ops
    ) -> dict[str, object]:
        """The columns for the values from row ``first`` of the living on."""
        lanes = np.full(len(counts), self._tables.fingerprint)
        every = np.ones(len(counts), dtype=bool)
        read = self._later.joined(StatisticsRows(counts[:, 0], floats, counts, lanes, every))
        end = int(living.id[-1]) + 1 if len(living) else 0
        self._later = read.taken(read.value >= end)
        begin = int(living.id[first]) if first < len(living) else end
        known = self._known.joined(read.taken(read.value < end))
        known = known.joined(self._inherited(known, living, first, ops))
        self._known = known
        return self._columns(known.taken(known.value >= begin), living)

    @property
    def empty(self) -> bool:
        """Whether nothing was read of what may still be looked at."""
        return not len(self._known.value) and not len(self._later.value)

    def forget(self, living: LiveValues) -> None:
        """Drop what no living value has."""
        if len(self._known.value):
            self._known = self._known.taken(living.at(self._known.value) >= 0)

    def _inherited(self, known: StatisticsRows, living: LiveValues, first: int, ops: Ops) -> StatisticsRows:
        """Rows of views that relabel a value that was read; a view of a view inherits through it."""
        if not len(known.value):
            return StatisticsRows.none()
        operations = self._tables.operations
        relabels = np.array([one.relabels for one in operations] or [False])
        ordered = np.array([one.keeps_order for one in operations] or [False])
        local = living.producer[first:] - ops.base
        candidate = (local >= 0) & (local < len(ops.ids)) & (living.previous[first:] < 0)
        candidate[candidate] = relabels[ops.info[local[candidate]]]
        starts = offsets_of(ops.input_counts)
        at_row = {value: at for at, value in enumerate(known.value.tolist())}
        in_order = dict(zip(known.value.tolist(), known.in_order.tolist(), strict=True))
        heirs: list[int] = []
        sources: list[int] = []
        keeps: list[bool] = []
        for at in np.flatnonzero(candidate).tolist():
            view, base = int(living.id[first + at]), int(living.base[first + at])
            if base < 0:  # `_unsafe_view`, which does not say that it is one
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
            return StatisticsRows.none()
        return self._copied(known, living, np.array(heirs), np.array(sources), np.array(keeps))

    def _copied(
        self, known: StatisticsRows, living: LiveValues, heirs: Numbers, sources: Numbers, keeps: Mask
    ) -> StatisticsRows:
        """What was read, as of the heirs; an expanded view repeats the elements of its base."""
        found = known.taken(sources)
        metas = self._tables.metas
        look, from_look = living.meta[living.at(heirs)], living.at(found.value)
        times = np.array([
            _repeats(metas[view], metas[int(living.meta[source])]) if source >= 0 else 1.0
            for view, source in zip(look.tolist(), from_look.tolist(), strict=True)
        ])  # fmt: skip
        floats, counts = found.floats.copy(), found.counts.copy()
        with np.errstate(all="ignore"):  # numbers of a damaged file may be any
            floats[:, FLOATS - 1] *= np.sqrt(times)
            counts[:, 1:COUNTS] = (counts[:, 1:COUNTS] * times[:, None]).astype(np.int64)
        lanes = keeps & found.has_lanes
        counts[~lanes, COUNTS:] = 0
        order = np.argsort(heirs, kind="stable")
        return StatisticsRows(heirs, floats, counts, lanes, keeps).taken(order)

    def _columns(self, rows: StatisticsRows, living: LiveValues) -> dict[str, object]:
        metas, at = self._tables.metas, dense(living.id, rows.value)
        rows, at = rows.taken(at >= 0), at[at >= 0]
        looks = [(metas[meta].dtype, metas[meta].shape) for meta in living.meta[at].tolist()]
        bits = np.where(rows.has_lanes, fingerprints_of(rows.counts[:, COUNTS:], looks), np.uint64(0))
        low, high, mean, std, l2 = (np.ascontiguousarray(column) for column in rows.floats.T)
        zeros, nans, infs = (np.ascontiguousarray(column) for column in rows.counts.T[1:COUNTS])
        return {
            "value": rows.value, "min": low, "max": high, "mean": mean, "std": std, "l2": l2, "zeros": zeros,
            "nans": nans, "infs": infs, "fingerprint": bits.astype(np.uint64),
        }  # fmt: skip


def _repeats(view: TensorMeta, base: TensorMeta) -> float:
    return view.numel / base.numel if base.numel else 1.0
