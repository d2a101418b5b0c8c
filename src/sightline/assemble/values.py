"""Values batch by batch: storages, kinds, names and allocations, for as long as a value may be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.assemble.batch import Tables
from sightline.data.arrays import EMPTY, IntArray, Mask, chain_ends, concatenate, positions_in
from sightline.data.trace_data import KIND, TensorMeta
from sightline.schema import streams
from sightline.schema.streams import MEMORY_WIDTH


class Allocations:
    """The allocations of storages: one that is freed becomes a row, one that is not waits.

    >>> allocations = Allocations()
    >>> rows = np.array([0, 64, 10, 1, 32, 11, 0, -1, 15])
    >>> [column.tolist() for column in allocations.add(rows, values=2, last=False).values()]
    [[0], [64], [10], [15]]
    >>> [column.tolist() for column in allocations.add(EMPTY, values=2, last=True).values()]
    [[1], [32], [11], [-1]]
    """

    def __init__(self) -> None:
        self._open = EMPTY

    def add(self, rows: IntArray, values: int, last: bool) -> dict[str, IntArray]:
        """The columns of the allocations that have ended; with ``last`` also of the others.

        Values from the id ``values`` on have no row yet, because the op that makes them is still running;
        after a kill they never get one.
        """
        events, ended, end = _with_ends(concatenate([self._open, rows]))
        is_size, is_written = events[:, 1] >= 0, events[:, 0] < values
        self._open = EMPTY if last else events[(is_size & ~ended) | ~is_written].reshape(-1)
        done = is_written & is_size & (ended | last)
        value, nbytes, start = events[done].T
        return {"value": value, "nbytes": nbytes, "start": start, "end": np.where(ended, end, -1)[done]}


def open_allocations(before: IntArray, rows: IntArray) -> IntArray:
    """The allocations that have not ended after more rows were written."""
    events, ended, _ = _with_ends(concatenate([before, rows]))
    return events[(events[:, 1] >= 0) & ~ended].reshape(-1)


def _with_ends(flat: IntArray) -> tuple[IntArray, Mask, IntArray]:
    """Rows sorted by storage; whether another row of the same storage follows, and its time."""
    rows = flat.reshape(-1, MEMORY_WIDTH)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ended = np.zeros(len(rows), dtype=bool)
    end = np.full(len(rows), -1, dtype=np.int64)
    if len(rows):
        ended[:-1] = rows[1:, 0] == rows[:-1, 0]
        end[:-1] = rows[1:, 2]
    return rows, ended, end


ACTIVATION: Final = KIND["activation"]
#: Kinds that a tensor keeps when it is changed in place: a weight stays one after the optimizer's step.
LASTING: Final = frozenset({KIND["parameter"], KIND["buffer"], KIND["state"]})
_FROM_OUTSIDE: Final = frozenset({KIND["input"], KIND["external"]})
#: The columns of `LiveValues`; ``maker`` is the aten op that first returned the value.
_COLUMNS: Final = (
    "id", "meta", "address", "offset", "kind", "producer", "previous", "base", "flags", "storage", "name",
    "maker", "maker_call", "maker_forward", "maker_forward_call",
)  # fmt: skip


class LiveValues:
    """Columns of the values that may be used again, sorted by id."""

    id: IntArray
    meta: IntArray
    address: IntArray
    offset: IntArray
    kind: IntArray
    producer: IntArray  #: the position of an op
    previous: IntArray  #: an id
    base: IntArray  #: an id
    flags: IntArray
    storage: IntArray
    name: IntArray
    maker: IntArray
    maker_call: IntArray
    maker_forward: IntArray
    maker_forward_call: IntArray

    def __init__(self) -> None:
        for name in _COLUMNS:
            setattr(self, name, EMPTY)

    def __len__(self) -> int:
        return len(self.id)

    def at(self, ids: IntArray) -> IntArray:
        """Rows of values by id; -1 for a value that is not live."""
        count = len(self.id)
        if not count or self.id[-1] - self.id[0] != count - 1:
            return positions_in(self.id, ids)
        rows = ids - self.id[0]  # ids are consecutive until the first value is forgotten
        return np.where((rows >= 0) & (rows < count), rows, -1)

    def extend(self, new: dict[str, IntArray]) -> int:
        """Add values with larger ids; returns the row of the first."""
        first, count = len(self.id), len(new["id"])
        for name in _COLUMNS:
            added = new.get(name)
            if added is None:
                added = np.full(count, -1, dtype=np.int64)
            setattr(self, name, np.concatenate([getattr(self, name), added]))
        return first

    def keep(self, mask: Mask) -> None:
        """Drop the other values."""
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[mask])


#: The columns of `LiveValues` that a value row has.
_ROW_COLUMNS: Final = {
    {"storage": "address"}.get(name, name): at for at, name in enumerate(streams.VALUE.names) if at
}


def value_rows(values: IntArray, fresh: IntArray) -> IntArray:
    """Every value as a row, sorted by id: those written in full, and the plain results of ops.

    >>> row = value_rows(EMPTY, np.array([7, 2, 5]))[0].tolist()
    >>> dict(zip(streams.VALUE.names, row))["producer"]
    5
    """
    full, plain = values.reshape(-1, streams.VALUE.width), fresh.reshape(-1, streams.FRESH_WIDTH)
    if (full[:, 0] != streams.VALUE.width).any():
        raise ValueError("a value row has a wrong length")
    rows = np.zeros((len(full) + len(plain), streams.VALUE.width), dtype=np.int64)
    rows[: len(full)], rest = full, rows[len(full) :]
    rest[:, 0], rest[:, streams.V_KIND] = streams.VALUE.width, ACTIVATION
    rest[:, [streams.V_PREVIOUS, streams.V_BASE]] = -1
    rest[:, [1, streams.V_META, streams.V_PRODUCER]] = plain
    return rows[np.argsort(rows[:, 1], kind="stable")]


def split_incoming(rows: IntArray, end: int, ops: IntArray) -> tuple[dict[str, IntArray], IntArray]:
    """The columns of the values before the first one that an op from ``end`` on makes; the rest as a stream.

    ``ops`` are the ids of the ops of this batch, some of which may come from ``end`` on.
    """
    producer = rows[:, streams.V_PRODUCER]
    later = np.flatnonzero(producer >= end)
    later = later[positions_in(ops, producer[later]) < 0]
    cut = int(later[0]) if len(later) else len(rows)
    columns = np.ascontiguousarray(rows[:cut].T)
    return {name: columns[at] for name, at in _ROW_COLUMNS.items()}, rows[cut:].reshape(-1)


class Storages:
    """Ids of storages: a view shares its base's, a version its predecessor's."""

    def __init__(self) -> None:
        self.count = 0
        self._by_address: dict[int, int] = {}  # of tensors made outside the block, which outlive it
        self._extent = EMPTY
        self._itemsize = EMPTY

    def spans(self, live: LiveValues) -> tuple[IntArray, IntArray]:
        """The first and last byte of each value in its storage."""
        first = live.offset * self._itemsize[live.meta]
        return first, first + np.maximum(self._extent[live.meta], 1) - 1

    def assign(
        self, live: LiveValues, first: int, sizes: IntArray, metas: list[TensorMeta]
    ) -> tuple[IntArray, IntArray]:
        """Set storages and offsets of the values from row ``first`` on; returns storages and their sizes.

        ``sizes`` are the bytes of storages that were not made in the block: values and sizes, in order.
        """
        if len(self._extent) != len(metas):
            self._extent = np.array([byte_extent(one) for one in metas], dtype=np.int64)
            self._itemsize = np.array([one.itemsize for one in metas], dtype=np.int64)
        ids, address = live.id[first:], live.address[first:]
        flags = live.flags[first:]
        previous = np.where(flags & streams.MOVED, -1, live.previous[first:])
        live.flags[first:] = flags & ~streams.MOVED
        source_ids = np.where(live.base[first:] >= 0, live.base[first:], previous)
        source = live.at(source_ids)
        source[source_ids < 0] = -1
        new = source < 0
        sized = positions_in(sizes[0], ids)
        outside = np.flatnonzero(new & (address != 0) & (sized >= 0))
        unique, firsts, which = np.unique(address[outside], return_index=True, return_inverse=True)
        shared = np.array([self._by_address.get(one, -1) for one in unique.tolist()], dtype=np.int64)
        new[outside] = False
        new[outside[firsts[shared < 0]]] = True
        storage = np.where(new, self.count + np.cumsum(new) - 1, -1)
        self.count += int(new.sum())
        shared = np.where(shared < 0, storage[outside[firsts]], shared)
        self._by_address.update(zip(unique.tolist(), shared.tolist(), strict=True))
        storage[outside] = shared[which]
        live.storage[first:] = storage
        before = np.full(len(live), -1, dtype=np.int64)
        before[first:] = source
        live.storage = live.storage[chain_ends(before)]
        inherited = live.offset == streams.INHERITED
        live.offset = live.offset[chain_ends(np.where(inherited, before, -1))]
        live.offset[inherited & (live.offset == streams.INHERITED)] = 0
        reach = self._extent[live.meta[first:]] + live.offset[first:] * self._itemsize[live.meta[first:]]
        nbytes = np.where(sized >= 0, sizes[1][sized], 0) if len(sizes[1]) else 0
        return live.storage[first:], np.where(nbytes, nbytes, reach)


def inherited(kind: IntArray, before: IntArray, unnamed: Mask) -> tuple[IntArray, IntArray]:
    """The kinds of values after their versions inherit, and for each row the row whose name it takes.

    A version of a parameter, a buffer or optimizer state is one too. ``before`` is the row of the version
    that each activation replaces, -1 for other values.
    """
    first_kind = kind[chain_ends(before)]
    lasts = np.isin(first_kind, list(LASTING)) & (before >= 0)
    return np.where(lasts, first_kind, kind), chain_ends(np.where(lasts & unnamed, before, -1))


def inherit_kinds(live: LiveValues, first: int) -> None:
    """Let the versions from row ``first`` on inherit kinds and names."""
    rows = np.flatnonzero((live.previous[first:] >= 0) & (live.kind[first:] == ACTIVATION)) + first
    before = np.full(len(live), -1, dtype=np.int64)
    before[rows] = live.at(live.previous[rows])
    live.kind, sources = inherited(live.kind, before, live.name < 0)
    live.name = live.name[sources]


def earlier_versions(live: LiveValues, at: int) -> Iterator[int]:
    """The rows of a tensor's earlier versions that came from outside and have no lasting kind yet."""
    while at >= 0 and live.previous[at] >= 0:
        at = int(live.at(live.previous[at : at + 1])[0])
        kind = int(live.kind[at]) if at >= 0 else -1
        if kind in LASTING:  # so are all before it: a weight has as many versions as there were steps
            return
        if kind in _FROM_OUTSIDE:
            yield at


def byte_extent(meta: TensorMeta) -> int:
    """Bytes from the first to the last element."""
    if meta.stride is None or 0 in meta.shape:
        return meta.nbytes
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=False))
    return (last + 1) * meta.itemsize


def floating_metas(tables: Tables) -> Mask:
    """A mask of the tensor metadata whose dtype can have a gradient."""
    return np.array([one.dtype.startswith(("float", "bfloat", "complex")) for one in tables.metas] or [False])
