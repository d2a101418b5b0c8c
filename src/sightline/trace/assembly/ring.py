"""``last=N``: of what was written down, only what the last N ops need.

What an op that is gone has made, and one of the last has used, is *evicted*: it is there, and says so.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

import numpy as np

from sightline.trace.assembly import layout as row
from sightline.trace.assembly.arrays import NONE, Mask, Numbers, Rows, dense, joined
from sightline.trace.assembly.batch import Batch, Learned, StepMark, Streams
from sightline.trace.assembly.calls import opening
from sightline.trace.assembly.values import ACTIVATION, KIND, LASTING
from sightline.trace.data import DeviceWorkColumns

_END: Final = 1 << 62
_LAUNCH: Final = [one.name for one in fields(DeviceWorkColumns)].index("launch")
_MADE: Final = (ACTIVATION, KIND["gradient"])


def merged(batches: list[Batch]) -> Batch:
    """Batches as one, late rows in their places; of what was learned of a value the last word."""
    rows = Streams.joined([part for batch in batches for part in (batch.rows, batch.late)])
    learned: dict[int, Learned] = {}
    for batch in batches:
        learned |= {one.value: one for one in batch.learned}
    last = batches[-1] if batches else Batch()
    return Batch(
        rows=rows, learned=list(learned.values()), memory=joined([batch.memory for batch in batches]),
        device=joined([batch.device for batch in batches]),
        nbytes=joined([part for batch in batches for part in (batch.nbytes, batch.late_nbytes)]),
        steps=[mark for batch in batches for mark in batch.steps],
        captures=[info for batch in batches for info in batch.captures], open_ops=last.open_ops,
        open_calls=last.open_calls, end=last.end,
    )  # fmt: skip


def evicted(batch: Batch, count: int, gone: int = 0) -> tuple[Batch, int]:
    """What the last ``count`` ops need, and how many were left out; ``gone`` went before.

    Where no ops are recorded module calls count.
    """
    ops = Rows(joined([batch.rows.ops, batch.open_ops]), row.O_WIDTH)
    calls = Rows(joined([batch.rows.calls, batch.open_calls]), row.C_WIDTH)
    ids = np.unique(ops.ids if len(ops) else calls.ids)
    if len(ids) <= count and not gone:
        return batch, 0
    first = int(ids[-min(count, len(ids))]) if len(ids) else 0
    kept_ops = Rows(ops.taken(ops.ids >= first), row.O_WIDTH)
    kept_calls = Rows(calls.taken(calls.column(row.C_END) > first), row.C_WIDTH)
    values, used = _values(batch.rows), np.unique(np.concatenate([_lists(kept_ops), _lists(kept_calls)]))
    learned = {one.value: one for one in batch.learned}
    values = _needed(values, used, first, learned)
    held = values[:, 1]
    owner = batch.rows.counts[:, 0]
    measured = dense(held, owner) >= 0
    kept = Batch(
        rows=Streams(
            _rows_of(batch.rows.ops, first, row.O_WIDTH), _ended_after(batch.rows.calls, first),
            values.reshape(-1), NONE, batch.rows.floats[measured], batch.rows.counts[measured],
        ),
        memory=batch.memory, device=_asked_since(batch.device, kept_ops),
        nbytes=batch.nbytes, learned=_still_true(learned, values),
        steps=_steps(batch.steps, first), captures=batch.captures,
        open_ops=_rows_of(batch.open_ops, first, row.O_WIDTH), open_calls=batch.open_calls, end=batch.end,
    )  # fmt: skip
    return kept, max(len(ids) - count, 0)


def stood_in(batch: Batch, meta: int) -> Batch:
    """A batch with an evicted value for each that ops or calls refer to and that was lost."""
    every = [Rows(joined([batch.rows.ops, batch.open_ops]), row.O_WIDTH),
             Rows(joined([batch.rows.calls, batch.open_calls]), row.C_WIDTH)]  # fmt: skip
    values = _values(batch.rows)
    linked = (values[:, row.V_BASE], values[:, row.V_PREVIOUS])
    used = np.unique(np.concatenate([*map(_lists, every), *linked]))
    lost = used[(used >= 0) & (dense(values[:, 1], used) < 0)]
    made = np.zeros((len(lost), row.V_WIDTH), dtype=np.int64)
    made[:, 0], made[:, 1], made[:, row.V_META], made[:, row.V_KIND] = (
        row.V_WIDTH,
        lost,
        meta,
        KIND["evicted"],
    )
    made[:, [row.V_PRODUCER, row.V_PREVIOUS, row.V_BASE]] = -1
    every_value = np.concatenate([values, made])
    batch.rows.values = every_value[np.argsort(every_value[:, 1])].reshape(-1)
    batch.rows.fresh = NONE
    return batch


def _still_true(learned: dict[int, Learned], values: Numbers) -> list[Learned]:
    """What is known of values; one whose op is gone is evicted, and no gradient any more."""
    known = [learned[value] for value in values[:, 1].tolist() if value in learned]
    gone = set(values[values[:, row.V_KIND] == KIND["evicted"], 1].tolist())
    return [one._replace(kind=-1) if one.value in gone and one.kind in _MADE else one for one in known]


def _rows_of(flat: Numbers, first: int, width: int) -> Numbers:
    rows = Rows(flat, width)
    return rows.taken(rows.ids >= first)


def _ended_after(flat: Numbers, first: int) -> Numbers:
    rows = Rows(flat, row.C_WIDTH)
    return rows.taken(rows.column(row.C_END) > first)


def _asked_since(device: Numbers, ops: Rows) -> Numbers:
    """What devices did, less what was asked for before the first of these ops began."""
    if not len(device) or not len(ops):
        return device
    work = device.reshape(-1, len(fields(DeviceWorkColumns)))
    first = int(ops.column(row.O_START).min())
    kept: Numbers = work[work[:, _LAUNCH] >= first].reshape(-1)
    return kept


def _lists(rows: Rows) -> Numbers:
    """Inputs and outputs of ops or calls."""
    return rows.lists(rows.width, rows.column(0) - rows.width)


def _values(rows: Streams) -> Numbers:
    """Every value as a row, sorted by id; of one that is there twice the first."""
    fresh = rows.fresh.reshape(-1, row.FRESH_WIDTH)
    made = np.zeros((len(fresh), row.V_WIDTH), dtype=np.int64)
    made[:, 0], made[:, row.V_KIND], made[:, row.V_PREVIOUS], made[:, row.V_BASE] = (
        row.V_WIDTH,
        ACTIVATION,
        -1,
        -1,
    )
    made[:, 1], made[:, row.V_META], made[:, row.V_PRODUCER] = fresh[:, 0], fresh[:, 1], fresh[:, 2]
    every = np.concatenate([rows.values.reshape(-1, row.V_WIDTH), made])
    return every[np.unique(every[:, 1], return_index=True)[1]]


def _needed(values: Numbers, used: Numbers, first: int, learned: dict[int, Learned]) -> Numbers:
    """The values to keep; what made them, or what they came from, may be gone."""
    ids = values[:, 1]
    producer, base = values[:, row.V_PRODUCER], values[:, row.V_BASE]
    _inherit(values, learned)
    lasts = np.isin(values[:, row.V_KIND], list(LASTING)) & ~np.isin(ids, values[:, row.V_PREVIOUS])
    keep = (producer >= first) | lasts | (dense(used, ids) >= 0)
    while True:  # a view shares its base's storage: the base stays
        bases = dense(ids, base[keep])
        bases = bases[(bases >= 0) & (base[keep] >= 0)]
        if keep[bases].all():
            break
        keep[bases] = True
    previous = _kept_before(values, keep)
    kept = values[keep].copy()
    kept[:, row.V_PREVIOUS] = previous[keep]
    held = kept[:, 1]
    kept[dense(held, kept[:, row.V_BASE]) < 0, row.V_BASE] = -1
    gone = (kept[:, row.V_PRODUCER] >= 0) & (kept[:, row.V_PRODUCER] < first)
    kept[gone, row.V_PRODUCER] = -1
    lost = (kept[:, row.V_KIND] == ACTIVATION) & (kept[:, row.V_PRODUCER] < 0)
    kept[lost & (gone | (kept[:, row.V_BASE] < 0)), row.V_KIND] = KIND["evicted"]
    inherits = (
        (kept[:, row.V_OFFSET] == row.INHERITED) & (kept[:, row.V_BASE] < 0) & (kept[:, row.V_PREVIOUS] < 0)
    )
    kept[inherits, row.V_OFFSET] = 0
    return kept


def _kept_before(values: Numbers, keep: Mask) -> Numbers:
    """The nearest earlier version of each value that is kept; -1 for none."""
    ids, previous = values[:, 1], values[:, row.V_PREVIOUS].copy()
    while True:
        at = dense(ids, previous)
        gone = (previous >= 0) & (at >= 0) & ~keep[at]
        if not gone.any():
            break
        earlier = previous[at[gone]]
        if (earlier >= previous[gone]).any():
            raise ValueError("a value replaces a later one")
        previous[gone] = earlier
    previous[(previous >= 0) & (at < 0)] = -1
    return previous


def _steps(marks: list[StepMark], first: int) -> list[StepMark]:
    """Steps that go on after the first op that is kept."""
    opened: list[StepMark] = []
    kept: list[StepMark] = []
    for mark in marks:
        if mark.begins:
            opened.append(mark)
        elif (at := opening(opened, mark)) >= 0:
            begin = opened.pop(at)
            if mark.op > first:
                kept += (begin, mark)
    return sorted([*kept, *opened], key=lambda mark: mark.op)


def known_after(known: Numbers, batch: Batch, learned: dict[int, Learned]) -> Numbers:
    """Rows of the values that may be used after a batch, out of those before it and its own.

    ``learned`` is what is known of values beyond their rows; it is brought up to date.
    """
    own = _values(Streams.joined([batch.rows, batch.late]))
    every = np.concatenate([known.reshape(-1, row.V_WIDTH), own])
    every = every[np.argsort(every[:, 1], kind="stable")]
    learned |= {one.value: one for one in batch.learned}
    if batch.alive is not None:
        recent = int(own[0, 1]) if len(own) else _END
        keep = (dense(batch.alive, every[:, 1]) >= 0) | (every[:, 1] >= recent)
        _inherit(every, learned)
        every = every[keep]
    for value in learned.keys() - set(every[:, 1].tolist()):
        del learned[value]
    return every.reshape(-1)


def _inherit(values: Numbers, learned: dict[int, Learned]) -> None:
    """What lasts stays what it is when it is changed in place, also after its first version is gone."""
    at = dense(values[:, 1], values[:, row.V_PREVIOUS])
    for version in np.flatnonzero((values[:, row.V_PREVIOUS] >= 0) & (at >= 0)).tolist():
        before = int(at[version])
        known = learned.get(int(values[before, 1]))
        kind = known.kind if known is not None and known.kind >= 0 else int(values[before, row.V_KIND])
        if kind not in LASTING or values[version, row.V_KIND] != ACTIVATION:
            continue
        values[version, row.V_KIND] = kind
        number = int(values[version, 1])
        own = learned.get(number, Learned(number, -1, ""))
        if known is not None and known.name and not own.name:
            learned[number] = own._replace(name=known.name)
