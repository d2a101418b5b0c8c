"""How long each storage was in use, and the bytes in use over time.

A storage counts from the first op that uses it until torch frees it. Where a recording does not know when
that was, it counts to the end of the last op that uses it: a lower bound. Parameters and buffers count all
the time, optimizer state from its first op to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sightline.data.trace_data import I8, I32, I64, KINDS, TraceData

#: The uses of bytes. Each kind of value counts as one of these.
USES: Final = ("parameters", "buffers", "state", "activations", "gradients", "other")
#: Nanoseconds: 26 days. Twice as much, in microseconds, still has three exact decimals as a float.
LONGEST: Final = 1 << 51
TEMPORARY: Final = 3  #: index of the first use that does not last to the end
_USE_OF: Final = {"parameter": 0, "buffer": 1, "state": 2, "activation": 3, "gradient": 4}


@dataclass(frozen=True)
class Lifetimes:
    """One row per storage. Times are ns since the recording began; -1 for a storage no op used."""

    bytes: I64
    use: I8  #: into ``USES``
    meta: I32  #: that of its first value, -1 for a storage without one
    first: I64
    last: I64


def clock(times: I64) -> I64:
    """Times within their limits: a damaged recording may hold any number, and sums must not overflow.

    >>> clock(np.array([-5, 7])).tolist()
    [0, 7]
    """
    return np.clip(times, 0, LONGEST)


def lifetimes(data: TraceData) -> Lifetimes:
    """When each storage of a recording was in use."""
    ops, values, count = data.ops, data.values, len(data.storages)
    kind = np.full(count, KINDS.index("external"), dtype=np.int8)
    meta = np.full(count, -1, dtype=np.int32)
    ids = np.flatnonzero(values.storage >= 0)[::-1]  # reversed: the first value of a storage wins
    kind[values.storage[ids]] = values.kind[ids]
    meta[values.storage[ids]] = values.meta[ids]
    states = ids[values.kind[ids] == KINDS.index("state")]  # only a later version may be known as state
    kind[values.storage[states]] = values.kind[states]
    use = np.array([_USE_OF.get(name, len(USES) - 1) for name in KINDS], dtype=np.int8)[kind]
    first = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    last = np.full(count, -1, dtype=np.int64)
    start = clock(ops.start)
    end = start + clock(ops.duration)
    for offsets, flat in ((ops.input_offsets, ops.inputs), (ops.output_offsets, ops.outputs)):
        storage = values.storage[flat]
        users = np.repeat(np.arange(len(ops), dtype=np.int32), np.diff(offsets))
        has_storage = storage >= 0
        np.minimum.at(first, storage[has_storage], start[users[has_storage]])
        np.maximum.at(last, storage[has_storage], end[users[has_storage]])
    first[last < 0] = -1
    end_of_run = int(end.max(initial=0))
    used = first >= 0
    rows = data.allocations  # when each storage was freed, or the end of the run; -1 where it is unknown
    has_value = rows.value >= 0
    storage, ended = values.storage[rows.value[has_value]], rows.end[has_value]
    ended = np.where(ended < 0, end_of_run, np.minimum(clock(ended), end_of_run))
    freed = np.full(count, -1, dtype=np.int64)
    np.maximum.at(freed, storage[storage >= 0], ended[storage >= 0])
    last = np.where(used, np.maximum(last, freed), last)
    last[used & (use < TEMPORARY)] = end_of_run
    first[used & (use == 0)] = 0
    return Lifetimes(data.storages, use, meta, first, last)


@dataclass(frozen=True)
class Level:
    """Bytes in use on one device: a row of ``bytes`` for each time they change, with a column per use."""

    device: str
    times: I64
    bytes: I64  #: moments × ``USES``


def memory_levels(data: TraceData) -> Iterator[Level]:
    """The bytes in use on each device, at every moment they change."""
    rows = lifetimes(data)
    devices = np.array([*(meta.device for meta in data.metas), "cpu"], dtype=object)
    counted = (rows.first >= 0) & (rows.bytes > 0)
    for device in sorted(set(devices[rows.meta[counted]].tolist())):
        chosen = counted & (devices == device)[rows.meta]
        size, use = rows.bytes[chosen], rows.use[chosen]
        temporary = use >= TEMPORARY  # the others are in use until the recording ends
        times = np.concatenate([rows.first[chosen], rows.last[chosen][temporary]])
        moments, at = np.unique(times, return_inverse=True)
        change = np.zeros((len(moments), len(USES)), dtype=np.int64)
        np.add.at(change, (at[: len(size)], use), size)
        np.add.at(change, (at[len(size) :], use[temporary]), -size[temporary])
        changed = change.any(axis=1)
        yield Level(device, moments[changed], np.cumsum(change, axis=0)[changed])
