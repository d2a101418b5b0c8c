"""The allocations of a recording, with the use of each.

They are the base of the memory view and of the note of an out-of-memory error. Sizes are those of the
allocator, which on a CUDA device rounds up to 512 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.arrays import chain_ends
from sightline.data.trace_data import I8, I32, I64, KIND, TraceData

#: The uses of memory.
USES: Final = ("parameters", "buffers", "gradients", "optimizer state", "activations", "other")
PARAMETERS, BUFFERS, GRADIENTS, STATE, ACTIVATIONS, OTHER = range(len(USES))
_CUDA_PIECE: Final = 512
#: Sizes and times of a damaged file are clipped so that sums do not overflow.
_LARGEST: Final = 1 << 48
_LATEST: Final = 1 << 51
#: Ops whose result is a view of their input although their schema does not say so.
_SHARING: Final = ("_unsafe_view", "_unsafe_view.default")


@dataclass(frozen=True)
class HeldMemory:
    """A row for each allocation, from its start until it was freed.

    ``start`` and ``end`` are ns since the recording began. Memory allocated earlier starts at 0, memory that
    was never freed ends after everything else, at ``over``.
    """

    value: I32  #: the first value in it; -1 if unknown
    nbytes: I64
    start: I64
    end: I64
    use: I8  #: into ``USES``
    device: NDArray[Any]  #: texts
    storage: I32  #: the id of its storage, -1 if unknown; see `storage_roots`
    over: int
    exact: bool  #: whether the ends are when storages were freed; else they are the last uses

    def __len__(self) -> int:
        return len(self.value)

    def at(self, moment: int) -> NDArray[np.bool_]:
        """Which rows are allocated at a moment."""
        allocated: NDArray[np.bool_] = (self.start <= moment) & (moment < self.end)
        return allocated

    @cached_property
    def devices(self) -> list[str]:
        """The devices, the one with the highest peak first."""
        sizes = {name: self.peak(name).nbytes for name in sorted(set(self.device.tolist()))}
        return sorted(sizes, key=lambda name: -sizes[name])

    def level(self, device: str, rows: NDArray[np.bool_] | None = None) -> tuple[I64, I64]:
        """The moments at which the memory of a device changes, and the bytes from each on."""
        chosen = self.device == device
        if rows is not None:
            chosen &= rows
        start, end, size = self.start[chosen], self.end[chosen], self.nbytes[chosen]
        moments, at = np.unique(np.concatenate([start, end]), return_inverse=True)
        change = np.zeros(len(moments), dtype=np.int64)
        np.add.at(change, at, np.concatenate([size, -size]))
        return moments, np.cumsum(change)

    def peak(self, device: str, rows: NDArray[np.bool_] | None = None,
             among: NDArray[np.bool_] | None = None) -> Peak:  # fmt: skip
        """The first moment with the most memory; with ``among`` only starts of these rows count."""
        moments, levels = self.level(device, rows)
        if not len(moments):
            return Peak(0, 0, -1)
        if among is not None:
            levels = np.where(np.isin(moments, self.start[among & (self.device == device)]), levels, -1)
        best = int(levels.argmax())
        moment = int(moments[best])
        began = np.flatnonzero((self.start == moment) & (self.device == device))
        return Peak(moment, int(max(levels[best], 0)), int(self.value[began[-1]]) if len(began) else -1)


@dataclass(frozen=True)
class Peak:
    """The moment with the most memory, and the value whose allocation reached it."""

    moment: int
    nbytes: int
    value: int


def held_memory(data: TraceData) -> HeldMemory:
    """The allocations of a recording; empty for a recording without any."""
    rows, values = data.allocations, data.values
    value = rows.value
    known = value >= 0
    roots = storage_roots(data)
    storage = np.where(known, values.storage[value], -1) if len(values) else np.full(len(value), -1)
    storage = np.where(storage >= 0, roots[storage], -1) if len(roots) else storage
    use = np.full(len(value), OTHER, dtype=np.int8)
    device = np.full(len(value), "cpu", dtype=object)
    if len(values) and len(value):
        by_storage = storage_uses(data, roots)
        use[storage >= 0] = by_storage[storage[storage >= 0]]
        names = np.array([meta.device for meta in data.metas], dtype=object)
        device[known] = names[values.meta[value[known]]]
    start = np.clip(rows.start, 0, _LATEST)
    if len(values):
        lasting = (use != ACTIVATIONS) & (use != OTHER) & known & (values.producer[value] < 0)
        start[lasting] = 0
    return memory_rows(data, value, rows.nbytes, start, rows.end, use, device, storage, exact=True)


def memory_rows(
    data: TraceData, value: I32, nbytes: I64, start: I64, end: I64, use: I8, device: NDArray[Any],
    storage: NDArray[Any], *, exact: bool,
) -> HeldMemory:  # fmt: skip
    """Rows with the sizes of the allocator; an end of -1 becomes the end of the recording."""
    ended = np.clip(end, -1, _LATEST)
    duration = min(int(data.info.get("duration_ns") or 0), _LATEST)
    over = 1 + max(duration, int(ended.max(initial=0)), int(start.max(initial=0)))
    size = np.clip(nbytes, 0, _LARGEST)
    on_cuda = np.array([name.startswith("cuda") for name in device.tolist()], dtype=bool)
    size = np.where(on_cuda, -(-size // _CUDA_PIECE) * _CUDA_PIECE, size)
    return HeldMemory(
        value, size, start, np.where(ended < 0, over, np.maximum(ended, start)), use, device,
        storage.astype(np.int32), over, exact,
    )  # fmt: skip


def storage_roots(data: TraceData) -> I64:
    """For each storage the one whose memory it uses: itself, except for results of undeclared views."""
    count = len(data.storages)
    names = [number for number, name in enumerate(data.names) if name in _SHARING]
    before = np.full(count, -1, dtype=np.int64)
    ops, values = data.ops, data.values
    for op in np.flatnonzero(np.isin(ops.name, names)).tolist() if names else ():
        inputs = ops.inputs[ops.input_offsets[op] : ops.input_offsets[op + 1]]
        outputs = ops.outputs[ops.output_offsets[op] : ops.output_offsets[op + 1]]
        if len(inputs) and len(outputs):
            shared, own = int(values.storage[inputs[0]]), int(values.storage[outputs[0]])
            if 0 <= shared < own:
                before[own] = shared
    return chain_ends(before)


def storage_uses(data: TraceData, roots: I64) -> I8:
    """The use of each storage, from the kinds of the values in it; the last rule that fits counts."""
    values = data.values
    use = np.full(len(data.storages), OTHER, dtype=np.int8)
    has = np.flatnonzero(values.storage >= 0)
    at = roots[values.storage[has]]
    kind = values.kind[has]
    first = np.full(len(use), -1, dtype=np.int64)
    first[at[::-1]] = has[::-1]
    used = first >= 0
    use[used] = np.where(values.kind[first[used]] == KIND["activation"], ACTIVATIONS, OTHER)
    named = np.array([name.endswith(".grad") for name in data.names] or [False])
    is_grad = (kind == KIND["gradient"]) & (values.name[has] >= 0) & named[values.name[has]]
    for chosen, number in (
        (is_grad, GRADIENTS), (kind == KIND["state"], STATE),
        (kind == KIND["buffer"], BUFFERS), (kind == KIND["parameter"], PARAMETERS),
    ):  # fmt: skip
        use[at[chosen]] = number
    return use
