"""Loops whose sizes grow: the steps of a decoder, each with one token more than the one before.

`grown` folds what `fold` leaves apart because a size or a whole number differs, where it changes by the same
amount from one run of the body to the next, over three runs or more: ``f32[1, 5…9, 64]`` and ``×5`` then say
every size. `Looks` knows what ops have in common when sizes are left out. For the view of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np

from sightline.analysis.fold import Node, Repeat, fold
from sightline.notation import constant_text, tensor_text
from sightline.trace.data import TraceData
from sightline.trace.forms import Form, Record, Symbol

_LEAST: Final = 3  #: two runs always differ by some amount; it takes a third to see that it stays the same
_SIZE: Final = "int"  #: stands for a whole number that may differ

Sizes = tuple[int, ...]
#: What an op is when sizes are left out, and the sizes.
Loose = Callable[[int], tuple[Hashable, Sizes]]


def grown(nodes: Sequence[Node], loose: Loose) -> list[Node]:
    """The folded sequence with the repeats that differ in sizes only folded, too.

    >>> sizes = {0: 5, 1: 6, 2: 7, 3: 9}
    >>> grown([0, 1, 2, 3], lambda at: ("mm", (sizes[at],)))
    [Repeat(body=(0,), count=3), 3]
    """
    looks: dict[int, tuple[Hashable, Sizes]] = {}

    def key(node: Node) -> Hashable:
        if isinstance(node, Repeat):
            return node.count, tuple(map(key, node.body))
        if node not in looks:
            looks[node] = loose(node)
        return looks[node][0]

    def sizes(node: Node) -> list[int]:
        if isinstance(node, Repeat):
            return [size for part in node.body for size in sizes(part)]
        return list(looks[node][1])

    def folded(part: Sequence[Node]) -> list[Node]:
        made: list[Node] = []
        for found in fold([key(node) for node in part]):
            if isinstance(found, int):
                made.append(part[found])
                continue
            start, period = _first(found), sum(map(_length, found.body))
            runs = [part[start + run * period : start + (run + 1) * period] for run in range(found.count)]
            nested = any(isinstance(inner, Repeat) for inner in found.body)
            table = np.array([[size for node in run for size in sizes(node)] for run in runs], dtype=np.int64)
            for first, count in _stretches(table):
                if count > 1:
                    made.append(Repeat(tuple(runs[first]), count))
                else:
                    made += folded(runs[first]) if nested else runs[first]
        return made

    return folded(nodes)


def _stretches(table: Any) -> list[tuple[int, int]]:
    """The rows as (first, count) of stretches that change by a constant amount; alone where none does."""
    steps = np.diff(table, axis=0)
    same = (steps[1:] == steps[:-1]).all(axis=1).tolist() if len(steps) else []
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(table):
        count = 2
        while at + count < len(table) and same[at + count - 2]:
            count += 1
        if at + count > len(table) or (count < _LEAST and steps[at].any()):
            count = 1
        found.append((at, count))
        at += count
    return found


def _first(node: Node) -> int:
    while isinstance(node, Repeat):
        node = node.body[0]
    return node


def _length(node: Node) -> int:
    return node.count * sum(map(_length, node.body)) if isinstance(node, Repeat) else 1


class Looks:
    """What the ops of a trace look like with their sizes left out, and how several are written as one."""

    def __init__(self, data: TraceData) -> None:
        self._data = data
        self._forms: dict[int, tuple[Hashable, Sizes]] = {-1: ((), ())}

    def loose(self, op: int) -> tuple[Hashable, Sizes]:
        """An op without its sizes, and its sizes."""
        ops = self._data.ops
        given, taken = self._form(int(ops.form[op]))
        made, returned = self._form(int(ops.result[op]))
        sizes = [*taken, *returned]
        kinds: list[Hashable] = []
        for value in (*self.inputs(op), *self.outputs(op)):
            meta = self._data.metas[self._data.values.meta[value]]
            sizes += meta.shape
            kinds.append((len(meta.shape), meta.dtype, meta.device, meta.layout, meta.type))
        key = (int(ops.name[op]), int(ops.phase[op]), int(ops.flags[op]), given, made, tuple(kinds))
        return key, tuple(sizes)

    def inputs(self, op: int) -> list[int]:
        ops = self._data.ops
        found: list[int] = ops.inputs[ops.input_offsets[op] : ops.input_offsets[op + 1]].tolist()
        return found

    def outputs(self, op: int) -> list[int]:
        ops = self._data.ops
        found: list[int] = ops.outputs[ops.output_offsets[op] : ops.output_offsets[op + 1]].tolist()
        return found

    def form(self, column: Any, first: int, last: int) -> Form:
        """The form of two ops that differ in sizes only: ``5…9`` where a number does."""
        one, other = (int(column[op]) for op in (first, last))
        form = self._data.forms[one]
        return form if one == other else _both(form, self._data.forms[other])

    def tensor(self, first: int, last: int) -> str:
        """Two values that differ in sizes only: ``f32[1, 5…9, 64]``."""
        metas, ids = self._data.metas, self._data.values.meta
        one, other = metas[ids[first]], metas[ids[last]]
        sizes: list[Any] = [_spread(a, b) for a, b in zip(one.shape, other.shape, strict=True)]
        return tensor_text(sizes, one.dtype, one.device, one.layout)

    def _form(self, form: int) -> tuple[Hashable, Sizes]:
        if form not in self._forms:
            numbers: list[int] = []
            whole = self._data.forms[form]
            key = (_bare(whole.args, numbers), _bare(whole.kwargs, numbers))
            self._forms[form] = (key, tuple(numbers))
        return self._forms[form]


def _bare(item: Any, numbers: list[int]) -> Hashable:
    """An argument with its whole numbers taken out and put into ``numbers``."""
    if type(item) is int and abs(item) < 1 << 62:  # the ends of open slices stay as they are
        numbers.append(item)
        return _SIZE
    if isinstance(item, list | tuple):
        return (type(item).__name__, *(_bare(part, numbers) for part in item))
    if isinstance(item, dict):
        return tuple((key, _bare(part, numbers)) for key, part in item.items())
    if isinstance(item, Record):
        return (item.type, _bare(item.fields, numbers))
    return (type(item).__name__, constant_text(item))


def _both(one: Any, other: Any) -> Any:
    """Two arguments that differ in whole numbers only, as one."""
    if isinstance(one, Form):
        return Form(_both(one.args, other.args), _both(one.kwargs, other.kwargs))
    if type(one) is int:
        return one if one == other else Symbol(_spread(one, other))
    if isinstance(one, list | tuple):
        return type(one)(_both(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return {key: _both(part, other[key]) for key, part in one.items()}
    if isinstance(one, Record):
        return Record(one.type, _both(one.fields, other.fields))
    return one


def _spread(first: int, last: int) -> str:
    return constant_text(first) if first == last else f"{first}…{last}"
