"""A stretch of a recording as a recording of its own: what every view of one step is a view of.

Ops, calls and values are counted anew, times begin with the stretch. What was made before and is read in it
is an input; weights, gradients and optimizer state stay what they are.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sightline.trace import data as d
from sightline.trace.index import Index

T = TypeVar("T")
Bools = NDArray[np.bool_]

_ACTIVATION, _GRADIENT, _INPUT = (d.KINDS.index(name) for name in ("activation", "gradient", "input"))
#: What is said of a whole run and is not true of a part of it.
_OF_THE_WHOLE = (
    "last",
    "dropped",
    "external",
    "allocator",
    "left_out",
    "compilations",
    "compile_ns",
    "asked",
    "training",
    "gradients",
    "device_own_ns",
)
#: And what is true of its end alone.
_OF_THE_END = ("exception", "unfinished", "note", "failure")


def excerpt(index: Index, span: d.StepInfo) -> d.TraceData:
    """The ops and module calls of a stretch, and every value they know."""
    return _Excerpt(index, span).made()


class _Excerpt:
    """The columns of a stretch: which rows stay, and the new number of each."""

    def __init__(self, index: Index, span: d.StepInfo) -> None:
        self._index, self._data, self._span = index, index.raw, span
        data = index.raw
        self._until = span.start + span.duration
        ops, calls = data.ops, data.calls
        self._ops = np.zeros(len(ops), dtype=np.bool_)
        self._ops[span.first_op : span.end_op] = True
        self._calls = np.zeros(len(calls), dtype=np.bool_)
        self._calls[span.first_call : span.end_call] = True
        self._calls &= (calls.first_op >= span.first_op) & (calls.end_op <= span.end_op)
        self._held = self._allocated()
        self._values = self._known()
        self._op_ids, self._call_ids, self._value_ids = map(
            _renumbered, (self._ops, self._calls, self._values)
        )

    def made(self) -> d.TraceData:
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

    # -- which -------------------------------------------------------------------------------------------

    def _allocated(self) -> Bools:
        """The memory that is held at some moment of the stretch."""
        held = self._data.allocations
        found: Bools = (held.start < self._until) & ((held.end < 0) | (held.end > self._span.start))
        return found

    def _known(self) -> Bools:
        """The values that anything of the stretch speaks of."""
        ops, calls, span = self._data.ops, self._data.calls, self._span
        found = np.zeros(len(self._data.values) + 1, dtype=np.bool_)
        for flat, offsets in ((ops.inputs, ops.input_offsets), (ops.outputs, ops.output_offsets)):
            found[flat[offsets[span.first_op] : offsets[span.end_op]]] = True
        for flat, offsets in ((calls.inputs, calls.input_offsets), (calls.outputs, calls.output_offsets)):
            found[flat[np.repeat(self._calls, np.diff(offsets))]] = True
        found[self._data.allocations.value[self._held]] = True
        return found[:-1]

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
        made = (values.kind == _ACTIVATION) | ((values.kind == _GRADIENT) & (values.name < 0))
        older = made & (producer < 0)
        kind = np.where(older, np.int8(_INPUT), values.kind)
        return replace(values, producer=producer, previous=previous, base=base, kind=kind)

    def _stats(self) -> d.StatColumns:
        stats = self._data.stats
        kept = _rows(stats, self._values[stats.value])
        return replace(kept, value=self._value_ids[kept.value])

    def _device_work(self) -> d.DeviceWorkColumns:
        """What devices did because of the stretch, whenever they got to it."""
        owner, work = self._index.device_work_ops, self._data.device_work
        outside = (owner < 0) & (work.launch >= self._span.start) & (work.launch < self._until)
        mine = _rows(work, self._ops[owner] & (owner >= 0) | outside)
        begin = self._span.start
        return replace(mine, launch=mine.launch - begin, start=mine.start - begin)

    def _allocations(self) -> d.AllocationColumns:
        held, begin = _rows(self._data.allocations, self._held), self._span.start
        end = np.where((held.end < 0) | (held.end > self._until), -1, held.end - begin)
        start = np.maximum(held.start - begin, 0)
        return replace(held, value=self._value_ids[held.value], start=start, end=end)

    # -- small tables ------------------------------------------------------------------------------------

    def _info(self) -> dict[str, Any]:
        ends = self._span.end_op == len(self._data.ops)
        gone = (*_OF_THE_WHOLE, *(() if ends else _OF_THE_END))
        kept = {key: item for key, item in self._data.info.items() if key not in gone}
        failure = kept.get("failure")
        if (
            isinstance(failure, dict) and type(failure.get("op")) is int
        ):  # which op failed, as it is counted here
            kept["failure"] = failure | {"op": max(failure["op"] - self._span.first_op, -1)}
        name = f"{self._data.info.get('name') or 'of a run'}, {self._span.name}"
        return kept | {"name": name, "duration_ns": self._span.duration}

    def _steps(self) -> list[d.StepInfo]:
        """The steps in it, under the names they have in the whole."""
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
        """The tensors that were kept of what ran in it."""
        producers = self._data.values.producer
        made = np.append(self._ops[producers] & (producers >= 0), False) if len(self._data.ops) else None
        named, called = {step.name for step in self._steps()}, self._called()
        found = []
        for info in self._data.captures:
            inside = info.value >= 0 and made is not None and bool(made[info.value])
            if info.step:
                inside = info.step in named
            elif info.role == "input":  # which may be older than the stretch
                inside = inside or (info.module, info.call) in called
            if inside:
                found.append(replace(info, value=int(self._value_ids[info.value])))
        return found

    def _called(self) -> set[tuple[str, int]]:
        """The module calls of the stretch, as the keys of kept tensors have them."""
        modules, calls = self._data.modules, self._data.calls
        labels = [module.label for module in modules]
        chosen = np.flatnonzero(self._calls)
        pairs = zip(calls.module[chosen].tolist(), calls.index[chosen].tolist(), strict=True)
        return {(labels[module], index) for module, index in pairs}


def _renumbered(kept: Bools) -> d.I32:
    """The new number of each row; -1 for those that go, and for -1 itself."""
    numbers = np.where(kept, np.cumsum(kept, dtype=np.int32) - np.int32(1), np.int32(-1))
    return np.append(numbers, np.int32(-1)).astype(np.int32)


def _rows(columns: T, kept: Bools) -> T:
    """Some rows of columns; lists go with their rows."""
    made: dict[str, Any] = {}
    for each in fields(columns):  # type: ignore[arg-type]  # every T here is a dataclass
        name = each.name
        if name.endswith("_offsets"):
            counts = np.diff(getattr(columns, name))
            made[name] = np.concatenate([[0], np.cumsum(counts[kept])]).astype(np.int64)
            flat = f"{name.removesuffix('_offsets')}s"
            made[flat] = getattr(columns, flat)[np.repeat(kept, counts)]
        elif name not in made:
            column = getattr(columns, name)
            made[name] = column if len(column) != len(kept) else column[kept]
    return replace(columns, **made)  # type: ignore[type-var]
