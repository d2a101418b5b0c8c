"""What made each value, as a reader wants it told, and what it was made from.

A maker is an API call with the aten ops inside it, an aten op that came from none, all that the backward pass
did for one of these, a module call the inside of which was not recorded, or a mere view. Makers are whole
numbers: the value of a maker of ops is worked out for all ops at once, so that long runs stay cheap.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.row_groups import list_places
from sightline.trace.data import I64, KINDS, LEVELS, PHASES
from sightline.trace.index import Index

NOBODY: Final = -1  #: the maker of what was there before, or came from outside
_BACKWARD: Final = PHASES.index("backward")
_ACTIVATION, _CONSTANT = KINDS.index("activation"), KINDS.index("constant")


class Producers:
    """Who made what, at a level: "api" takes the aten ops of a call together, "aten" does not.

    What the ops in ``left_out`` made has no maker; nor, for a value that is ``asked`` for, has any other
    parameter that was only initialised.
    """

    def __init__(
        self, index: Index, level: str, left_out: NDArray[np.bool_] | None = None, asked: int | None = None
    ) -> None:
        data = index.raw
        ops, values = data.ops, data.values
        self._data = data
        self._groups = _groups(index) if level == "api" else np.arange(len(ops), dtype=np.int64)
        self._first_call = 2 * len(ops)  # numbers below are of ops, and of backward passes of ops
        self._first_value = self._first_call + len(data.calls)
        made = values.producer >= 0
        if left_out is not None:  # what such ops made is taken as it is
            made &= ~np.append(left_out, False)[values.producer]
        by = np.where(made, self._groups[values.producer] if len(ops) else 0, NOBODY)
        alias = (values.producer < 0) & ((values.base >= 0) | (values.previous >= 0))
        by[alias] = self._first_value + np.flatnonzero(alias)
        for value, call in _returned(index).items():
            if by[value] == NOBODY and values.kind[value] == _ACTIVATION:
                by[value] = self._first_call + call
        if asked is not None:
            first = _initialised(index)
            first[asked] = False
            by[first] = NOBODY
        self._of: list[int] = by.tolist()
        self._order = np.argsort(self._groups, kind="stable")
        self._starts = _bounds(self._groups, self._first_call)
        self._backward = np.zeros(self._first_value + len(values), dtype=np.bool_)
        makers, leading = np.unique(self._groups, return_index=True)
        self._backward[makers] = ops.phase[leading] == _BACKWARD
        self._read_inputs(by)

    def _read_inputs(self, by: I64) -> None:
        """What each maker of ops was given, and the makers before it, for all of them at once."""
        ops, kinds = self._data.ops, self._data.values.kind
        places, lengths = list_places(ops.input_offsets, self._order)
        given, op = ops.inputs[places], np.repeat(self._order, lengths)
        maker = self._groups[op]
        # Inside an API call: what it was not given itself, but read all the same.
        kept = ((op == maker) | (kinds[given] != _CONSTANT)) & (by[given] != maker)
        given, maker = given[kept], maker[kept]
        self._given, self._given_starts = given, _bounds(maker, self._first_call)
        # What a backward op reads of the forward pass was saved for it, and is not followed.
        earlier = by[given]
        followed = (earlier != NOBODY) & (self._backward[earlier] | ~self._backward[maker])
        # Lists: the makers of a long run are gone through one by one.
        self._earlier: list[int] = earlier[followed].tolist()
        self._earlier_starts: list[int] = _bounds(maker[followed], self._first_call).tolist()

    def of(self, value: int) -> int:
        """The maker of a value, or `NOBODY`."""
        return self._of[value]

    def ops(self, maker: int) -> list[int]:
        """The ops of a maker, in the order they ran; none for a module call and a view."""
        if maker >= self._first_call:
            return []
        found: list[int] = self._order[self._starts[maker] : self._starts[maker + 1]].tolist()
        return found

    def head(self, maker: int) -> int:
        """The op that gives a maker its name and its line, of a backward pass a forward one; -1 if none."""
        if maker < len(self._groups):
            return maker
        ops = self.ops(maker)
        return int(self._written[self._data.ops.forward[ops[0]]]) if ops else -1

    def call(self, maker: int) -> int:
        """The module call a maker is; -1 if it is none."""
        return maker - self._first_call if self._first_call <= maker < self._first_value else -1

    def is_backward(self, maker: int) -> bool:
        """Whether a maker is what the backward pass did for an op."""
        return len(self._groups) <= maker < self._first_call

    def in_backward(self, maker: int) -> bool:
        """Whether a maker ran in the backward pass."""
        return bool(self._backward[maker])

    def recency(self, maker: int) -> int:
        """When it was done, to compare: higher is more recent."""
        ops = self.ops(maker)
        if ops:
            return ops[-1]
        call = self.call(maker)
        return int(self._data.calls.order[call]) if call >= 0 else maker - self._first_value

    def sources(self, maker: int) -> list[int]:
        """The values a maker was given, each once, in the order of its arguments."""
        data = self._data
        call = self.call(maker)
        if call >= 0:
            offsets = data.calls.input_offsets
            return _unique(data.calls.inputs[offsets[call] : offsets[call + 1]].tolist())
        if maker >= self._first_value:
            value = maker - self._first_value
            return [
                int(source[value])
                for source in (data.values.base, data.values.previous)
                if source[value] >= 0
            ][:1]
        return _unique(self._given[self._given_starts[maker] : self._given_starts[maker + 1]].tolist())

    def earlier(self, maker: int) -> list[int]:
        """The makers of what a maker was given, but for what a backward op reads of the forward pass."""
        if maker < self._first_call:
            return _unique(self._earlier[self._earlier_starts[maker] : self._earlier_starts[maker + 1]])
        made_by = _unique([self._of[value] for value in self.sources(maker)])
        return [each for each in made_by if each not in (NOBODY, maker)]

    def settled(self, value: int) -> int:
        """What a view made inside a call is a view of: the weight, not its transpose in a linear."""
        values = self._data.values
        while values.base[value] >= 0 and value not in self._handed_out:
            value = int(values.base[value])
        return value

    @cached_property
    def _written(self) -> I64:
        """For each op the one that stands for it in the text, backward or not."""
        ops = self._data.ops
        held = (ops.parent >= 0) & (ops.phase != _BACKWARD) & (self._groups < len(ops))
        return np.where(held, self._groups, np.arange(len(ops)))

    @cached_property
    def _handed_out(self) -> set[int]:
        """The values that the op or call the user wrote gave back."""
        ops = self._data.ops
        writers = np.repeat(np.arange(len(ops)), np.diff(ops.output_offsets))
        outer = self._groups[writers] == writers
        return set(ops.outputs[outer].tolist())


def _initialised(index: Index) -> NDArray[np.bool_]:
    """Parameters and buffers as they were made, outside every module call and before any optimizer."""
    data = index.raw
    values, ops = data.values, data.ops
    held = np.isin(values.kind, [KINDS.index("parameter"), KINDS.index("buffer")]) & (values.producer >= 0)
    found = np.zeros(len(values), dtype=np.bool_)
    makers = values.producer[held]
    found[held] = (ops.phase[makers] == PHASES.index("forward")) & (ops.call[makers] < 0)
    return found


def _groups(index: Index) -> I64:
    """For each op the number of its maker: the API call it came from, or what it is the backward pass of."""
    ops = index.raw.ops
    count = len(ops)
    groups = np.arange(count, dtype=np.int64)
    if not count:
        return groups
    backward = ops.phase == _BACKWARD
    # ``loss.backward()`` is no call that made a gradient; what it ran inside is told op by op.
    held = (ops.parent >= 0) & ~backward & (ops.phase[ops.parent] == ops.phase)
    groups[held] = ops.parent[held]
    back = np.flatnonzero(backward & (ops.forward >= 0) & (ops.level == LEVELS.index("aten")))
    keys = groups[ops.forward[back]] * (count + 1) + ops.parent[back] + 1  # once for each backward pass
    groups[back] = count + np.unique(keys, return_inverse=True)[1].reshape(-1)
    return groups


def _returned(index: Index) -> dict[int, int]:
    """For each value that no op made, the innermost module call that gave it back and was not given it."""
    calls, values = index.raw.calls, index.raw.values
    found: dict[int, int] = {}
    if not len(calls) or not ((values.producer < 0) & (values.kind == _ACTIVATION)).any():
        return found
    inputs, outputs = calls.input_offsets.tolist(), calls.output_offsets.tolist()
    for call in np.argsort(calls.order, kind="stable").tolist():
        given = set(calls.inputs[inputs[call] : inputs[call + 1]].tolist())
        for value in calls.outputs[outputs[call] : outputs[call + 1]].tolist():
            if value not in given:
                found.setdefault(value, call)
    return found


def _bounds(numbers: I64, size: int) -> I64:
    """Where each of the numbers below ``size`` begins among some that are sorted, and where the last ends."""
    return np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=size))])


def _unique(ids: list[int]) -> list[int]:
    return list(dict.fromkeys(ids))
