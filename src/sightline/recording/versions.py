"""Who sees a change made in place: versions of the tensors that share the changed memory.

While recording, an in-place op makes a new version of the tensor it was called on. Its views and its base
show the change too; their new versions are worked out here, where all storages are known, and only for
those that are read again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sightline.trace.data import TensorMeta

Numbers = NDArray[np.int64]


@dataclass
class NewVersions:
    """Values to add: what each looks like, what it replaces, and the op that changed it."""

    like: list[int] = field(default_factory=list)
    previous: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)


def alias_versions(
    mutating: NDArray[np.bool_],
    input_starts: Numbers,
    inputs: Numbers,
    output_starts: Numbers,
    outputs: Numbers,
    storage: Numbers,
    producer: Numbers,
    previous: Numbers,
    spans: tuple[Numbers, Numbers],
) -> NewVersions:
    """Replace, in ``inputs``, every value whose memory was changed through another one since it was made.

    ``spans`` are the first and last byte of each value in its storage: parts that do not touch do not
    see each other's changes.
    """
    made = NewVersions()
    count = len(storage)
    changed: dict[int, list[tuple[int, int]]] = {}  # storage -> (op, version) in order
    touched = {int(storage[value]) for op in np.flatnonzero(mutating).tolist()
               for value in outputs[output_starts[op] : output_starts[op + 1]].tolist()}  # fmt: skip
    touched.discard(-1)
    current: dict[int, tuple[int, int]] = {}  # value as written -> (value now, op it is good since)
    first, last = spans
    affected = np.isin(storage, list(touched))
    readers = np.repeat(np.arange(len(mutating)), np.diff(input_starts))
    hit = np.flatnonzero(affected[inputs])
    events = sorted([*((int(readers[at]), 0, at) for at in hit.tolist()),
                     *((op, 1, op) for op in np.flatnonzero(mutating).tolist())])  # fmt: skip
    for op, is_write, at in events:
        if is_write:
            for value in outputs[output_starts[op] : output_starts[op + 1]].tolist():
                if previous[value] >= 0 and producer[value] == op:
                    changed.setdefault(int(storage[value]), []).append((op, value))
            continue
        value = int(inputs[at])
        now, since = current.get(value, (value, int(producer[value])))
        for writer, version in reversed(changed.get(int(storage[value]), ())):
            if writer <= since:
                break
            if first[version] <= last[value] and first[value] <= last[version]:
                made.like.append(value)
                made.previous.append(now)
                made.base.append(version)
                made.producer.append(writer)
                now, since = count + len(made.like) - 1, writer
                current[value] = (now, since)
                break
        inputs[at] = now
    return made


def spans_of(meta: Numbers, offset: Numbers, metas: list[TensorMeta]) -> tuple[Numbers, Numbers]:
    """The first and last element of each value, in bytes from the start of its storage."""
    size = np.array([one.itemsize for one in metas] or [1], dtype=np.int64)
    reach = np.array([extent(one) for one in metas] or [0], dtype=np.int64)
    first = offset * size[meta]
    return first, first + np.maximum(reach[meta], 1) - 1


def extent(meta: TensorMeta) -> int:
    """Bytes from the first to the last element."""
    if meta.stride is None or 0 in meta.shape:
        return meta.nbytes
    last = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride, strict=False))
    return (last + 1) * meta.itemsize
