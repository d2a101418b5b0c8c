"""``last=N``: the part of a recording that its last N ops need.

A value that a dropped op made and a kept op uses stays, and its kind becomes *evicted*. While the run goes
on, `recording/streaming/last_frames.py` keeps whole batches; the exact cut is made here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np

from sightline.assemble.batch import Batch, Operation, StepMark, Streams, ValueUpdate
from sightline.assemble.calls import matching_begin
from sightline.assemble.ops import OP, OPAQUE
from sightline.assemble.values import ACTIVATION, LASTING, inherited, value_rows
from sightline.data.arrays import EMPTY, IntArray, Rows, concatenate, positions_in
from sightline.data.trace_data import KIND, DeviceWorkColumns
from sightline.schema import streams

_LAUNCH: Final = [one.name for one in fields(DeviceWorkColumns)].index("launch")
_FROM_OPS: Final = (ACTIVATION, KIND["gradient"])
_COLLECTIVES: Final = ("c10d::", "_c10d_functional")  #: the beginnings of their names


@dataclass(frozen=True)
class Dropped:
    """The ops that a recording of the last ops no longer has.

    Collectives are counted for each name and form: ranks are compared by the order numbers of theirs.
    Autograd nodes are counted for each thread: a node with a higher number belongs to an op that is kept.
    """

    ops: int = 0
    collectives: Counter[tuple[str, int]] = field(default_factory=Counter)
    sequences: dict[int, int] = field(default_factory=dict)  #: thread -> its last autograd number

    @classmethod
    def of(cls, ops: Rows, operations: Sequence[Operation]) -> Dropped:
        """These ops, of which some may be there twice."""
        ids, first = np.unique(ops.ids, return_index=True)
        names, forms = ops.column("info")[first], ops.column("form")[first]
        makes = np.array([one.flavour in (OP, OPAQUE) for one in operations] or [False])[names]
        threads = (ops.column("bits")[first] >> streams.THREAD_SHIFT)[makes].tolist()
        numbers = ops.column("sequence")[first][makes].tolist()
        of_interest = [at for at, one in enumerate(operations) if one.name.startswith(_COLLECTIVES)]
        mask = np.isin(names, of_interest)
        counted = zip(names[mask].tolist(), forms[mask].tolist(), strict=True)
        collectives = Counter((operations[name].name, form) for name, form in counted)
        return cls(len(ids), collectives, _highest(zip(threads, numbers, strict=True)))

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Dropped:
        """From the info of a recording."""
        rows = info.get("dropped_collectives") or ()
        return cls(
            int(info.get("dropped") or 0),
            Counter({(str(name), int(form)): int(n) for name, form, n in rows}),
            {int(thread): int(number) for thread, number in info.get("dropped_sequences") or ()},
        )

    def to_info(self) -> dict[str, Any]:
        """Entries for the info of a recording."""
        rows = [[name, form, count] for (name, form), count in self.collectives.items()]
        numbers = [[thread, number] for thread, number in self.sequences.items()]
        return {
            "dropped": self.ops,
            **({"dropped_collectives": rows} if rows else {}),
            **({"dropped_sequences": numbers} if numbers else {}),
        }

    def __add__(self, other: Dropped) -> Dropped:
        sequences = _highest([*self.sequences.items(), *other.sequences.items()])
        return Dropped(self.ops + other.ops, self.collectives + other.collectives, sequences)


def _highest(numbers: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The highest number of each thread."""
    highest: dict[int, int] = {}
    for thread, number in numbers:
        highest[thread] = max(number, highest.get(thread, number))
    return highest


def merge_batches(batches: list[Batch]) -> Batch:
    """Batches as one, late rows included; of several updates of a value the last counts."""
    updates: dict[int, ValueUpdate] = {}
    for batch in batches:
        updates |= {update.value: update for update in batch.updates}
    last = batches[-1] if batches else Batch()
    return Batch(
        rows=Streams.concatenate([part for batch in batches for part in (batch.rows, batch.late)]),
        updates=list(updates.values()),
        memory=concatenate([batch.memory for batch in batches]),
        device=concatenate([batch.device for batch in batches]),
        nbytes=concatenate([part for batch in batches for part in (batch.nbytes, batch.late_nbytes)]),
        steps=[mark for batch in batches for mark in batch.steps],
        captures=[info for batch in batches for info in batch.captures],
        open_ops=last.open_ops,
        open_calls=last.open_calls,
        end=last.end,
    )


