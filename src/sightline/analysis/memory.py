"""The peak of a run's memory, and the tensors held then: by kind, module and line, and one by one.

A storage counts from when it is first seen until torch frees it. Recordings of an earlier version, or without
ops, do not know when that was: there the last use counts, and `MemoryUsage.exact` is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sightline.analysis import lifetimes
from sightline.analysis.held_memory import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATE,
    USES,
    HeldMemory,
    Peak,
    held_memory,
    memory_rows,
    storage_roots,
)
from sightline.analysis.op_text import api_call_of, short_name
from sightline.analysis.select import Selection
from sightline.data.index import Index, Op, Value
from sightline.data.trace_data import I64, PHASES
from sightline.data.user_frames import user_frame
from sightline.patterns import path_matches

Mask = NDArray[np.bool_]
_BACKWARD = PHASES.index("backward")
_LASTING = (PARAMETERS, BUFFERS, GRADIENTS, STATE)
#: The index into ``held_memory.USES`` of each of ``lifetimes.USES``.
_USE_INDEX = {
    "parameters": PARAMETERS, "buffers": BUFFERS, "state": STATE, "activations": ACTIVATIONS,
    "gradients": OTHER, "other": OTHER,
}  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A part of the memory that is held."""

    name: str
    nbytes: int
    count: int  #: of tensors


@dataclass(frozen=True)
class PeakTensor:
    """A tensor that is held at the peak."""

    value: Value | None
    name: str
    nbytes: int
    use: str
    start: int
    end: int  #: when it is freed; after the end of the recording where it is not
    why: str  #: the reason that it is alive; empty where that is unknown
    for_op: Op | None = None  #: the op that ``why`` names


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of a run on one device, and its peak.

    Only ``rows`` are counted; the peak is the result of an op in ``among``, where that is given.
    """

    index: Index
    held: HeldMemory
    device: str
    rows: Mask
    among: Mask | None

    @property
    def exact(self) -> bool:
        """Whether the recording knows when storages were freed."""
        return self.held.exact

    @cached_property
    def peak(self) -> Peak:
        """The moment at which the most memory is held."""
        return self.held.peak(self.device, self.rows, self.among)

    @property
    def peak_op(self) -> Op | None:
        """The op whose result made the peak."""
        return self._producer(self.peak.value)

    @cached_property
    def at_peak(self) -> NDArray[np.int64]:
        """The rows that are held at the peak, the largest first."""
        now = np.flatnonzero(self.held.at(self.peak.moment) & self.rows & (self.held.device == self.device))
        return now[np.argsort(-self.held.nbytes[now], kind="stable")]

    def curve(self, columns: int) -> tuple[I64, int]:
        """The most that is held in each of ``columns`` equal intervals of the run, and the run's length."""
        moments, levels = self.held.level(self.device, self.rows)
        duration = max(self.held.over, 1)
        edges = np.linspace(0, duration, columns + 1)
        maxima = np.zeros(columns, dtype=np.int64)
        if len(moments):
            before = np.searchsorted(moments, edges[:-1], side="right") - 1
            maxima = np.where(before >= 0, levels[before], 0)
            inside = (moments >= 0) & (moments < duration)
            column = np.minimum(np.searchsorted(edges, moments[inside], side="right") - 1, columns - 1)
            np.maximum.at(maxima, column, levels[inside])
        return maxima, duration

    def held_before(self) -> int:
        """Bytes of tensors that no recorded op produced: they existed before the block."""
        producers = _producers(self.index, self.held)
        return int(self.held.nbytes[(self.held.device == self.device) & (producers < 0)].sum())

    # -- shares ------------------------------------------------------------------------------------------

    def by_kind(self) -> list[Share]:
        """The peak by use; empty ones are left out."""
        return self._shares([USES[use] for use in self.held.use[self.at_peak].tolist()], in_order=USES)

    def by_module(self, depth: int | None = None) -> list[Share]:
        """The peak by the module that produced a tensor or owns its parameter; the largest first."""
        names = []
        for row in self.at_peak.tolist():
            value = self._value(row)
            path = self.owner(row) if self.held.use[row] in _LASTING else None
            if path is None and value is not None and value.module is not None:
                path = value.module.path or value.module.label
            if path is not None and depth is not None:
                path = ".".join(path.split(".")[: max(depth, 1)])
            names.append("outside modules" if path is None else path)
        return self._shares(names)

    def by_line(self) -> list[Share]:
        """The peak by the source line that produced a tensor; the largest first."""
        names = []
        for op in map(self._producer, self.held.value[self.at_peak].tolist()):
            frame = user_frame(op) if op is not None else None
            if op is None:
                names.append("before the block, or by no op")
            else:
                names.append(f"{frame.position} in {frame.function}" if frame is not None else short_name(op))
        return self._shares(names)

    def largest(self, count: int) -> list[PeakTensor]:
        """The largest tensors at the peak, and why each is still alive."""
        held, rows = self.held, self.at_peak[:count].tolist()
        later_readers = self._later_readers({int(held.storage[row]) for row in rows} - {-1})
        tensors = []
        for row in rows:
            why, op = "", None
            readers = later_readers.get(int(held.storage[row]), [])
            producer = self._producer(int(held.value[row]))
            if held.use[row] not in _LASTING:
                saved = [at for at in readers if self.index.raw.ops.phase[at] == _BACKWARD]
                if saved and (producer is None or producer.phase != "backward"):
                    forward = Op(self.index, saved[0]).forward
                    why, op = "for backward of", None if forward is None else api_call_of(forward)
                elif readers:
                    why, op = "read by", api_call_of(Op(self.index, readers[0]))
                elif held.end[row] >= held.over:
                    why = "held to the end"
                elif held.exact:
                    why = "not read again"
            tensor = PeakTensor(
                self._value(row), self.name_of(row), int(held.nbytes[row]), USES[held.use[row]],
                int(held.start[row]), int(held.end[row]), why, op,
            )  # fmt: skip
            tensors.append(tensor)
        return tensors

    def _shares(self, names: Sequence[str], in_order: Sequence[str] = ()) -> list[Share]:
        sizes: dict[str, list[int]] = {}
        for name, nbytes in zip(names, self.held.nbytes[self.at_peak].tolist(), strict=True):
            sizes.setdefault(name, []).append(nbytes)
        shares = [Share(name, sum(group), len(group)) for name, group in sizes.items()]
        if in_order:
            return sorted(shares, key=lambda share: in_order.index(share.name))
        return sorted(shares, key=lambda share: -share.nbytes)

    def _value(self, row: int) -> Value | None:
        id = int(self.held.value[row])
        return None if id < 0 else Value(self.index, id)

    def _producer(self, value: int) -> Op | None:
        return None if value < 0 else Value(self.index, value).producer

    @cached_property
    def _names(self) -> dict[int, str]:
        """The names of parameters, gradients and optimizer state by their storages."""
        values = self.index.raw.values
        named = np.flatnonzero((values.name >= 0) & (values.storage >= 0))
        storages = storage_roots(self.index.raw)[values.storage[named]]
        names = self.index.raw.names
        return {
            storage: names[name]
            for storage, name in zip(storages.tolist(), values.name[named].tolist(), strict=True)
        }

    @cached_property
    def _owners(self) -> dict[str, str]:
        return {
            parameter.path: module.label
            for module in self.index.raw.modules
            for parameter in module.parameters
        }

    def name_of(self, row: int) -> str:
        """The name of a parameter, gradient or optimizer state; empty for tensors without one."""
        value = self._value(row)
        own = "" if value is None else value.name
        return self._names.get(int(self.held.storage[row]), own) if self.held.use[row] in _LASTING else own

    def owner(self, row: int) -> str | None:
        """The module of a parameter, or of the parameter that a gradient or state belongs to."""
        name = self.name_of(row)
        while name:
            if name in self._owners:
                return self._owners[name]
            name = name.rpartition(".")[0]
        return None

    # -- lifetimes ---------------------------------------------------------------------------------------

    def _later_readers(self, storages: set[int]) -> dict[int, list[int]]:
        """The ops at the peak and after it that read these storages, in order."""
        raw = self.index.raw
        ops = raw.ops
        roots = storage_roots(raw)
        read = raw.values.storage[ops.inputs]
        read = np.where(read >= 0, roots[read], -1) if len(roots) else read
        leaf = ops.level == 1 if (ops.level == 1).any() else np.ones(len(ops), dtype=bool)
        reader = np.repeat(np.arange(len(ops)), np.diff(ops.input_offsets))
        now = -1 if self.peak_op is None else self.peak_op.id
        chosen = np.isin(read, list(storages)) & (reader >= now) & leaf[reader]
        readers: dict[int, list[int]] = {}
        for storage, op in zip(read[chosen].tolist(), reader[chosen].tolist(), strict=True):
            readers.setdefault(storage, []).append(op)
        return readers


