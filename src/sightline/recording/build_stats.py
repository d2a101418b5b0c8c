"""The statistics of a trace: what was read, and what views inherit from the tensor they relabel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sightline.recording.columns import Numbers, i32, offsets_of
from sightline.recording.fingerprints import fingerprints_of
from sightline.recording.measuring import COUNTS, FLOATS
from sightline.trace.data import StatColumns, TensorMeta

if TYPE_CHECKING:
    from sightline.recording.build_ops import Ops
    from sightline.recording.build_values import Values
    from sightline.recording.session import Session

Floats = NDArray[np.float64]


def stat_columns(session: Session, ops: Ops, values: Values) -> StatColumns:
    """A row for every value whose numbers are known."""
    readings = session.readings
    if readings is None:
        return StatColumns.none()
    floats, counts = readings.columns()
    owner = values.dense(counts[:, 0])
    floats, counts, owner = floats[owner >= 0], counts[owner >= 0], owner[owner >= 0]
    has_lanes = np.full(len(owner), readings.fingerprint)
    heirs, sources, keeps = _relabelled(session, ops, values, owner)
    floats, counts, owner, has_lanes = _inherited(
        session, values, floats, counts, owner, has_lanes, heirs, sources, keeps
    )
    order = np.argsort(owner, kind="stable")
    floats, counts, owner, has_lanes = floats[order], counts[order], owner[order], has_lanes[order]
    metas = session.values.metas
    looks = [(metas[meta].dtype, metas[meta].shape) for meta in values.meta[owner].tolist()]
    bits = np.where(has_lanes, fingerprints_of(counts[:, COUNTS:], looks), np.uint64(0))
    low, high, mean, std, l2 = (np.ascontiguousarray(column) for column in floats.T)
    zeros, nans, infs = (np.ascontiguousarray(column) for column in counts.T[1:COUNTS])
    return StatColumns(i32(owner), low, high, mean, std, l2, zeros, nans, infs, bits.astype(np.uint64))


def _relabelled(
    session: Session, ops: Ops, values: Values, owner: Numbers
) -> tuple[list[int], list[int], list[bool]]:
    """Views that relabel a value that was read: the view, the row it inherits, whether its order is kept.

    A view of a view inherits through it, since a base always comes before.
    """
    relabels = np.array([info.relabels for info in session.infos] or [False])
    ordered = np.array([info.keeps_order for info in session.infos] or [False])
    made = values.producer >= 0
    candidate = made & (values.previous < 0)
    candidate[made] &= relabels[ops.info[values.producer[made]]]
    starts = offsets_of(ops.input_counts)
    row = {value: at for at, value in enumerate(owner.tolist())}
    order_kept = dict.fromkeys(row, True)
    heirs: list[int] = []
    sources: list[int] = []
    keeps: list[bool] = []
    for view in np.flatnonzero(candidate).tolist():
        base = int(values.base[view])
        if base < 0:  # `_unsafe_view`, which does not say that it is one
            base = int(ops.inputs[starts[values.producer[view]]])
        source = row.get(base)
        if source is None or view in row:
            continue
        kept = bool(ordered[ops.info[values.producer[view]]]) and order_kept[base]
        row[view], order_kept[view] = source, kept
        heirs.append(view)
        sources.append(source)
        keeps.append(kept)
    return heirs, sources, keeps


def _inherited(
    session: Session, values: Values, floats: Floats, counts: Numbers, owner: Numbers,
    has_lanes: NDArray[np.bool_], heirs: list[int], sources: list[int], keeps: list[bool],
) -> tuple[Floats, Numbers, Numbers, NDArray[np.bool_]]:  # fmt: skip
    """The rows with those of the heirs; an expanded view repeats the elements of its base."""
    if not heirs:
        return floats, counts, owner, has_lanes
    metas = session.values.metas
    views, from_rows = np.array(heirs), np.array(sources)
    times = np.array(
        [
            _repeats(metas[values.meta[view]], metas[values.meta[owner[source]]])
            for view, source in zip(heirs, sources, strict=True)
        ]
    )
    new_floats, new_counts = floats[from_rows].copy(), counts[from_rows].copy()
    new_floats[:, FLOATS - 1] *= np.sqrt(times)
    new_counts[:, 1:COUNTS] = (new_counts[:, 1:COUNTS] * times[:, None]).astype(np.int64)
    kept = np.array(keeps) & has_lanes[from_rows]
    new_counts[~kept, COUNTS:] = 0
    return (
        np.concatenate([floats, new_floats]), np.concatenate([counts, new_counts]),
        np.concatenate([owner, views]), np.concatenate([has_lanes, kept]),
    )  # fmt: skip


def _repeats(view: TensorMeta, base: TensorMeta) -> float:
    return view.numel / base.numel if base.numel else 1.0
