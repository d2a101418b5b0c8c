"""The invariants of a recording, which `validate` checks.

- every table can be read completely
- every id points at a row, and every one-to-many column fits its offsets
- module calls nest: a child lies inside its parent, in time, in ops and in order
- the order is topological: a value is made before it is read, a version comes after the one it replaces
- every op input has a producer, or a kind that says where it came from
- device work never starts before its launch, and never has a negative duration
- tensors are possible: no kernel multiplies matrices of two dtypes, no view is on another device
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.trace_data import KINDS, RAISED, UNFINISHED, TraceData
from sightline.errors import InvalidTrace
from sightline.schema.columns import all_columns

_SHOWN = 5
#: Aten ops with two inputs that must have one dtype and one device: their positions from the end.
_ALIKE: Final = {"mm": (-2, -1), "bmm": (-2, -1), "addmm": (-2, -1), "baddbmm": (-2, -1)}
#: Aten ops whose output has the dtype and the device of their only tensor.
_VIEWS: Final = frozenset(
    """t transpose.int permute expand unsqueeze squeeze squeeze.dim view _unsafe_view reshape slice.Tensor
    select.int detach alias""".split()
)


@dataclass(frozen=True)
class Report:
    """The size of a valid recording.

    >>> Report(ops=2, values=3, calls=1, external=0).external
    0
    """

    ops: int
    values: int
    calls: int
    external: int  #: values from outside the recording


class _Faults:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, mask: NDArray[np.bool_], text: str) -> None:
        """Add a fault if any row has it; ``{}`` in the text is the first such row."""
        rows = np.flatnonzero(mask)
        if len(rows):
            more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
            self.texts.append(text.format(int(rows[0])) + more)


def validate(data: TraceData) -> Report:
    """Check every invariant; raise `InvalidTrace` with the first contradictions.

    Those count, too, that were left out when the recording was saved.
    """
    texts = list(dict.fromkeys([*(data.info.get("contradictions") or ()), *contradictions(data)]))
    if texts:
        shown = "; ".join(texts[:_SHOWN])
        more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        raise InvalidTrace(f"This recording contradicts itself: {shown}{more}.")
    external = int((data.values.kind == KINDS.index("external")).sum())
    return Report(len(data.ops), len(data.values), len(data.calls), external)


def contradictions(data: TraceData) -> list[str]:
    """The contradictions between the tables of a recording, in half a sentence each."""
    for table in fields(data):  # a loaded recording decodes and checks each column on first use
        columns = getattr(data, table.name)
        for column in fields(columns) if is_dataclass(columns) else ():
            getattr(columns, column.name)
    faults = _Faults()
    _check_references(data, faults)
    if not faults.texts:  # the rest reads through references
        _check_nesting(data, faults)
        _check_producers(data, faults)
        _check_dtypes(data, faults)
        work = data.device_work
        faults.add(work.duration < 0, "device work {} ends before it begins")
        faults.add(work.launch > work.start, "device work {} begins before the host launched it")
    return faults.texts


def _check_references(data: TraceData, faults: _Faults) -> None:
    for declared in all_columns():
        if declared.is_reference:
            column = getattr(getattr(data, declared.table), declared.name)
            size = len(declared.meaning.choices) or len(getattr(data, declared.meaning.target))
            faults.add((column < declared.lowest) | (column >= size), f"{declared.label} {{}} points nowhere")
    ops, calls = data.ops, data.calls
    for lists, offsets, flat, rows in (
        ("op inputs", ops.input_offsets, ops.inputs, len(ops)),
        ("op outputs", ops.output_offsets, ops.outputs, len(ops)),
        ("call inputs", calls.input_offsets, calls.inputs, len(calls)),
        ("call outputs", calls.output_offsets, calls.outputs, len(calls)),
    ):
        if (
            len(offsets) != rows + 1
            or offsets[0] != 0
            or offsets[-1] != len(flat)
            or (np.diff(offsets) < 0).any()
        ):
            faults.texts.append(f"the {lists} do not fit their offsets")


def _check_nesting(data: TraceData, faults: _Faults) -> None:
    calls, ops = data.calls, data.ops
    ids = np.arange(len(calls))
    faults.add(calls.first_op > calls.end_op, "call {} ends before it begins")
    faults.add(calls.end_op > len(ops), "call {} ends after the last op")
    faults.add(calls.parent >= ids, "call {} comes before its parent")
    inner = np.flatnonzero(calls.parent >= 0)
    outer = calls.parent[inner]
    outside = (calls.first_op[inner] < calls.first_op[outer]) | (calls.end_op[inner] > calls.end_op[outer])
    late = calls.order[inner] > calls.order[outer]
    mask = np.zeros(len(calls), dtype=bool)
    mask[inner] = outside
    faults.add(mask, "call {} does not lie inside its parent")
    mask[inner] = late
    faults.add(mask & ~(calls.flags & UNFINISHED).astype(bool), "call {} ends after its parent")
    children = np.flatnonzero(ops.parent >= 0)
    wrong = np.zeros(len(ops), dtype=bool)
    wrong[children] = (ops.parent[children] >= children) | (ops.level[ops.parent[children]] != 0)
    faults.add(wrong, "op {} is not inside the API call it names")


def _check_producers(data: TraceData, faults: _Faults) -> None:
    """Values are made before they are read, and each is made by an op or has a kind that says otherwise."""
    ops, values = data.ops, data.values
    readers = np.repeat(np.arange(len(ops)), np.diff(ops.input_offsets))
    makers = values.producer[ops.inputs]
    late = np.zeros(len(ops), dtype=bool)
    late[readers[makers > readers]] = True
    faults.add(late, "op {} reads a value that is made later")
    ids = np.arange(len(values))
    faults.add(values.previous >= ids, "value {} comes before the one it replaces")
    faults.add(values.base >= ids, "value {} comes before the one it is a view of")
    op_ids = np.arange(len(ops))
    faults.add(ops.forward >= op_ids, "backward op {} comes before its forward op")
    writers = np.repeat(op_ids, np.diff(ops.output_offsets))
    early = np.zeros(len(ops), dtype=bool)
    # An API call's outputs are made by the aten ops inside it, which come after it.
    aten = (ops.level[writers] == 1) & (values.producer[ops.outputs] > writers)
    early[writers[aten]] = True
    faults.add(early, "op {} returns a value that is made later")
    needs_producer = np.isin(values.kind, [KINDS.index("activation"), KINDS.index("gradient")])
    # A named gradient may be older than the block: an optimizer read it first.
    lost = needs_producer & (values.producer < 0) & (values.base < 0)
    lost &= (values.previous < 0) & (values.name < 0)
    if data.info.get("ops") not in ("none", "api"):  # else ops between the recorded calls are missing
        faults.add(lost, "value {} has a kind that an op of the block makes, but no op made it")


def _check_dtypes(data: TraceData, faults: _Faults) -> None:
    """Plain tensors of certain ops have one dtype and one device; tensor subclasses are exempt."""
    ops, values = data.ops, data.values
    plain = np.array([one.type == "Tensor" and one.layout == "strided" for one in data.metas] or [False])
    like: dict[tuple[str, str], int] = {}
    kinds = np.array([like.setdefault((one.dtype, one.device), len(like)) for one in data.metas] or [0])
    known = plain[values.meta] & (values.kind != KINDS.index("evicted"))
    wrong = np.zeros(len(ops), dtype=bool)
    ran = (ops.level == 1) & ((ops.flags & (RAISED | UNFINISHED)) == 0)
    for number, name in enumerate(data.names):
        if name not in _ALIKE and name not in _VIEWS:
            continue
        rows = np.flatnonzero(ran & (ops.name == number))
        if name in _VIEWS:
            is_single = (np.diff(ops.input_offsets)[rows] == 1) & (np.diff(ops.output_offsets)[rows] == 1)
            rows = rows[is_single]
            first, second = ops.inputs[ops.input_offsets[rows]], ops.outputs[ops.output_offsets[rows]]
        else:
            rows = rows[np.diff(ops.input_offsets)[rows] >= 2]
            first, second = (ops.inputs[ops.input_offsets[rows + 1] + position] for position in _ALIKE[name])
        differ = kinds[values.meta[first]] != kinds[values.meta[second]]
        wrong[rows[differ & known[first] & known[second]]] = True
    faults.add(wrong, "op {} has tensors of two dtypes or devices, which it cannot have run on")
