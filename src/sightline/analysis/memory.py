"""The peak of a run's memory, and who holds it then: by kind, module and line, and tensor by tensor.

A storage counts from when it is first seen until torch frees it. What a recording of an earlier version, or
one without ops, does not know of frees is reckoned from last uses, and `Usage.exact` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sightline.analysis import lifetimes as used
from sightline.analysis.select import Selection
from sightline.patterns import path_matches
from sightline.trace.data import I64, PHASES
from sightline.trace.held_memory import (
    GRADIENTS,
    PARAMETERS,
    STATE,
    USES,
    HeldMemory,
    Peak,
    held_memory,
    made_of,
    storage_roots,
)
from sightline.trace.index import Index, Op, Value
from sightline.trace.user_frames import api_call_of, short_name, user_frame

Mask = NDArray[np.bool_]
_BACKWARD = PHASES.index("backward")
_LASTING = (PARAMETERS, GRADIENTS, STATE)
#: What a use of storages counts as where only last uses are known.
_LIKE = {"parameters": 0, "state": 2, "activations": 3, "gradients": 4, "other": 4}


@dataclass(frozen=True)
class Share:
    """A part of what is held."""

    name: str
    nbytes: int
    count: int  #: of pieces


@dataclass(frozen=True)
class Held:
    """A tensor that is held at the peak."""

    value: Value | None
    name: str
    nbytes: int
    use: str
    start: int
    end: int  #: when it is freed; after the end of the recording where it is not
    why: str  #: what keeps it; empty where nothing is known
    for_op: Op | None = None  #: the op that ``why`` names


@dataclass(frozen=True)
class Usage:
    """The memory of a run on one device, and its peak.

    ``module`` and ``phase`` choose: only what these modules made or own, the peak while this phase ran.
    """

    index: Index
    held: HeldMemory
    device: str
    rows: Mask
    among: Mask | None

    @property
    def exact(self) -> bool:
        """Whether it is known when storages were freed."""
        return self.held.exact

    @cached_property
    def peak(self) -> Peak:
        """The moment at which most is held."""
        return self.held.peak(self.device, self.rows, self.among)

    @property
    def peak_op(self) -> Op | None:
        """The op that made it so much."""
        return self._maker(self.peak.value)

    @cached_property
    def at_peak(self) -> NDArray[np.int64]:
        """The rows that are held then, the largest first."""
        now = np.flatnonzero(self.held.at(self.peak.moment) & self.rows & (self.held.device == self.device))
        return now[np.argsort(-self.held.nbytes[now], kind="stable")]

    def curve(self, columns: int) -> tuple[I64, int]:
        """The most that is held in each of so many equal stretches of the run, and how long all are."""
        moments, levels = self.held.level(self.device, self.rows)
        over = max(self.held.over, 1)
        edges = np.linspace(0, over, columns + 1)
        most = np.zeros(columns, dtype=np.int64)
        if len(moments):
            before = np.searchsorted(moments, edges[:-1], side="right") - 1
            most = np.where(before >= 0, levels[before], 0)
            inside = (moments >= 0) & (moments < over)
            column = np.minimum(np.searchsorted(edges, moments[inside], side="right") - 1, columns - 1)
            np.maximum.at(most, column, levels[inside])
        return most, over

    def held_before(self) -> int:
        """Bytes of what no recorded op made: it was there before the block, as far as it was seen."""
        values = self.index.raw.values
        mine = self.held.device == self.device
        made = np.where(self.held.value >= 0, values.producer[self.held.value], -1) if len(values) else -1
        return int(self.held.nbytes[mine & (made < 0)].sum())

    # -- who holds it ------------------------------------------------------------------------------------

    def by_kind(self) -> list[Share]:
        """What it is for; kinds of which nothing is held are left out."""
        return self._shares([USES[use] for use in self.held.use[self.at_peak].tolist()], in_order=USES)

    def by_module(self, depth: int | None = None) -> list[Share]:
        """Which modules made it, or own the parameters it is of; the largest first."""
        return self._shares([self._module(row, depth) for row in self.at_peak.tolist()])

    def by_line(self) -> list[Share]:
        """Which lines made it; the largest first."""
        return self._shares([self._line(row) for row in self.at_peak.tolist()])

    def largest(self, count: int) -> list[Held]:
        """The largest tensors, what made them, and what keeps them."""
        rows = self.at_peak[:count].tolist()
        readers = self._later_readers({int(self.held.storage[row]) for row in rows} - {-1})
        return [self._told(row, readers.get(int(self.held.storage[row]), [])) for row in rows]

    def _shares(self, names: Sequence[str], in_order: Sequence[str] = ()) -> list[Share]:
        sizes: dict[str, list[int]] = {}
        for name, nbytes in zip(names, self.held.nbytes[self.at_peak].tolist(), strict=True):
            sizes.setdefault(name, []).append(nbytes)
        found = [Share(name, sum(all_of), len(all_of)) for name, all_of in sizes.items()]
        if in_order:
            return sorted(found, key=lambda share: in_order.index(share.name))
        return sorted(found, key=lambda share: -share.nbytes)

    def _value(self, row: int) -> Value | None:
        number = int(self.held.value[row])
        return None if number < 0 else Value(self.index, number)

    def _maker(self, number: int) -> Op | None:
        return None if number < 0 else Value(self.index, number).producer

    def _module(self, row: int, depth: int | None) -> str:
        value = self._value(row)
        path = None
        if self.held.use[row] in _LASTING:
            path = self.owner(row)
        if path is None and value is not None and value.module is not None:
            path = value.module.path or value.module.label
        if path is None:
            return "outside modules"
        return path if depth is None else ".".join(path.split(".")[: max(depth, 1)])

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
        """What a parameter, a gradient or a state is called; empty for what has no name."""
        value = self._value(row)
        own = "" if value is None else value.name
        return self._names.get(int(self.held.storage[row]), own) if self.held.use[row] in _LASTING else own

    def owner(self, row: int) -> str | None:
        """The module of a parameter, or of the parameter that a gradient or a state is of."""
        name = self.name_of(row)
        while name:
            if name in self._owners:
                return self._owners[name]
            name = name.rpartition(".")[0]
        return None

    def _line(self, row: int) -> str:
        op = self._maker(int(self.held.value[row]))
        if op is None:
            return "before the block, or by no op"
        frame = user_frame(op)
        return f"{frame.position} in {frame.function}" if frame is not None else short_name(op)

    # -- what keeps it -----------------------------------------------------------------------------------

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
        wanted = np.isin(read, list(storages)) & (reader >= now) & leaf[reader]
        found: dict[int, list[int]] = {}
        for storage, op in zip(read[wanted].tolist(), reader[wanted].tolist(), strict=True):
            found.setdefault(storage, []).append(op)
        return found

    def _told(self, row: int, readers: list[int]) -> Held:
        held = self.held
        why, op = "", None
        value = self._value(row)
        made_in_backward = (
            value is not None and value.producer is not None and value.producer.phase == "backward"
        )
        if held.use[row] not in _LASTING:
            saved = [at for at in readers if self.index.raw.ops.phase[at] == _BACKWARD]
            if saved and not made_in_backward:
                forward = Op(self.index, saved[0]).forward
                why, op = "for backward of", None if forward is None else api_call_of(forward)
            elif readers:
                why, op = "read by", api_call_of(Op(self.index, readers[0]))
            elif held.end[row] >= held.over:
                why = "held to the end"
            elif held.exact:
                why = "not read again"
        return Held(
            value, self.name_of(row), int(held.nbytes[row]), USES[held.use[row]], int(held.start[row]),
            int(held.end[row]), why, op,
        )  # fmt: skip


def usage_of(
    index: Index, module: str | None = None, phase: str | None = None, depth: int | None = None
) -> list[Usage]:
    """The memory of a run on each of its devices, the one that held most first."""
    Selection(phase=phase, depth=depth)  # says what is wrong with them
    held = memory_of(index)
    values = index.raw.values
    rows = np.ones(len(held), dtype=bool)
    among = None
    made = np.where(held.value >= 0, values.producer[held.value], -1) if len(values) else held.value
    if module is not None:
        ops = np.append(Selection(module=module).ops(index), False)
        rows = ops[made] | _owned(index, held, module)
    if phase is not None:
        among = np.append(Selection(phase=phase).ops(index), False)[made]
    return [Usage(index, held, device, rows & (held.device == device), among) for device in held.devices]


def memory_of(index: Index) -> HeldMemory:
    """What was held, by true frees where they are known."""
    raw = index.raw
    if len(raw.allocations):
        return held_memory(raw)
    known = used.lifetimes(raw)
    rows = np.flatnonzero((known.first >= 0) & (known.bytes > 0))
    first = np.full(len(raw.storages), -1, dtype=np.int32)
    has = np.flatnonzero(raw.values.storage >= 0)[::-1]
    first[raw.values.storage[has]] = has
    like = np.array([_LIKE[name] for name in used.USES], dtype=np.int8)
    names = np.array([*(meta.device for meta in raw.metas), "cpu"], dtype=object)
    lasts = np.where(known.use[rows] < 2, -1, known.last[rows])
    return made_of(raw, first[rows], known.bytes[rows], known.first[rows], lasts, like[known.use[rows]],
                   names[known.meta[rows]], rows, exact=False)  # fmt: skip


def _owned(index: Index, held: HeldMemory, module: str) -> Mask:
    """The rows of parameters, gradients and optimizer state of the modules that are meant."""
    whole = Usage(index, held, "", np.ones(len(held), dtype=bool), None)
    every = any(not info.path and info.type == module for info in index.raw.modules)
    mask = np.isin(held.use, _LASTING)
    for row in np.flatnonzero(mask).tolist():
        mask[row] = every or path_matches(module, whole.owner(row) or "")
    return mask


__all__ = ["Held", "Share", "Usage", "memory_of", "usage_of"]
