"""How long each storage was held, and the bytes that were held over time.

A storage counts from the first op that has it until torch frees it. Where a recording does not say when that
was, it counts to the end of the last op that has it: what the run needed, and never more than what it held.
Parameters and buffers count all the time, optimizer state from its first op to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.trace.data import I8, I32, I64, KINDS, TraceData

#: What the bytes are for. Each kind of value counts as one of these.
USES: Final = ("parameters", "state", "activations", "gradients", "other")
#: Nanoseconds: 26 days. Twice as much still has a microsecond with three exact digits behind the point.
LONGEST: Final = 1 << 51
_PASSING: Final = 2  #: the uses before it last to the end
_USE_OF: Final = {"parameter": 0, "buffer": 0, "state": 1, "activation": 2, "gradient": 3}


@dataclass(frozen=True)
class Lifetimes:
    """One row per storage. Times are ns since the recording began; a storage no op had has -1."""

    bytes: I64
    use: I8  #: into ``USES``
    meta: I32  #: that of its first value, -1 for a storage without one
    first: I64
    last: I64


def clock(times: I64) -> I64:
    """Times as they can be: a damaged recording may hold any number, and sums of them must not overflow.

    >>> clock(np.array([-5, 7])).tolist()
    [0, 7]
    """
    return np.clip(times, 0, LONGEST)


def lifetimes(data: TraceData) -> Lifetimes:
    """When each storage of a recording was in use."""
    ops, values, count = data.ops, data.values, len(data.storages)
    kind = np.full(count, KINDS.index("external"), dtype=np.int8)
    meta = np.full(count, -1, dtype=np.int32)
    held = np.flatnonzero(values.storage >= 0)[::-1]  # reversed: of several values the first one stays
    kind[values.storage[held]] = values.kind[held]
    meta[values.storage[held]] = values.meta[held]
    kept = held[values.kind[held] == KINDS.index("state")]  # made by an op, known as state by a later version
    kind[values.storage[kept]] = values.kind[kept]
    use = np.array([_USE_OF.get(name, len(USES) - 1) for name in KINDS], dtype=np.int8)[kind]
    first = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    last = np.full(count, -1, dtype=np.int64)
    start = clock(ops.start)
    end = start + clock(ops.duration)
    for offsets, flat in ((ops.input_offsets, ops.inputs), (ops.output_offsets, ops.outputs)):
        storage = values.storage[flat]
        users = np.repeat(np.arange(len(ops), dtype=np.int32), np.diff(offsets))
        known = storage >= 0
        np.minimum.at(first, storage[known], start[users[known]])
        np.maximum.at(last, storage[known], end[users[known]])
    first[last < 0] = -1
    over = int(end.max(initial=0))
    used = first >= 0
    last = np.where(used, np.maximum(last, _freed(data, over)), last)
    last[used & (use < _PASSING)] = over
    first[used & (use == 0)] = 0
    return Lifetimes(data.storages, use, meta, first, last)


def _freed(data: TraceData, over: int) -> I64:
    """When each storage was freed, or the end of the recording; -1 where nothing is known of that."""
    found = np.full(len(data.storages), -1, dtype=np.int64)
    rows = data.allocations
    known = rows.value >= 0
    storage = data.values.storage[rows.value[known]]
    end = np.where(rows.end[known] < 0, over, np.minimum(clock(rows.end[known]), over))
    np.maximum.at(found, storage[storage >= 0], end[storage >= 0])
    return found


@dataclass(frozen=True)
class Level:
    """Bytes in use on one device: from each moment on, a row of ``bytes`` with a column per use."""

    device: str
    times: I64
    bytes: I64  #: moments × ``USES``


def memory_levels(data: TraceData) -> Iterator[Level]:
    """The bytes in use on each device, at every moment they change."""
    known = lifetimes(data)
    devices = np.array([*(meta.device for meta in data.metas), "cpu"], dtype=object)
    counted = (known.first >= 0) & (known.bytes > 0)
    for device in sorted(set(devices[known.meta[counted]].tolist())):
        on_it = np.zeros(len(devices), dtype=bool)
        on_it[[at for at, name in enumerate(devices) if name == device]] = True
        chosen = counted & on_it[known.meta]
        yield _level(device, known, chosen)


def _level(device: str, known: Lifetimes, chosen: NDArray[np.bool_]) -> Level:
    size = known.bytes[chosen]
    use = known.use[chosen]
    passing = use >= _PASSING  # what stays is still there when the recording ends
    times = np.concatenate([known.first[chosen], known.last[chosen][passing]])
    moments, at = np.unique(times, return_inverse=True)
    change = np.zeros((len(moments), len(USES)), dtype=np.int64)
    np.add.at(change, (at[: len(size)], use), size)
    np.add.at(change, (at[len(size) :], use[passing]), -size[passing])
    altered = change.any(axis=1)
    return Level(device, moments[altered], np.cumsum(change, axis=0)[altered])


__all__ = ["LONGEST", "USES", "Level", "Lifetimes", "clock", "lifetimes", "memory_levels"]
