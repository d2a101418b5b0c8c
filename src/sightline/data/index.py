"""`Index`: the tables of rows of a `TraceData`, and lookups derived on first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sightline.data import trace_data as d
from sightline.data.arrays import offsets_of
from sightline.data.device_time import inclusive_durations, is_timed, own_durations, work_owners
from sightline.data.file_owners import torch_file
from sightline.data.forms import SLOT, map_leaves
from sightline.data.rows import Frame, Module, ModuleCall, Op, Step, Value, ValueNumbers
from sightline.data.table import Row, Table
from sightline.data.training_steps import steps_of
from sightline.data.user_frames import FrameChains, op_frames, user_frames

__all__ = ["Frame", "Index", "Module", "ModuleCall", "Op", "Row", "Step", "Table", "Value", "ValueNumbers"]


class Index:
    """A `TraceData` with its tables and with lookups: consumers, children, depths, device time."""

    def __init__(self, raw: d.TraceData) -> None:
        self.raw = raw

    def name(self, id: Any) -> str:
        return self.raw.names[id] if id >= 0 else ""

    @cached_property
    def ops(self) -> Table[Op]:
        return Table(self, Op, range(len(self.raw.ops)))

    @cached_property
    def values(self) -> Table[Value]:
        return Table(self, Value, range(len(self.raw.values)))

    @cached_property
    def modules(self) -> Table[Module]:
        return Table(self, Module, range(len(self.raw.modules)))

    @cached_property
    def module_calls(self) -> Table[ModuleCall]:
        return Table(self, ModuleCall, range(len(self.raw.calls)))

    @cached_property
    def frames(self) -> Table[Frame]:
        return Table(self, Frame, range(len(self.raw.frames)))

    @cached_property
    def step_infos(self) -> list[d.StepInfo]:
        """The named steps and the detected training steps."""
        return steps_of(self)

    @cached_property
    def steps(self) -> Table[Step]:
        return Table(self, Step, range(len(self.step_infos)))

    # -- source lines ------------------------------------------------------------------------------

    @cached_property
    def op_frames(self) -> d.I32:
        """The frame each op is shown under: its own, or for a backward op that of its forward op."""
        return op_frames(self.raw)

    @cached_property
    def user_frames(self) -> d.I32:
        """For each frame the innermost one on its stack outside torch, -1 if there is none.

        One entry longer than the frames, so that -1 looks up -1.
        """
        return user_frames(self.raw)

    @cached_property
    def op_user_frames(self) -> d.I32:
        """The innermost frame outside torch that each op is shown under, -1 if there is none."""
        return self.user_frames[self.op_frames]

    @cached_property
    def line_frames(self) -> d.I32:
        """`user_frames`, but a stack that is all torch's keeps its own frame instead of -1."""
        user = self.user_frames
        return np.where(user >= 0, user, np.append(np.arange(len(user) - 1, dtype=np.int32), np.int32(-1)))

    @cached_property
    def user_chains(self) -> FrameChains:
        """The stack of every frame without torch's own frames."""
        return FrameChains(self.raw, torch_file)

    # -- columns and look-ups ----------------------------------------------------------------------

    @cached_property
    def op_modules(self) -> d.I32:
        """The module each op ran in, -1 for an op outside all of them."""
        return np.append(self.raw.calls.module, np.int32(-1))[self.raw.ops.call]

    @cached_property
    def meta_texts(self) -> list[str]:
        """Each kind of tensor as it is written: ``f32[2, 8]``."""
        return [str(meta) for meta in self.raw.metas]

    @cached_property
    def _stat_rows(self) -> dict[int, int]:
        return {value: row for row, value in enumerate(self.raw.stats.value.tolist())}

    def stat_row(self, value: int) -> int:
        """The row of a value in the table of statistics, -1 where none were taken."""
        return self._stat_rows.get(value, -1)

    def numbers(self, value: int) -> ValueNumbers | None:
        """The statistics of a value, if they were taken."""
        stats, at = self.raw.stats, self.stat_row(value)
        if at < 0:
            return None
        return ValueNumbers(
            float(stats.min[at]), float(stats.max[at]), float(stats.mean[at]), float(stats.std[at]),
            float(stats.l2[at]), int(stats.zeros[at]), int(stats.nans[at]), int(stats.infs[at]),
            int(stats.fingerprint[at]),
        )  # fmt: skip

    @cached_property
    def device_work_ops(self) -> d.I32:
        """The op that launched each piece of device work; -1 where that op was not recorded."""
        return work_owners(self.raw)

    @cached_property
    def device_own(self) -> d.I64 | None:
        """Device time of each op without the ops inside it, in ns; None if it was not recorded."""
        return own_durations(self.raw, self.device_work_ops) if is_timed(self.raw) else None

    @cached_property
    def device_durations(self) -> d.I64 | None:
        """Device time of each op and of the ops inside it, in ns; None if it was not recorded."""
        return None if self.device_own is None else inclusive_durations(self.raw, self.device_own)

    @cached_property
    def call_device_durations(self) -> d.I64 | None:
        """Device time of the ops of each module call, in ns; None if it was not recorded."""
        if self.device_own is None:
            return None
        calls, sums = self.raw.calls, np.concatenate([[0], np.cumsum(self.device_own)])
        return sums[calls.end_op] - sums[calls.first_op]  # type: ignore[no-any-return]  # numpy stubs

    @cached_property
    def _consumers(self) -> tuple[d.I64, d.I32]:
        ops = self.raw.ops
        counts = np.diff(ops.input_offsets)
        users = np.repeat(np.arange(len(ops), dtype=np.int32), counts)
        return _group(ops.inputs, users, len(self.raw.values))

    def consumers(self, value: int) -> Sequence[int]:
        """Ids of the ops that read a value, each once, in order."""
        offsets, users = self._consumers
        return list(dict.fromkeys(users[offsets[value] : offsets[value + 1]].tolist()))

    @cached_property
    def _children(self) -> tuple[d.I64, d.I32]:
        return _rows_by_owner(self.raw.ops.parent, len(self.raw.ops))

    def children(self, op: int) -> Sequence[int]:
        """Ids of the ops that ran inside an op."""
        offsets, ids = self._children
        return ids[offsets[op] : offsets[op + 1]].tolist()  # type: ignore[no-any-return]  # numpy stubs

    @cached_property
    def _values_made(self) -> tuple[d.I64, d.I32]:
        return _rows_by_owner(self.raw.values.producer, len(self.raw.ops))

    def values_made_by(self, op: int) -> list[int]:
        """Ids of the values an op made: its outputs, and new versions of tensors that share their memory."""
        offsets, ids = self._values_made
        return ids[offsets[op] : offsets[op + 1]].tolist()  # type: ignore[no-any-return]  # numpy stubs

    @cached_property
    def calls_of_module(self) -> dict[int, list[int]]:
        return _rows_by_key(self.raw.calls.module)

    @cached_property
    def calls_of_parent(self) -> dict[int, list[int]]:
        return _rows_by_key(self.raw.calls.parent)

    @cached_property
    def call_depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.raw.calls.parent.tolist():  # a parent always comes first
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def argument_names(self, op: Op) -> tuple[str, ...]:
        """The names of an aten op's arguments in its schema; () for an API call."""
        schema = self.raw.schemas.get(op.name, ()) if op.level == "aten" else ()
        return tuple(argument.partition("=")[0] for argument in schema)

    def bound_arguments(self, op: Op) -> dict[str | int, Any]:
        values = iter(op.inputs)

        def bind(item: Any) -> Any:
            # A form out of a file may promise more tensors than the op has.
            return map_leaves(
                item, lambda leaf: next(values, None) if leaf is SLOT else leaf, lambda _type, fields: fields
            )

        names = self.argument_names(op)
        bound: dict[str | int, Any] = {}
        for position, item in enumerate(op.form.args):
            bound[names[position] if position < len(names) else position] = bind(item)
        for key, item in (op.form.kwargs or {}).items():
            bound[key] = bind(item)
        return bound


def _rows_by_owner(owners: d.I32, size: int) -> tuple[d.I64, d.I32]:
    """The rows of each owner, as `_group`; rows with the owner -1 are left out."""
    rows = np.flatnonzero(owners >= 0).astype(np.int32)
    return _group(owners[rows], rows, size)


def _group(keys: d.I32, items: d.I32, size: int) -> tuple[d.I64, d.I32]:
    """Items grouped by key: ``size + 1`` offsets, and the items in stable key order."""
    return offsets_of(np.bincount(keys, minlength=size)), items[np.argsort(keys, kind="stable")]


def _rows_by_key(column: d.I32) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for id, key in enumerate(column.tolist()):
        rows.setdefault(key, []).append(id)
    return rows