def keep_last(
    batch: Batch, count: int, operations: Sequence[Operation], before: Dropped | None = None
) -> tuple[Batch, Dropped]:
    """The part that the last ``count`` ops need, and the ops left out, those ``before`` included.

    Where no ops are recorded, module calls count.
    """
    before = before or Dropped()
    ops, calls = _all_rows(batch)
    ids = np.unique(ops.ids if len(ops) else calls.ids)
    if len(ids) <= count and not before.ops:
        return batch, before
    first = int(ids[-min(count, len(ids))]) if len(ids) else 0
    kept_ops = ops.select(ops.ids >= first)
    kept_calls = calls.select(calls.column("end") > first)
    used = np.unique(np.concatenate([_references(kept_ops), _references(kept_calls)]))
    updates = {update.value: update for update in batch.updates}
    values = _needed_values(_unique_values(batch.rows), used, first, updates)
    evicted = set(values[values[:, streams.V_KIND] == KIND["evicted"], 1].tolist())
    valid = [updates[value] for value in values[:, 1].tolist() if value in updates]
    measured = positions_in(values[:, 1], batch.rows.counts[:, 0]) >= 0
    work = batch.device.reshape(-1, len(fields(DeviceWorkColumns)))
    if len(kept_ops):
        work = work[work[:, _LAUNCH] >= kept_ops.column("start").min()]
    ended_calls = Rows(batch.rows.calls, streams.CALL)
    kept = Batch(
        rows=Streams(
            _ops_from(batch.rows.ops, first),
            ended_calls.select_stream(ended_calls.column("end") > first),
            values.reshape(-1), EMPTY, batch.rows.floats[measured], batch.rows.counts[measured],
        ),
        memory=batch.memory, device=work.reshape(-1), nbytes=batch.nbytes,
        updates=[
            update._replace(kind=-1)  # an evicted value no longer becomes a gradient
            if update.value in evicted and update.kind in _FROM_OPS else update for update in valid
        ],
        steps=_steps_after(batch.steps, first), captures=batch.captures,
        open_ops=_ops_from(batch.open_ops, first), open_calls=batch.open_calls, end=batch.end,
    )  # fmt: skip
    dropped = Dropped.of(ops.select(ops.ids < first), operations)
    return kept, before + (dropped if len(ops) else Dropped(max(len(ids) - count, 0)))


def add_placeholders(batch: Batch, meta: int) -> Batch:
    """A batch with an evicted value for every id that is referred to and whose row was lost."""
    values = _unique_values(batch.rows)
    linked = (values[:, streams.V_BASE], values[:, streams.V_PREVIOUS])
    used = np.unique(np.concatenate([*map(_references, _all_rows(batch)), *linked]))
    lost = used[(used >= 0) & (positions_in(values[:, 1], used) < 0)]
    fresh = np.stack([lost, np.full(len(lost), meta), np.full(len(lost), -1)], axis=1)
    placeholders = value_rows(EMPTY, fresh)
    placeholders[:, streams.V_KIND] = KIND["evicted"]
    batch.rows.values = value_rows(np.concatenate([values, placeholders]), EMPTY).reshape(-1)
    batch.rows.fresh = EMPTY
    return batch


def _all_rows(batch: Batch) -> tuple[Rows, Rows]:
    """Ops and calls, those that have not ended included."""
    ops = Rows(concatenate([batch.rows.ops, batch.open_ops]), streams.OP)
    return ops, Rows(concatenate([batch.rows.calls, batch.open_calls]), streams.CALL)


def _ops_from(flat: IntArray, first: int) -> IntArray:
    rows = Rows(flat, streams.OP)
    return rows.select_stream(rows.ids >= first)


def _references(rows: Rows) -> IntArray:
    """Inputs and outputs of ops or calls."""
    return rows.lists(rows.layout.width, rows.column("length") - rows.layout.width)


def _unique_values(rows: Streams) -> IntArray:
    """Every value as a row, sorted by id; of duplicates the first."""
    values = value_rows(rows.values, rows.fresh)
    return values[np.unique(values[:, 1], return_index=True)[1]]


