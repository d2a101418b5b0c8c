"""The invariants of a recording: `validate` proves them, or says what contradicts them.

- every table can be read, all of it: what is on disk is what was written
- every id resolves, and every one-to-many column fits its offsets
- module calls nest: a child lies inside its parent, in time, in ops and in order
- order is topological: a value is made before it is read, a version comes after the one it replaces
- every op input is explained: by a producer, or by a kind that says where it came from
- devices did what they were asked for: never before that, and for no less than no time
- tensors are what they can be: no kernel multiplies matrices of two dtypes, no view is on another device
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.errors import InvalidTrace
from sightline.trace.data import KINDS, RAISED, REFERENCES, UNFINISHED, TraceData

_SHOWN = 5
#: Aten ops two of whose inputs are of one dtype and on one device: the places of these, from the end.
_ALIKE: Final = {"mm": (-2, -1), "bmm": (-2, -1), "addmm": (-2, -1), "baddbmm": (-2, -1)}
#: Aten ops whose output has the dtype and the device of their one tensor.
_VIEWS: Final = frozenset(
    """t transpose.int permute expand unsqueeze squeeze squeeze.dim view _unsafe_view reshape slice.Tensor
    select.int detach alias""".split()
)


@dataclass(frozen=True)
class Report:
    """What a valid recording holds.

    >>> Report(ops=2, values=3, calls=1, external=0).external
    0
    """

    ops: int
    values: int
    calls: int
    external: int  #: values that nothing recorded explains


class _Checks:
    def __init__(self) -> None:
        self.wrong: list[str] = []

    def none(self, mask: NDArray[np.bool_], text: str) -> None:
        """No row may have this fault; ``{}`` in the text is the first one that has."""
        if mask.any():
            found = np.flatnonzero(mask)
            self.wrong.append(
                text.format(int(found[0])) + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
            )


def validate(data: TraceData) -> Report:
    """Check every invariant; raise `InvalidTrace` with the first contradictions."""
    _read_all(data)
    checks = _Checks()
    _references(data, checks)
    if not checks.wrong:  # the rest reads through references
        _nesting(data, checks)
        _order(data, checks)
        _explained(data, checks)
        _possible(data, checks)
        _asked_before_it_ran(data, checks)
    if checks.wrong:
        shown = "; ".join(checks.wrong[:_SHOWN])
        more = f"; and {len(checks.wrong) - _SHOWN} more" if len(checks.wrong) > _SHOWN else ""
        raise InvalidTrace(f"This recording contradicts itself: {shown}{more}.")
    external = int((data.values.kind == KINDS.index("external")).sum())
    return Report(len(data.ops), len(data.values), len(data.calls), external)


def _read_all(data: TraceData) -> None:
    """Touch every column and table: of a recording on disk each is read, and checked, when first touched."""
    for table in fields(data):
        held = getattr(data, table.name)
        for column in fields(held) if is_dataclass(held) else ():
            getattr(held, column.name)


def _references(data: TraceData, checks: _Checks) -> None:
    for (table, name), (label, low, target) in REFERENCES.items():
        column = getattr(getattr(data, table), name)
        size = len(getattr(data, target)) if isinstance(target, str) else target
        checks.none((column < low) | (column >= size), f"{label} {{}} points nowhere")
    ops, calls = data.ops, data.calls
    for what, offsets, flat, rows in (
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
            checks.wrong.append(f"the {what} do not fit their offsets")


def _nesting(data: TraceData, checks: _Checks) -> None:
    calls, ops = data.calls, data.ops
    ids = np.arange(len(calls))
    checks.none(calls.first_op > calls.end_op, "call {} ends before it begins")
    checks.none(calls.end_op > len(ops), "call {} ends after the last op")
    checks.none(calls.parent >= ids, "call {} comes before its parent")
    inner = np.flatnonzero(calls.parent >= 0)
    outer = calls.parent[inner]
    outside = (calls.first_op[inner] < calls.first_op[outer]) | (calls.end_op[inner] > calls.end_op[outer])
    late = calls.order[inner] > calls.order[outer]
    faults = np.zeros(len(calls), dtype=bool)
    faults[inner] = outside
    checks.none(faults, "call {} does not lie inside its parent")
    faults[inner] = late
    checks.none(faults & ~(calls.flags & UNFINISHED).astype(bool), "call {} ends after its parent")
    children = np.flatnonzero(ops.parent >= 0)
    wrong = np.zeros(len(ops), dtype=bool)
    wrong[children] = (ops.parent[children] >= children) | (ops.level[ops.parent[children]] != 0)
    checks.none(wrong, "op {} is not inside the API call it names")


def _order(data: TraceData, checks: _Checks) -> None:
    ops, values = data.ops, data.values
    readers = np.repeat(np.arange(len(ops)), np.diff(ops.input_offsets))
    makers = values.producer[ops.inputs]
    late = np.zeros(len(ops), dtype=bool)
    late[readers[makers > readers]] = True
    checks.none(late, "op {} reads a value that is made later")
    ids = np.arange(len(values))
    checks.none(values.previous >= ids, "value {} comes before the one it replaces")
    checks.none(values.base >= ids, "value {} comes before the one it is a view of")
    op_ids = np.arange(len(ops))
    checks.none(ops.forward >= op_ids, "backward op {} comes before its forward op")
    writers = np.repeat(op_ids, np.diff(ops.output_offsets))
    early = np.zeros(len(ops), dtype=bool)
    # An API call's outputs are made by the aten ops inside it, which come after it.
    aten = (ops.level[writers] == 1) & (values.producer[ops.outputs] > writers)
    early[writers[aten]] = True
    checks.none(early, "op {} returns a value that is made later")


def _explained(data: TraceData, checks: _Checks) -> None:
    values = data.values
    needs_maker = np.isin(values.kind, [KINDS.index("activation"), KINDS.index("gradient")])
    # A named gradient may be older than the block: it was there when an optimizer first read it.
    lost = needs_maker & (values.producer < 0) & (values.base < 0) & (values.previous < 0) & (values.name < 0)
    if data.info.get("ops") in ("none", "api"):  # what happens between the recorded calls is not watched
        return
    checks.none(lost, "value {} is said to be made in the block, but by no op")


def _asked_before_it_ran(data: TraceData, checks: _Checks) -> None:
    work = data.device_work
    checks.none(work.duration < 0, "device work {} ends before it begins")
    checks.none(work.launch > work.start, "device work {} begins before the host asked for it")


def _possible(data: TraceData, checks: _Checks) -> None:
    """Where it is certain what an op demands of its tensors, they are so. Subclasses may do as they like."""
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
        found = np.flatnonzero(ran & (ops.name == number))
        if name in _VIEWS:
            one, made = np.diff(ops.input_offsets)[found] == 1, np.diff(ops.output_offsets)[found] == 1
            found = found[one & made]
            first, second = ops.inputs[ops.input_offsets[found]], ops.outputs[ops.output_offsets[found]]
        else:
            found = found[np.diff(ops.input_offsets)[found] >= 2]
            first, second = (ops.inputs[ops.input_offsets[found + 1] + place] for place in _ALIKE[name])
        differ = kinds[values.meta[first]] != kinds[values.meta[second]]
        wrong[found[differ & known[first] & known[second]]] = True
    checks.none(wrong, "op {} has tensors of two dtypes or devices, which it cannot have run on")


__all__ = ["RAISED", "Report", "validate"]
