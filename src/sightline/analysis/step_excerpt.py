"""A span of a recording as a recording of its own, for views of one step.

Ops, calls and values are renumbered, times begin with the span. Values that were produced before and are
read in it become inputs; weights, gradients and optimizer state keep their kind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sightline.data import trace_data as d
from sightline.data.index import Index

T = TypeVar("T")
Bools = NDArray[np.bool_]

_ACTIVATION, _GRADIENT, _INPUT = (d.KINDS.index(name) for name in ("activation", "gradient", "input"))
#: Entries of ``info`` that hold only for a whole run.
_WHOLE_RUN_KEYS = tuple(
    """last dropped external allocator left_out compilations compile_ns asked gradients device_own_ns
    unrecorded_calls unrecorded_module""".split()
)
#: Entries that hold only for a span that ends with the run.
_RUN_END_KEYS = ("exception", "unfinished", "note", "failure")


def excerpt(index: Index, span: d.StepInfo) -> d.TraceData:
    """The ops and module calls of a span, and every value they refer to."""
    return _Excerpt(index, span).build()


class _Excerpt:
    """The columns of a span: masks of the rows that stay, and their new ids."""

    def __init__(self, index: Index, span: d.StepInfo) -> None:
        self._index, self._data, self._span = index, index.raw, span
        data = index.raw
        self._end_time = span.start + span.duration
        ops, calls = data.ops, data.calls
        self._ops = np.zeros(len(ops), dtype=np.bool_)
        self._ops[span.first_op : span.end_op] = True
        self._calls = np.zeros(len(calls), dtype=np.bool_)
        self._calls[span.first_call : span.end_call] = True
        self._calls &= (calls.first_op >= span.first_op) & (calls.end_op <= span.end_op)
        self._allocated = self._allocation_mask()
        self._values = self._value_mask()
        self._op_ids, self._call_ids, self._value_ids = map(_new_ids, (self._ops, self._calls, self._values))

    def build(self) -> d.TraceData:
        data = self._data
        values = self._value_columns()
        storages = np.unique(values.storage[values.storage >= 0])
        new = np.full(len(data.storages) + 1, -1, dtype=np.int32)
        new[storages] = np.arange(len(storages), dtype=np.int32)
        return d.TraceData(
            self._op_columns(), replace(values, storage=new[values.storage]), self._call_columns(),
            data.frames, data.modules, data.codes, data.files, data.metas, data.forms, data.names,
            data.storages[storages], data.schemas, self._info(), self._stats(), self._allocations(),
            self._device_work(), self._steps(), self._captures(), data.store, data.source_lines,
        )  # fmt: skip

    # -- masks -------------------------------------------------------------------------------------------

    def _allocation_mask(self) -> Bools:
        """The memory that is allocated at some time of the span."""
        rows = self._data.allocations
        mask: Bools = (rows.start < self._end_time) & ((rows.end < 0) | (rows.end > self._span.start))
        return mask

    def _value_mask(self) -> Bools:
        """The values that anything in the span refers to."""
        ops, calls, span = self._data.ops, self._data.calls, self._span
        mask = np.zeros(len(self._data.values) + 1, dtype=np.bool_)
        for flat, offsets in ((ops.inputs, ops.input_offsets), (ops.outputs, ops.output_offsets)):
            mask[flat[offsets[span.first_op] : offsets[span.end_op]]] = True
        for flat, offsets in ((calls.inputs, calls.input_offsets), (calls.outputs, calls.output_offsets)):
            mask[flat[np.repeat(self._calls, np.diff(offsets))]] = True
        mask[self._data.allocations.value[self._allocated]] = True
        return mask[:-1]

    # -- columns -----------------------------------------------------------------------------------------

    def _op_columns(self) -> d.OpColumns:
        ops = _rows(self._data.ops, self._ops)
        return replace(
            ops, call=self._call_ids[ops.call], parent=self._op_ids[ops.parent],
            forward=self._op_ids[ops.forward], start=ops.start - self._span.start,
            inputs=self._value_ids[ops.inputs], outputs=self._value_ids[ops.outputs],
        )  # fmt: skip

    def _call_columns(self) -> d.CallColumns:
        calls = _rows(self._data.calls, self._calls)
        order = np.empty(len(calls.order), dtype=np.int32)
        order[np.argsort(calls.order, kind="stable")] = np.arange(len(order), dtype=np.int32)
        first = np.int32(self._span.first_op)
        return replace(
            calls, parent=self._call_ids[calls.parent], start=calls.start - self._span.start,
            first_op=calls.first_op - first, end_op=calls.end_op - first, order=order,
            inputs=self._value_ids[calls.inputs], outputs=self._value_ids[calls.outputs],
        )  # fmt: skip

    def _value_columns(self) -> d.ValueColumns:
        values = _rows(self._data.values, self._values)
        producer = self._op_ids[values.producer]
        previous, base = self._value_ids[values.previous], self._value_ids[values.base]
        computed = (values.kind == _ACTIVATION) | ((values.kind == _GRADIENT) & (values.name < 0))
        kind = np.where(computed & (producer < 0), np.int8(_INPUT), values.kind)
        return replace(values, producer=producer, previous=previous, base=base, kind=kind)

    def _stats(self) -> d.StatColumns:
        stats = self._data.stats
        rows = _rows(stats, self._values[stats.value])
        return replace(rows, value=self._value_ids[rows.value])

    def _device_work(self) -> d.DeviceWorkColumns:
        """The device work that the span launched, whenever it ran."""
        owner, work = self._index.device_work_ops, self._data.device_work
        outside = (owner < 0) & (work.launch >= self._span.start) & (work.launch < self._end_time)
        launched = _rows(work, self._ops[owner] & (owner >= 0) | outside)
        begin = self._span.start
        return replace(launched, launch=launched.launch - begin, start=launched.start - begin)

    def _allocations(self) -> d.AllocationColumns:
        rows, begin = _rows(self._data.allocations, self._allocated), self._span.start
        end = np.where((rows.end < 0) | (rows.end > self._end_time), -1, rows.end - begin)
        start = np.maximum(rows.start - begin, 0)
        return replace(rows, value=self._value_ids[rows.value], start=start, end=end)

    # -- small tables ------------------------------------------------------------------------------------

    def _info(self) -> dict[str, Any]:
        at_run_end = self._span.end_op == len(self._data.ops)
        dropped = (*_WHOLE_RUN_KEYS, *(() if at_run_end else _RUN_END_KEYS))
        info = {key: item for key, item in self._data.info.items() if key not in dropped}
        if info.get("checked"):  # how many of them are of this span was not counted
            info["checked"] = None
        failure = info.get("failure")
        if isinstance(failure, dict) and type(failure.get("op")) is int:
            info["failure"] = failure | {"op": max(failure["op"] - self._span.first_op, -1)}
        name = f"{self._data.info.get('name') or 'of a run'}, {self._span.name}"
        return info | {
            "name": name, "duration_ns": self._span.duration, "excerpt": self._span.name,
            "training": self._training(), "warnings": self._warnings(),
        }  # fmt: skip

    def _training(self) -> dict[str, Any]:
        """The steps of optimizers inside the span, and these optimizers; schedules are of a whole run."""
        info = self._data.info.get("training")
        info = info if isinstance(info, dict) else {}
        rows, optimizers = (
            part if isinstance(part := info.get(name), list) else [] for name in ("steps", "optimizers")
        )
        ends = self._span.start, self._end_time
        steps = [
            [row[0], row[1] - ends[0], *row[2:]]
            for row in rows
            if isinstance(row, list) and len(row) > 1 and type(row[0]) is type(row[1]) is int
            and ends[0] <= row[1] < ends[1]
        ]  # fmt: skip
        stepped = Counter(row[0] for row in steps)
        if not stepped and len(optimizers) == 1:  # of a long run only the first steps are recorded
            inside = (self._span.first_op <= step.first_op < self._span.end_op for step in self._marks())
            stepped = Counter({0: sum(inside)})
        new = {old: at for at, old in enumerate(sorted(stepped)) if 0 <= old < len(optimizers)}
        kept = [
            {key: item for key, item in optimizers[old].items() if key != "rates"} | {"steps": stepped[old]}
            for old in new
            if stepped[old] and isinstance(optimizers[old], dict)
        ]
        return {
            "optimizers": kept, "schedulers": [], "count": stepped.total(),
            "steps": [[new[row[0]], *row[1:]] for row in steps if row[0] in new],
        }  # fmt: skip

    def _warnings(self) -> list[Any]:
        """The warnings that were shown first inside the span."""
        rows, begin = self._data.info.get("warnings"), self._span.start
        rows = [row for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
        return [
            [*row[:3], row[3] - begin, *row[4:]]
            for row in rows
            if len(row) > 3 and type(row[3]) is int and begin <= row[3] < self._end_time
        ]

    def _marks(self) -> list[d.StepInfo]:
        """The steps of optimizers, as the recording has them."""
        return [step for step in self._data.steps if step.name == d.OPTIMIZER_STEP]

    def _steps(self) -> list[d.StepInfo]:
        """The steps inside the span."""
        span = self._span
        return [
            d.StepInfo(
                step.name, step.first_op - span.first_op, step.end_op - span.first_op,
                int(self._calls[: step.first_call].sum()), int(self._calls[: step.end_call].sum()),
                step.start - span.start, step.duration,
            )
            for step in self._index.step_infos
            if span.first_op <= step.first_op and step.end_op <= span.end_op
            and span.first_call <= step.first_call and step.end_call <= span.end_call
        ]  # fmt: skip

    def _captures(self) -> list[d.CaptureInfo]:
        """The tensors that were captured in the span."""
        producers = self._data.values.producer
        produced = np.append(self._ops[producers] & (producers >= 0), False) if len(self._data.ops) else None
        steps, calls = {step.name for step in self._steps()}, self._call_keys()
        captures = []
        for info in self._data.captures:
            inside = info.value >= 0 and produced is not None and bool(produced[info.value])
            if info.step:
                inside = info.step in steps
            elif info.role == "input":  # it may be older than the span
                inside = inside or (info.module, info.call) in calls
            if inside:
                captures.append(replace(info, value=int(self._value_ids[info.value])))
        return captures

    def _call_keys(self) -> set[tuple[str, int]]:
        """The module calls of the span, as the keys of captured tensors name them."""
        modules, calls = self._data.modules, self._data.calls
        labels = [module.label for module in modules]
        chosen = np.flatnonzero(self._calls)
        pairs = zip(calls.module[chosen].tolist(), calls.index[chosen].tolist(), strict=True)
        return {(labels[module], index) for module, index in pairs}


def _new_ids(mask: Bools) -> d.I32:
    """The new id of each row; -1 for rows that are dropped, and for id -1."""
    ids = np.where(mask, np.cumsum(mask, dtype=np.int32) - np.int32(1), np.int32(-1))
    return np.append(ids, np.int32(-1)).astype(np.int32)


def _rows(columns: T, mask: Bools) -> T:
    """Some rows of columns, with their lists."""
    selected: dict[str, Any] = {}
    for each in fields(columns):  # type: ignore[arg-type]  # every T here is a dataclass
        name = each.name
        if name.endswith("_offsets"):
            counts = np.diff(getattr(columns, name))
            selected[name] = np.concatenate([[0], np.cumsum(counts[mask])]).astype(np.int64)
            flat = f"{name.removesuffix('_offsets')}s"
            selected[flat] = getattr(columns, flat)[np.repeat(mask, counts)]
        elif name not in selected:
            column = getattr(columns, name)
            selected[name] = column if len(column) != len(mask) else column[mask]
    return replace(columns, **selected)  # type: ignore[type-var]