def _needed_values(values: IntArray, used: IntArray, first: int, updates: dict[int, ValueUpdate]) -> IntArray:
    """The values to keep, without references to ops and values that are dropped."""
    ids = values[:, 1]
    producer, base = values[:, streams.V_PRODUCER], values[:, streams.V_BASE]
    _inherit(values, updates)
    lasts = np.isin(values[:, streams.V_KIND], list(LASTING)) & ~np.isin(ids, values[:, streams.V_PREVIOUS])
    keep = (producer >= first) | lasts | (positions_in(used, ids) >= 0)
    while True:  # a view shares its base's storage: the base stays
        bases = positions_in(ids, base[keep])
        bases = bases[(bases >= 0) & (base[keep] >= 0)]
        if keep[bases].all():
            break
        keep[bases] = True
    previous = values[:, streams.V_PREVIOUS].copy()
    while True:  # the nearest earlier version that is kept
        at = positions_in(ids, previous)
        dropped = (previous >= 0) & (at >= 0) & ~keep[at]
        if not dropped.any():
            break
        earlier = previous[at[dropped]]
        if (earlier >= previous[dropped]).any():
            raise ValueError("a value replaces a later one")
        previous[dropped] = earlier
    previous[(previous >= 0) & (at < 0)] = -1
    kept = values[keep].copy()
    kept[:, streams.V_PREVIOUS] = previous[keep]
    kept[positions_in(kept[:, 1], kept[:, streams.V_BASE]) < 0, streams.V_BASE] = -1
    orphans = (kept[:, streams.V_PRODUCER] >= 0) & (kept[:, streams.V_PRODUCER] < first)
    kept[orphans, streams.V_PRODUCER] = -1
    no_producer = (kept[:, streams.V_KIND] == ACTIVATION) & (kept[:, streams.V_PRODUCER] < 0)
    kept[no_producer & (orphans | (kept[:, streams.V_BASE] < 0)), streams.V_KIND] = KIND["evicted"]
    inherits = kept[:, streams.V_OFFSET] == streams.INHERITED
    kept[inherits & (kept[:, streams.V_BASE] < 0) & (kept[:, streams.V_PREVIOUS] < 0), streams.V_OFFSET] = 0
    return kept


def _steps_after(marks: list[StepMark], first: int) -> list[StepMark]:
    """The marks of steps that go on after the first op that is kept."""
    opened: list[StepMark] = []
    kept: list[StepMark] = []
    for mark in marks:
        if mark.begins:
            opened.append(mark)
        elif (at := matching_begin(opened, mark)) >= 0:
            begin = opened.pop(at)
            if mark.op > first:
                kept += (begin, mark)
    return sorted([*kept, *opened], key=lambda mark: mark.op)


def reusable_values(before: IntArray, batch: Batch, updates: dict[int, ValueUpdate]) -> IntArray:
    """Rows of the values that ops after a batch may use, from those ``before`` it and its own.

    ``updates`` holds the updates of these values; those of the batch are added, obsolete ones removed.
    """
    own = _unique_values(Streams.concatenate([batch.rows, batch.late]))
    values = np.concatenate([before.reshape(-1, streams.VALUE.width), own])
    values = values[np.argsort(values[:, 1], kind="stable")]
    updates |= {update.value: update for update in batch.updates}
    if batch.alive is not None:
        recent = int(own[0, 1]) if len(own) else streams.END
        keep = (positions_in(batch.alive, values[:, 1]) >= 0) | (values[:, 1] >= recent)
        _inherit(values, updates)
        values = values[keep]
    for value in updates.keys() - set(values[:, 1].tolist()):
        del updates[value]
    return values.reshape(-1)


def _inherit(values: IntArray, updates: dict[int, ValueUpdate]) -> None:
    """Let versions inherit kinds and names, while the versions they replace are still there."""
    ids, previous = values[:, 1], values[:, streams.V_PREVIOUS]
    if (previous >= ids).any():
        raise ValueError("a value replaces a later one")
    kind, unnamed = values[:, streams.V_KIND].copy(), np.ones(len(ids), dtype=bool)
    positions = positions_in(ids, np.fromiter(updates, dtype=np.int64, count=len(updates)))
    for at, update in zip(positions.tolist(), updates.values(), strict=True):
        if at >= 0:
            kind[at] = update.kind if update.kind >= 0 else kind[at]
            unnamed[at] = not update.name
    is_version = (previous >= 0) & (kind == ACTIVATION)
    kind, sources = inherited(kind, np.where(is_version, positions_in(ids, previous), -1), unnamed)
    values[is_version, streams.V_KIND] = kind[is_version]
    named = (sources != np.arange(len(sources))) & ~unnamed[sources]
    for id, source in zip(ids[named].tolist(), ids[sources[named]].tolist(), strict=True):
        updates[id] = updates.get(id, ValueUpdate(id, -1, ""))._replace(name=updates[source].name)
