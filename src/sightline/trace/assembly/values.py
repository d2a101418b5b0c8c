"""Values batch by batch: storages, kinds, names and memory, for as long as a value may be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from sightline.trace import data as d
from sightline.trace.assembly import layout as row
from sightline.trace.assembly.arrays import NONE, Mask, Numbers, Rows, chain_ends, dense, joined
from sightline.trace.assembly.batch import Learned, Tables
from sightline.trace.assembly.layout import M_WIDTH
from sightline.trace.data import TensorMeta


class Allocations:
    """Batch by batch: what is freed becomes a row, what is still held waits.

    >>> held = Allocations()
    >>> rows = np.array([0, 64, 10, 1, 32, 11, 0, -1, 15])
    >>> [column.tolist() for column in held.add(rows, values=2, last=False).values()]
    [[0], [64], [10], [15]]
    >>> [column.tolist() for column in held.add(NONE, values=2, last=True).values()]
    [[1], [32], [11], [-1]]
    """

    def __init__(self) -> None:
        self._held = NONE

    def add(self, rows: Numbers, values: int, last: bool) -> dict[str, Numbers]:
        """The columns of what has come to its end; with ``last`` of what has not, too.

        Values from the id ``values`` on are not there yet: the op that makes one is still running. Of a
        process that was killed they never come.
        """
        every, over, after = _paired(joined([self._held, rows]))
        is_size, is_there = every[:, 1] >= 0, every[:, 0] < values
        self._held = NONE if last else every[(is_size & ~over) | ~is_there].reshape(-1)
        wanted = is_there & is_size & (over | last)
        value, nbytes, start = every[wanted].T
        return {"value": value, "nbytes": nbytes, "start": start, "end": np.where(over, after, -1)[wanted]}


def held_after(held: Numbers, rows: Numbers) -> Numbers:
    """What is still held after more was written."""
    every, over, _ = _paired(joined([held, rows]))
    return every[(every[:, 1] >= 0) & ~over].reshape(-1)


def _paired(flat: Numbers) -> tuple[Numbers, Mask, Numbers]:
    """Rows by storage and in order; whether another row follows of the same storage, and its time."""
    rows = flat.reshape(-1, M_WIDTH)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    over = np.zeros(len(rows), dtype=bool)
    after = np.full(len(rows), -1, dtype=np.int64)
    if len(rows):
        over[:-1] = rows[1:, 0] == rows[:-1, 0]
        after[:-1] = rows[1:, 2]
    return rows, over, after


KIND: Final = {name: number for number, name in enumerate(d.KINDS)}
ACTIVATION: Final = KIND["activation"]
#: What a tensor stays when it is changed in place: a weight is one before and after the optimizer.
LASTING: Final = frozenset({KIND["parameter"], KIND["buffer"], KIND["state"]})
_GIVEN: Final = frozenset({KIND["input"], KIND["external"]})
#: What is known of a living value; ``maker`` is the aten op that first returned it.
_COLUMNS: Final = (
    "id", "meta", "address", "offset", "kind", "producer", "previous", "base", "flags", "storage", "name",
    "maker", "maker_call", "maker_forward", "maker_forward_call",
)  # fmt: skip


class LiveValues:
    """Columns of the values that may be used again, sorted by id."""

    id: Numbers
    meta: Numbers
    address: Numbers
    offset: Numbers
    kind: Numbers
    producer: Numbers  #: the place of an op
    previous: Numbers  #: an id
    base: Numbers  #: an id
    flags: Numbers
    storage: Numbers
    name: Numbers
    maker: Numbers
    maker_call: Numbers
    maker_forward: Numbers
    maker_forward_call: Numbers

    def __init__(self) -> None:
        for name in _COLUMNS:
            setattr(self, name, NONE)

    def __len__(self) -> int:
        return len(self.id)

    def at(self, ids: Numbers) -> Numbers:
        """Rows of values by id; -1 for one that is not here."""
        count = len(self.id)
        if not count or self.id[-1] - self.id[0] != count - 1:
            return dense(self.id, ids)
        rows = ids - self.id[0]  # none is missing, as long as nothing was forgotten
        return np.where((rows >= 0) & (rows < count), rows, -1)

    def extend(self, new: dict[str, Numbers]) -> int:
        """Add values with larger ids; returns the row of the first."""
        first, count = len(self.id), len(new["id"])
        for name in _COLUMNS:
            added = new.get(name)
            if added is None:
                added = np.full(count, -1, dtype=np.int64)
            setattr(self, name, np.concatenate([getattr(self, name), added]))
        return first

    def keep(self, mask: Mask) -> None:
        """Forget all others."""
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[mask])


class IncomingValues:
    """The rows of values that have arrived and are not in the columns yet."""

    def __init__(self, values: Numbers, fresh: Numbers) -> None:
        rows = Rows(values, row.V_WIDTH)
        plain = fresh.reshape(-1, row.FRESH_WIDTH)
        ids = np.concatenate([rows.ids, plain[:, 0]])
        order = np.argsort(ids, kind="stable")

        def column(position: int, default: int) -> Numbers:
            rest = np.full(len(plain), default, dtype=np.int64)
            return np.concatenate([rows.column(position), rest])[order]

        self.columns = {
            "id": ids[order],
            "meta": np.concatenate([rows.column(row.V_META), plain[:, 1]])[order],
            "producer": np.concatenate([rows.column(row.V_PRODUCER), plain[:, 2]])[order],
            "address": column(row.V_STORAGE, 0),
            "offset": column(row.V_OFFSET, 0),
            "kind": column(row.V_KIND, ACTIVATION),
            "previous": column(row.V_PREVIOUS, -1),
            "base": column(row.V_BASE, -1),
            "flags": column(row.V_FLAGS, 0),
        }

    def split(self, end: int, ops: Numbers) -> tuple[dict[str, Numbers], Numbers]:
        """Those before the first one that an op from ``end`` on makes; and the rest, as a stream again."""
        columns = self.columns
        later = np.flatnonzero(columns["producer"] >= end)
        later = later[dense(ops, columns["producer"][later]) < 0]
        if not len(later):
            return columns, NONE
        cut = int(later[0])
        rest = {name: column[cut:] for name, column in columns.items()}
        count = len(rest["id"])
        flat = np.empty((count, row.V_WIDTH), dtype=np.int64)
        flat[:, 0], flat[:, 1] = row.V_WIDTH, rest["id"]
        for name, position in (
            ("meta", row.V_META), ("address", row.V_STORAGE), ("offset", row.V_OFFSET), ("kind", row.V_KIND),
            ("producer", row.V_PRODUCER), ("previous", row.V_PREVIOUS), ("base", row.V_BASE),
            ("flags", row.V_FLAGS),
        ):  # fmt: skip
            flat[:, position] = rest[name]
        return {name: column[:cut] for name, column in columns.items()}, flat.reshape(-1)


class Storages:
    """Numbers of storages: a view shares its base's, a version its predecessor's."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: dict[int, int] = {}  # addresses of tensors not made here, which outlive the block's own
        self._reach = NONE
        self._itemsize = NONE

    def _look(self, metas: list[TensorMeta]) -> None:
        if len(self._reach) != len(metas):
            self._reach = np.array([extent(one) for one in metas], dtype=np.int64)
            self._itemsize = np.array([one.itemsize for one in metas], dtype=np.int64)

    def spans(self, living: LiveValues) -> tuple[Numbers, Numbers]:
        """The first and last byte of each value in its storage."""
        first = living.offset * self._itemsize[living.meta]
        return first, first + np.maximum(self._reach[living.meta], 1) - 1

    def assign(
        self, living: LiveValues, first: int, known: Numbers, metas: list[TensorMeta]
    ) -> tuple[Numbers, Numbers]:
        """Storages and offsets of the values from row ``first`` on; returns storages and sizes to raise.

        ``known`` are the bytes of storages that were not made in the block: values and sizes, in order.
        """
        self._look(metas)
        ids, address = living.id[first:], living.address[first:]
        flags = living.flags[first:]
        before = np.where(flags & row.MOVED, -1, living.previous[first:])
        living.flags[first:] = flags & ~row.MOVED
        source_ids = np.where(living.base[first:] >= 0, living.base[first:], before)
        source = living.at(source_ids)
        source[source_ids < 0] = -1
        new = source < 0
        told = dense(known[0], ids)
        shared = np.flatnonzero(new & (address != 0) & (told >= 0))
        places, firsts, which = np.unique(address[shared], return_index=True, return_inverse=True)
        held = np.array([self._seen.get(place, -1) for place in places.tolist()], dtype=np.int64)
        new[shared] = False
        new[shared[firsts[held < 0]]] = True
        numbers = np.where(new, self.count + np.cumsum(new) - 1, -1)
        self.count += int(new.sum())
        held = np.where(held < 0, numbers[shared[firsts]], held)
        self._seen.update(zip(places.tolist(), held.tolist(), strict=True))
        numbers[shared] = held[which]
        self._follow(living, first, source, numbers)
        numbers = living.storage[first:]
        size = self._reach[living.meta[first:]] + living.offset[first:] * self._itemsize[living.meta[first:]]
        nbytes = np.where(told >= 0, known[1][told], 0) if len(known[1]) else 0
        return numbers, np.where(nbytes, nbytes, size)

    def _follow(self, living: LiveValues, first: int, source: Numbers, numbers: Numbers) -> None:
        """Views and versions have the storage of what they come from, and some its offset."""
        living.storage[first:] = numbers
        before = np.full(len(living), -1, dtype=np.int64)
        before[first:] = source
        living.storage = living.storage[chain_ends(before)]
        inherited = living.offset == row.INHERITED
        living.offset = living.offset[chain_ends(np.where(inherited, before, -1))]
        living.offset[inherited & (living.offset == row.INHERITED)] = 0


