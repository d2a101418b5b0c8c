"""The parameters whose gradients a program sums over ranks by itself: one by one, in buckets, or as means.

An optimizer reads a gradient after it was reduced, divided, clipped and copied out of a bucket. So each is
followed back to the collective from the value that the optimizer reads, or that is added to its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sightline.data.trace_data import I32, KINDS, TraceData
from sightline.ranks.collectives import Collective, Collectives, kind_of

_PARAMETER: Final = KINDS.index("parameter")
_GRADIENT: Final = ".grad"
#: Collectives after which all ranks of the group have the same numbers.
_EQUAL_AFTER: Final = frozenset(("all_reduce", "all_gather", "broadcast"))
#: Ops that only scale, combine, convert or rearrange a gradient.
_CARRIES: Final = frozenset(
    "mul div add sub sum mean copy clone detach alias view reshape _unsafe_view view_as slice select narrow "
    "split split_with_sizes chunk unbind as_strided unflatten squeeze unsqueeze permute t transpose cat "
    "stack _to_copy to clamp lerp where nan_to_num contiguous "
    "_foreach_mul _foreach_div _foreach_add _foreach_copy".split()
)
_MOST: Final = 64  #: values on the way from a gradient to its collective


@dataclass(frozen=True, slots=True)
class Reduction:
    """The collective that a gradient comes from."""

    place: int  #: its line
    group: str


def reduced_gradients(data: TraceData, collectives: Collectives, op_places: I32) -> dict[str, Reduction]:
    """The parameters whose gradients are reduced by hand, each with its first reduction."""
    equal = {each.op: each for each in collectives if each.kind in _EQUAL_AFTER}
    if not equal:
        return {}
    reduced = _ReducedValues(data, equal)
    reductions: dict[str, Reduction] = {}
    for name, values in _gradients(data):
        call = next(filter(None, map(reduced.origin, values)), None)
        if call is not None and name not in reductions:
            reductions[name] = Reduction(int(op_places[call.op]), call.group)
    return reductions


def _gradients(data: TraceData) -> Iterator[tuple[str, list[int]]]:
    """Each parameter with values that may be its reduced gradients: those of its first and its last step.

    Where no optimizer has named its gradient, these are values that updates add to the parameter: averages of
    parameters that are copied to it are no gradients.
    """
    values, names = data.values, data.names
    named: dict[str, list[int]] = {}
    for value in np.flatnonzero(values.name >= 0).tolist():
        name = names[values.name[value]]
        if name.endswith(_GRADIENT):
            named.setdefault(name.removesuffix(_GRADIENT), []).append(value)
    added: dict[str, list[int]] = {}
    updated = np.flatnonzero((values.kind == _PARAMETER) & (values.name >= 0) & (values.previous >= 0))
    for value in updated.tolist():
        name = names[values.name[value]]
        op = int(values.producer[value])
        if name in named or op < 0 or len(added.get(name, ())) >= 4:
            continue
        op_name, previous = names[data.ops.name[op]], int(values.previous[value])
        is_copy = _plain(op_name) == "copy" or bool(kind_of(op_name))
        addends = [each for each in _inputs(data, op, value) if each != previous] if not is_copy else []
        added.setdefault(name, []).extend(addends)
    yield from ((name, [gradients[0], *gradients[-1:]]) for name, gradients in named.items())
    yield from added.items()


def _plain(name: str) -> str:
    """The name of an op without its overload, and of its form that writes in place.

    >>> _plain("div_.Tensor"), _plain("_foreach_mul_.Scalar")
    ('div', '_foreach_mul')
    """
    return name.partition(".")[0].rstrip("_")


def _inputs(data: TraceData, op: int, output: int) -> Iterator[int]:
    """The inputs of an op that may hold the numbers of one of its outputs: those that are large enough.

    Of an op on a list of tensors, those at the place of the output.
    """
    inputs: list[int] = list(map(int, data.ops.inputs_of(op)))
    if data.names[data.ops.name[op]].startswith("_foreach"):
        outputs = list(map(int, data.ops.outputs_of(op)))
        if output in outputs:
            inputs = inputs[outputs.index(output) :: max(len(outputs), 1)]
    metas, meta = data.metas, data.values.meta
    size = metas[meta[output]].numel
    # A factor of one element, such as that of clipping, is no gradient.
    rest = [value for value in inputs if metas[meta[value]].numel >= size]
    yield from inputs if _plain(data.names[data.ops.name[op]]) in ("cat", "stack") else rest


class _ReducedValues:
    """The collectives that values come from."""

    def __init__(self, data: TraceData, equal: dict[int, Collective]) -> None:
        self._data, self._equal = data, equal
        #: The results of a collective may be read through other views of its tensors.
        self._by_storage: dict[int, Collective] = {}
        for op, call in equal.items():
            if call.kind == "all_reduce":
                for value in (*data.ops.inputs_of(op), *data.ops.outputs_of(op)):
                    self._by_storage.setdefault(int(data.values.storage[value]), call)

    def origin(self, value: int) -> Collective | None:
        """The collective that a value comes from, by ops that only carry it on; None if there is none."""
        data, left, seen = self._data, [value], {value}
        while left and len(seen) <= _MOST:
            each = left.pop()
            op = int(data.values.producer[each])
            if op in self._equal:
                return self._equal[op]
            by_storage = self._by_storage.get(int(data.values.storage[each]))
            if by_storage is not None and data.values.kind[each] != _PARAMETER:
                return by_storage
            if op < 0:
                continue
            before = [int(data.values.previous[each]), int(data.values.base[each])]
            name = data.names[data.ops.name[op]]
            carried = list(_inputs(data, op, each)) if _plain(name) in _CARRIES else []
            if _plain(name) in ("copy", "_foreach_copy"):
                before = before[1:]  # the old contents are overwritten
            elif not carried:
                before = []
            new = [one for one in (*before, *carried) if one >= 0 and one not in seen]
            seen.update(new)
            left += new
        return None
