"""Checks of the tables of a trace that is loaded or about to be saved.

Every id points at a row that exists, offsets are in order, nothing is its own ancestor: whatever a file
contains, no view hits a bad id or loops forever. Whether a recording makes sense beyond that is checked by
`sightline.data.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.data import trace_data as d
from sightline.schema.columns import column_of
from sightline.store.bundle_schema import MAX_LINKS, MAX_NESTING, length_name
from sightline.store.damage import Damage, quoted

Array = NDArray[Any]

#: The types that views expect in ``info``, for the keys that are present.
_INFO: Final[dict[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("name", "ops", "torch", "python", "compiled", "device", "time"), (str, type(None))),
    **dict.fromkeys(("pid", "duration_ns", "fault_count", "external", "threads", "checked", "left_out",
                     "unrecorded_calls", "last", "dropped", "evicted", "device_own_ns"), (int, type(None))),
    **dict.fromkeys(("exception", "check", "note", "engine", "engine_reason",
                     "unrecorded_module"), (str, type(None))),
    **dict.fromkeys(("faults", "contradictions"), list),
    "allow": (list, tuple, type(None)),
    "failure": dict,
    "training": dict,
    **dict.fromkeys(("gradients", "unregistered", "same_weights", "warnings"), list),
    "allocator": dict,
    **dict.fromkeys(("rank", "local_rank", "world_size", "restart", "began_ns", "seed"), int),
    **dict.fromkeys(("job", "rank_device"), str),
    **dict.fromkeys(("groups", "waits"), dict),
    **dict.fromkeys(("meshes", "dropped_collectives"), list),
}  # fmt: skip


def check_info(info: Mapping[str, Any]) -> None:
    """The values of ``info`` have the types that views expect.

    >>> check_info({"name": "run", "external": 0, "something": [1]})
    """
    for name, kinds in _INFO.items():
        if name in info and not isinstance(info[name], kinds):
            raise Damage(f"its info has an invalid {name!r}: {quoted(info[name])}")
    if not all(type(text) is str for text in info.get("contradictions", ())):
        raise Damage("its list of contradictions is malformed")
    for row in info.get("dropped_collectives", ()):
        if not isinstance(row, list | tuple) or [*map(type, row)] != [str, int, int]:
            raise Damage(f"its info has invalid dropped collectives: {quoted(row)}")
    for device, readings in info.get("allocator", {}).items():
        numbers = readings if isinstance(readings, dict) else {}
        pairs = [numbers.get(name) for name in ("allocated", "reserved", "most")]
        valid = all(isinstance(pair, list | tuple) and [*map(type, pair)] == [int, int] for pair in pairs)
        if type(device) is not str or not valid:
            raise Damage(f"its info has an invalid allocator of {quoted(device)}: {quoted(readings)}")


def check_column(kind: str, name: str, column: Array, counts: Mapping[str, int]) -> None:
    """Check one column by itself; raises `Damage`.

    >>> check_column("frames", "code", np.array([0, 7], dtype=np.int32), {"frames": 2, "codes": 3})
    Traceback (most recent call last):
    sightline.store.damage.Damage: frames/code of row 1 points at 7 of 3
    """
    if name.endswith("_offsets"):
        flat = counts[f"{kind}.{name.removesuffix('_offsets')}s"]
        fits = len(column) == counts[kind] + 1 and column[0] == 0 and column[-1] == flat
        if not fits or (np.diff(column) < 0).any():
            raise Damage(f"{kind}/{name} does not fit the {flat} ids it should cut into lists")
        return
    rows = counts[length_name(kind, name)]
    if len(column) != rows:
        raise Damage(f"{kind}/{name} has {len(column)} rows, not {rows}")
    _check_ids(kind, name, column, counts)
    declared = column_of(kind, name)
    if declared and declared.meaning.earlier:
        forward = column >= np.arange(len(column))
        if forward.any():
            raise Damage(f"{kind}/{name} of row {int(np.argmax(forward))} does not point back")
    if declared and declared.meaning.chain:
        check_chains(kind, name, column)
    if (kind, name) == ("stats", "value") and (np.diff(column) <= 0).any():
        raise Damage("the statistics are not in the order of their values")


def check_block(kind: str, name: str, block: Array, first_row: int, counts: Mapping[str, int]) -> None:
    """Check the part of a column that begins at ``first_row``."""
    _check_ids(kind, name, block, counts)
    declared = column_of(kind, name)
    earlier = declared is not None and declared.meaning.earlier
    if earlier and (block >= np.arange(first_row, first_row + len(block))).any():
        raise Damage(f"{kind}/{name} does not point back")
    if name in ("first_op", "end_op") and len(block):
        _check_range(kind, name, block, 0, counts["ops"] + 1)


def _check_ids(kind: str, name: str, column: Array, counts: Mapping[str, int]) -> None:
    declared = column_of(kind, name)
    if declared is None or not declared.is_reference:
        return
    size = len(declared.meaning.choices) or counts[declared.meaning.target]
    low = declared.lowest
    if name.endswith("_form") and not size:
        low = 0  # a call without forms could not be shown
    _check_range(kind, name, column, low, size)


def _check_range(kind: str, name: str, column: Array, low: int, size: int) -> None:
    if len(column) and (column.min() < low or column.max() >= size):
        row = int(np.argmax((column < low) | (column >= size)))
        raise Damage(f"{kind}/{name} of row {row} points at {int(column[row])} of {size}")


def check_chains(kind: str, name: str, parents: Array) -> None:
    """Bound the total length of all chains, which views print."""
    lengths = chain_lengths(parents)
    if int(lengths.sum()) > MAX_LINKS:
        raise Damage(f"{kind}/{name} makes chains that are too long to be followed")
    if kind == "calls" and int(lengths.max(initial=0)) > MAX_NESTING:
        raise Damage(f"its module calls are more than {MAX_NESTING} deep")


def chain_lengths(parents: Array) -> Array:
    """The number of rows above each, in a table of parents without cycles."""
    lengths = (parents >= 0).astype(np.int64)
    above = parents.astype(np.int64)
    while (above >= 0).any():  # steps double in length each time
        linked = np.flatnonzero(above >= 0)
        lengths[linked] += lengths[above[linked]]
        above[linked] = above[above[linked]]
    return lengths


def check_spans(first: Array, end: Array, counts: Mapping[str, int]) -> None:
    """The ops inside each module call are a valid range."""
    wrong = (first < 0) | (end < first) | (end > counts["ops"])
    if wrong.any():
        call = int(np.argmax(wrong))
        raise Damage(f"call {call} has an invalid range of ops: there are {counts['ops']}")


def check_modules(modules: Sequence[d.ModuleInfo]) -> None:
    """The modules are a tree."""
    count = len(modules)
    depths: dict[int, int] = {-1: 0}
    for number, module in enumerate(modules):
        if not -1 <= module.parent < count or not 0 <= module.root < count:
            raise Damage(f"module {number} belongs to one that is not there")
        path: dict[int, None] = {}
        at = number
        while at not in depths:
            if at in path:
                raise Damage(f"module {number} is inside itself")
            path[at] = None
            at = modules[at].parent
            if not -1 <= at < count:
                raise Damage(f"module {number} belongs to one that is not there")
        if depths[at] + len(path) > MAX_NESTING:
            raise Damage(f"its modules are more than {MAX_NESTING} deep")
        depths.update(zip(reversed(path), range(depths[at] + 1, depths[at] + len(path) + 1), strict=True))


def check_steps(steps: Sequence[d.StepInfo], counts: Mapping[str, int]) -> None:
    """Steps are ranges of ops and of module calls."""
    for number, step in enumerate(steps):
        if not (
            0 <= step.first_op <= step.end_op <= counts["ops"]
            and 0 <= step.first_call <= step.end_call <= counts["calls"]
        ):
            raise Damage(f"step {number} has an invalid range of ops or module calls")


def check_captures(captures: Sequence[d.CaptureInfo], counts: Mapping[str, int]) -> None:
    """Captured tensors belong to values that exist."""
    for number, info in enumerate(captures):
        if (
            info.role not in d.ROLES
            or not -1 <= info.value < counts["values"]
            or min(info.shape, default=0) < 0
        ):
            raise Damage(f"captured tensor {number} has an invalid description")


def check_metas(metas: Sequence[d.TensorMeta]) -> None:
    """Sizes are not negative, except -1 for the sizes of nested tensors and for symbols."""
    for number, meta in enumerate(metas):
        least = -1 if meta.layout == "nested" or meta.symbols else 0
        if min(meta.shape, default=0) < least or meta.itemsize < 0:
            raise Damage(f"the metadata {number} has a negative size")
        if meta.symbols and len(meta.symbols) != len(meta.shape):
            raise Damage(f"the metadata {number} has {len(meta.symbols)} symbols for {len(meta.shape)} sizes")