def inherit(living: LiveValues, first: int) -> None:
    """Versions from row ``first`` on are what the tensor was before, if that is something that lasts."""
    rows = np.flatnonzero((living.previous[first:] >= 0) & (living.kind[first:] == ACTIVATION)) + first
    before = np.full(len(living), -1, dtype=np.int64)
    before[rows] = living.at(living.previous[rows])
    kind = living.kind[chain_ends(before)]
    lasts = np.isin(kind, list(LASTING)) & (before >= 0)
    living.kind = np.where(lasts, kind, living.kind)
    living.name = living.name[chain_ends(np.where(lasts & (living.name < 0), before, -1))]


def earlier(living: LiveValues, at: int) -> Iterator[int]:
    """The rows of what a tensor was before, back to where it was seen first and nobody knew what it was."""
    while at >= 0 and living.previous[at] >= 0:
        at = int(living.at(living.previous[at : at + 1])[0])
        kind = int(living.kind[at]) if at >= 0 else -1
        if kind in LASTING:  # and so is all before it: a weight has as many versions as there were steps
            return
        if kind in _GIVEN:
            yield at


def extent(meta: TensorMeta) -> int:
    """Bytes from the first to the last element."""
    if meta.stride is None or 0 in meta.shape:
        return meta.nbytes
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=False))
    return (last + 1) * meta.itemsize


def floating(tables: Tables) -> Mask:
    """Which metadata are of numbers that can have a gradient."""
    return np.array([one.dtype.startswith(("float", "bfloat", "complex")) for one in tables.metas] or [False])


def relevant(learned: Iterable[Learned], end: int) -> tuple[list[Learned], list[Learned]]:
    """What was learned of values before ``end``, and of later ones."""
    now: list[Learned] = []
    later: list[Learned] = []
    for one in learned:
        (now if one.value < end else later).append(one)
    return now, later
