"""A span of a recording as a recording of its own, for views of one step.

Ops, calls and values are renumbered, times begin with the span. Values that were produced before and are
read in it become inputs; weights, gradients and optimizer state keep their kind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sightline.data import trace_data as d
from sightline.data.index import Index
from sightline.data.optimizer_steps import clip_times
from sightline.data.training_steps import innermost_steps, may_lack_beginning

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
        rows = data.allocations  # the memory that is allocated at some time of the span
        self._allocated = (rows.start < self._end_time) & ((rows.end < 0) | (rows.end > span.start))
        values = np.zeros(len(data.values) + 1, dtype=np.bool_)  # those that anything in the span refers to
        for flat, offsets in ((ops.inputs, ops.input_offsets), (ops.outputs, ops.output_offsets)):
            values[flat[offsets[span.first_op] : offsets[span.end_op]]] = True
        for flat, offsets in ((calls.inputs, calls.input_offsets), (calls.outputs, calls.output_offsets)):
            values[flat[np.repeat(self._calls, np.diff(offsets))]] = True
        values[rows.value[self._allocated]] = True
        self._values = values[:-1]
        # The new id of each row; -1 for rows that are dropped, and for id -1.
        self._op_ids, self._call_ids, self._value_ids = (
            np.append(np.where(mask, np.cumsum(mask) - 1, -1), -1).astype(np.int32)
            for mask in (self._ops, self._calls, self._values)
        )

    def build(self) -> d.TraceData:
        """The span as a recording."""
        data, begin, first_op = self._data, self._span.start, np.int32(self._span.first_op)
        op_ids, call_ids, value_ids = self._op_ids, self._call_ids, self._value_ids
        ops = _rows(data.ops, self._ops)
        ops = replace(
            ops, call=call_ids[ops.call], parent=op_ids[ops.parent], forward=op_ids[ops.forward],
            start=ops.start - begin, inputs=value_ids[ops.inputs], outputs=value_ids[ops.outputs],
        )  # fmt: skip
        calls = _rows(data.calls, self._calls)
        order = np.empty(len(calls.order), dtype=np.int32)
        order[np.argsort(calls.order, kind="stable")] = np.arange(len(order), dtype=np.int32)
        calls = replace(
            calls, parent=call_ids[calls.parent], start=calls.start - begin, order=order,
            first_op=calls.first_op - first_op, end_op=calls.end_op - first_op,
            inputs=value_ids[calls.inputs], outputs=value_ids[calls.outputs],
        )  # fmt: skip
        values = _rows(data.values, self._values)
        producer = op_ids[values.producer]
        computed = (values.kind == _ACTIVATION) | ((values.kind == _GRADIENT) & (values.name < 0))
        storages = np.unique(values.storage[values.storage >= 0])
        storage_ids = np.full(len(data.storages) + 1, -1, dtype=np.int32)
        storage_ids[storages] = np.arange(len(storages), dtype=np.int32)
        values = replace(
            values, producer=producer, previous=value_ids[values.previous], base=value_ids[values.base],
            storage=storage_ids[values.storage],
            kind=np.where(computed & (producer < 0), np.int8(_INPUT), values.kind),
        )  # fmt: skip
        stats = _rows(data.stats, self._values[data.stats.value])
        stats = replace(stats, value=value_ids[stats.value])
        held = _rows(data.allocations, self._allocated)
        end = np.where((held.end < 0) | (held.end > self._end_time), -1, held.end - begin)
        held = replace(
            held, value=value_ids[held.value], start=np.maximum(held.start - begin, 0), end=end
        )  # fmt: skip
        owner, work = self._index.device_work_ops, data.device_work
        outside = (owner < 0) & (work.launch >= begin) & (work.launch < self._end_time)
        work = _rows(work, self._ops[owner] & (owner >= 0) | outside)  # launched in it, whenever it ran
        work = replace(work, launch=work.launch - begin, start=work.start - begin)
        return d.TraceData(
            ops, values, calls, data.frames, data.modules, data.codes, data.files, data.metas, data.forms,
            data.names, data.storages[storages], data.schemas, self._info(), stats, held, work,
            self._steps(), self._captures(), data.store, data.source_lines,
        )  # fmt: skip

    def _info(self) -> dict[str, Any]:
        """The entries of ``info`` that hold for the span, with its name and length."""
        at_run_end = self._span.end_op == len(self._data.ops)
        dropped = (*_WHOLE_RUN_KEYS, *(() if at_run_end else _RUN_END_KEYS))
        info = {key: item for key, item in self._data.info.items() if key not in dropped}
        if info.get("checked"):  # how many of them are of this span was not counted
            info["checked"] = None
        failure = info.get("failure")
        if isinstance(failure, dict) and type(failure.get("op")) is int:
            info["failure"] = failure | {"op": max(failure["op"] - self._span.first_op, -1)}
        begin, rows = self._span.start, info.get("warnings")  # those that were shown first inside the span
        warnings = [
            [*row[:3], row[3] - begin, *row[4:]]
            for row in (rows if isinstance(rows, list) else ())
            if isinstance(row, list) and len(row) > 3 and type(row[3]) is int
            and begin <= row[3] < self._end_time
        ]  # fmt: skip
        name = f"{self._data.info.get('name') or 'of a run'}, {self._span.name}"
        steps = innermost_steps(self._index.step_infos)
        begins = bool(steps) and self._span.first_op <= steps[0].first_op < max(self._span.end_op, 1)
        if begins and may_lack_beginning(self._index):
            info["incomplete"] = True
        return info | {
            "name": name, "duration_ns": self._span.duration, "excerpt": self._span.name,
            "training": self._training(), "warnings": warnings,
        }  # fmt: skip

    def _training(self) -> dict[str, Any]:
        """The steps of optimizers inside the span, and these optimizers; schedules are of a whole run."""
        info = self._data.info.get("training")
        info = info if isinstance(info, dict) else {}
        rows, optimizers = (
            part if isinstance(part := info.get(name), list) else [] for name in ("steps", "optimizers")
        )
        marks = self._optimizer_marks
        begin = self._span.start  # an optimizer that calls a closure may have begun before
        since = max((end for mark in marks if (end := mark.start + mark.duration) < begin), default=0)
        steps = [
            [row[0], max(row[1] - begin, 0), *row[2:]]
            for row in rows
            if isinstance(row, list) and len(row) > 1 and type(row[0]) is type(row[1]) is int
            and since <= row[1] < self._end_time
        ]  # fmt: skip
        stepped = Counter(row[0] for row in steps)
        if len(optimizers) == 1:  # of a long run only the first steps are recorded
            stepped = Counter({0: max(len(self._steps_of_optimizers()), len(steps))})
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

    def _steps(self) -> list[d.StepInfo]:
        """The steps inside the span, and the stretches in which optimizers stepped."""
        span = self._span
        steps = [
            d.StepInfo(
                step.name, step.first_op - span.first_op, step.end_op - span.first_op,
                int(self._calls[: step.first_call].sum()), int(self._calls[: step.end_call].sum()),
                step.start - span.start, step.duration,
            )
            for step in [*self._named_steps(), *self._steps_of_optimizers()]
        ]  # fmt: skip
        return sorted(steps, key=lambda step: step.first_op)

    def _named_steps(self) -> list[d.StepInfo]:
        span = self._span
        return [
            step
            for step in self._index.step_infos
            if span.first_op <= step.first_op and step.end_op <= span.end_op
            and span.first_call <= step.first_call and step.end_call <= span.end_call
        ]  # fmt: skip

    def _steps_of_optimizers(self) -> list[d.StepInfo]:
        """Those that end in the span, without what comes before it."""
        span, steps = self._span, []
        for step in self._optimizer_marks:
            end = step.start + step.duration
            if span.start <= end <= self._end_time and span.first_op <= step.end_op <= span.end_op:
                first_op, first_call = (
                    max(step.first_op, span.first_op),
                    max(step.first_call, span.first_call),
                )
                start = max(step.start, span.start)
                steps.append(
                    d.StepInfo(
                        step.name, first_op, step.end_op, first_call, step.end_call, start, end - start
                    )
                )
        return steps

    @cached_property
    def _optimizer_marks(self) -> list[d.StepInfo]:
        return [clip_times(step) for step in self._data.steps if step.name == d.OPTIMIZER_STEP]

    def _captures(self) -> list[d.CaptureInfo]:
        """The tensors that were captured in the span."""
        producers = self._data.values.producer
        produced = np.append(self._ops[producers] & (producers >= 0), False) if len(self._data.ops) else None
        steps = {step.name for step in self._named_steps()}
        labels, calls = [module.label for module in self._data.modules], self._data.calls
        rows = np.flatnonzero(self._calls)  # a captured tensor names its call by module and number
        pairs = zip(calls.module[rows].tolist(), calls.index[rows].tolist(), strict=True)
        keys = {(labels[module], number) for module, number in pairs}
        captures = []
        for info in self._data.captures:
            inside = info.value >= 0 and produced is not None and bool(produced[info.value])
            if info.step:
                inside = info.step in steps
            elif info.role == "input":  # it may be older than the span
                inside = inside or (info.module, info.call) in keys
            if inside:
                captures.append(replace(info, value=int(self._value_ids[info.value])))
        return captures


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
