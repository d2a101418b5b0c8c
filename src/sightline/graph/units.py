"""What becomes a node of a runtime graph: an API call with the aten ops inside it, an aten op, a module call.

A unit is an op id, or for a module call ``len(ops) + call id``. Whatever runs inside a unit belongs to it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sightline.trace.data import FLAVOURS, I64, LEVELS, PHASES
from sightline.trace.tables import Index

API, ATEN = LEVELS.index("api"), LEVELS.index("aten")
_OPAQUE: Final = FLAVOURS.index("opaque")
_BACKWARD: Final = PHASES.index("backward")
#: The phases each choice of ``phase=`` shows.
SHOWN: Final = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
    "both": ("forward", "backward", "recompute"),
}


def unit_of_op(index: Index, level: str) -> I64:
    """For each op the unit it belongs to; -1 for one that is not shown at this level."""
    ops = index.raw.ops
    count = len(ops)
    units = np.arange(count, dtype=np.int64)
    if not count:
        return units
    if level == "aten":
        units[(ops.level == API) & (ops.flavour != _OPAQUE)] = -1
        return units
    # What a backward pass runs was written by nobody: ``loss.backward()`` is no node that holds it.
    backward = ops.phase == _BACKWARD
    held = (ops.parent >= 0) & ~backward & (ops.phase[ops.parent] == ops.phase)
    units[held] = ops.parent[held]
    starts = np.unique(ops.parent[(ops.parent >= 0) & backward])
    units[starts[(ops.level[starts] == API) & (ops.phase[starts] == _BACKWARD)]] = -1
    if level == "module":
        leaf = leaf_calls(index)
        inside = (units >= 0) & (ops.call >= 0) & ~backward
        calls = ops.call[inside]
        units[inside] = np.where(leaf[calls], count + calls, units[inside])
    return units


def leaf_calls(index: Index) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which module calls called no other module."""
    calls = index.raw.calls
    leaf = np.ones(len(calls), dtype=np.bool_)
    leaf[calls.parent[calls.parent >= 0]] = False
    return leaf


def ordered_units(index: Index, units: I64, level: str, phases: tuple[str, ...]) -> list[int]:
    """The units of these phases, in the order they began."""
    ops, calls = index.raw.ops, index.raw.calls
    wanted = [PHASES.index(phase) for phase in phases]
    meant = (units >= 0) & np.isin(ops.phase, wanted)
    found = dict.fromkeys(units[meant].tolist())
    # A call that ran inside backward (a recomputation) belongs to the phase of its ops.
    if level != "module":
        return sorted(found)
    count = len(ops)
    starts = {unit: unit if unit < count else int(calls.first_op[unit - count]) for unit in found}
    leaf = leaf_calls(index) & np.isin(calls.phase, wanted)
    for call in np.flatnonzero(leaf).tolist():  # also those in which no op was seen
        starts.setdefault(count + call, int(calls.first_op[call]))
    # A call that ran no op began before the op that has the number it would have had.
    return sorted(starts, key=lambda unit: (starts[unit], unit < count, unit))