def usage_of(
    index: Index, module: str | None = None, phase: str | None = None, depth: int | None = None
) -> list[MemoryUsage]:
    """The memory of a run on each of its devices, the one with the highest peak first.

    Counts only tensors that ``module`` produced or owns; the peak is that of ``phase``.
    """
    Selection(phase=phase, depth=depth)  # raises if one of them is wrong
    held = memory_of(index)
    rows = np.ones(len(held), dtype=bool)
    among = None
    producers = _producers(index, held)
    if module is not None:
        # Of the memory that lasts, the rows that belong to the module: parameters, gradients, state.
        whole = MemoryUsage(index, held, "", rows, None)
        is_root = any(not info.path and info.type == module for info in index.raw.modules)
        owned = np.isin(held.use, _LASTING)
        for row in np.flatnonzero(owned).tolist():
            owned[row] = is_root or path_matches(module, whole.owner(row) or "")
        ops = np.append(Selection(module=module).ops(index), False)
        rows = ops[producers] | owned
    if phase is not None:
        among = np.append(Selection(phase=phase).ops(index), False)[producers]
    return [
        MemoryUsage(index, held, device, rows & (held.device == device), among) for device in held.devices
    ]


def memory_of(index: Index) -> HeldMemory:
    """The memory that was held: until it was freed, where that is known, else until its last use."""
    raw = index.raw
    if len(raw.allocations):
        return held_memory(raw)
    spans = lifetimes.lifetimes(raw)
    rows = np.flatnonzero((spans.first >= 0) & (spans.bytes > 0))
    first_value = np.full(len(raw.storages), -1, dtype=np.int32)
    with_storage = np.flatnonzero(raw.values.storage >= 0)[::-1]
    first_value[raw.values.storage[with_storage]] = with_storage
    uses = np.array([_USE_INDEX[name] for name in lifetimes.USES], dtype=np.int8)
    devices = np.array([*(meta.device for meta in raw.metas), "cpu"], dtype=object)
    ends = np.where(spans.use[rows] < lifetimes.TEMPORARY, -1, spans.last[rows])
    return memory_rows(
        raw, first_value[rows], spans.bytes[rows], spans.first[rows], ends, uses[spans.use[rows]],
        devices[spans.meta[rows]], rows, exact=False,
    )  # fmt: skip


def _producers(index: Index, held: HeldMemory) -> I64:
    """The op that produced each row of held memory, or -1."""
    producers = np.append(index.raw.values.producer, -1)  # value -1 reads the appended entry
    return producers[held.value].astype(np.int64)
