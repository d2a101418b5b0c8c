"""The producer of each value, in the units a reader thinks in, and the values it read.

A producer is an API call with the aten ops inside it, an aten op outside every API call, all ops that the
backward pass ran for one of these, a module call whose ops were not recorded, or a view. Producers are
integers, computed for all ops at once, so that long runs stay cheap.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.row_groups import flat_positions
from sightline.data.index import Index, Op, Value
from sightline.data.trace_data import I32, I64, KINDS, LEVELS, PHASES, TraceData

_MAX_VERSIONS: Final = 400  #: of a value that are followed back
NO_PRODUCER: Final = -1  #: of values that existed before the recording, or came from outside
_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")
_WEIGHTS: Final = (KINDS.index("parameter"), KINDS.index("buffer"))
_ACTIVATION, _CONSTANT = KINDS.index("activation"), KINDS.index("constant")


class Producers:
    """The producers of a recording at a level: "api" joins the aten ops of a call, "aten" does not.

    Results of the ops in ``excluded`` have no producer. With a ``target``, neither has any other parameter
    that was only initialised.
    """

    def __init__(
        self, index: Index, level: str, excluded: NDArray[np.bool_] | None = None, target: int | None = None
    ) -> None:
        data = index.raw
        ops, values = data.ops, data.values
        self._data = data
        self._groups = _groups(index) if level == "api" else np.arange(len(ops), dtype=np.int64)
        self._first_call = 2 * len(ops)  # numbers below are of ops, and of backward passes of ops
        self._first_value = self._first_call + len(data.calls)
        has_op = values.producer >= 0
        if excluded is not None:
            has_op &= ~np.append(excluded, False)[values.producer]
        of_value = np.where(has_op, self._groups[values.producer] if len(ops) else 0, NO_PRODUCER)
        alias = (values.producer < 0) & ((values.base >= 0) | (values.previous >= 0))
        of_value[alias] = self._first_value + np.flatnonzero(alias)
        for value, call in _returning_calls(index).items():
            if of_value[value] == NO_PRODUCER and values.kind[value] == _ACTIVATION:
                of_value[value] = self._first_call + call
        if target is not None:
            # Weights as they were initialised, outside every module call and before any optimizer.
            weights = np.flatnonzero(np.isin(values.kind, _WEIGHTS) & (values.producer >= 0))
            producers = values.producer[weights]
            initialised = weights[(ops.phase[producers] == _FORWARD) & (ops.call[producers] < 0)]
            of_value[initialised[initialised != target]] = NO_PRODUCER
        self._of: list[int] = of_value.tolist()
        self._order = np.argsort(self._groups, kind="stable")
        self._starts = _bounds(self._groups, self._first_call)
        self._backward = np.zeros(self._first_value + len(values), dtype=np.bool_)
        producers, first_ops = np.unique(self._groups, return_index=True)
        self._backward[producers] = ops.phase[first_ops] == _BACKWARD
        self._read_inputs(of_value)

    def _read_inputs(self, of_value: I64) -> None:
        """Set the inputs and the predecessors of all producers that are ops."""
        ops, kinds = self._data.ops, self._data.values.kind
        positions, lengths = flat_positions(ops.input_offsets, self._order)
        inputs, op = ops.inputs[positions], np.repeat(self._order, lengths)
        producer = self._groups[op]
        # Constants that only the aten ops inside an API call read are not inputs of the call.
        external = ((op == producer) | (kinds[inputs] != _CONSTANT)) & (of_value[inputs] != producer)
        inputs, producer = inputs[external], producer[external]
        self._inputs, self._input_starts = inputs, _bounds(producer, self._first_call)
        # Values that a backward op reads of the forward pass were saved for it, and are not followed.
        before = of_value[inputs]
        followed = (before != NO_PRODUCER) & (self._backward[before] | ~self._backward[producer])
        # Lists: a lineage visits the producers of a long run one by one.
        self._predecessors: list[int] = before[followed].tolist()
        self._predecessor_starts: list[int] = _bounds(producer[followed], self._first_call).tolist()

    def of(self, value: int) -> int:
        """The producer of a value, or `NO_PRODUCER`."""
        return self._of[value]

    def ops(self, producer: int) -> list[int]:
        """The ops of a producer, in the order they ran; none for a module call and a view."""
        if producer >= self._first_call:
            return []
        ops: list[int] = self._order[self._starts[producer] : self._starts[producer + 1]].tolist()
        return ops

    def head(self, producer: int) -> int:
        """The op that names a producer and gives its line, of a backward pass the forward op; -1 without."""
        if producer < len(self._groups):
            return producer
        ops = self.ops(producer)
        return int(self._heads[self._data.ops.forward[ops[0]]]) if ops else -1

    def call(self, producer: int) -> int:
        """The module call that a producer is, or -1."""
        return producer - self._first_call if self._first_call <= producer < self._first_value else -1

    def is_backward(self, producer: int) -> bool:
        """Whether a producer is the backward pass of an op."""
        return len(self._groups) <= producer < self._first_call

    def in_backward(self, producer: int) -> bool:
        """Whether a producer ran in the backward pass."""
        return bool(self._backward[producer])

    def recency(self, producer: int) -> int:
        """A number to compare by: the higher, the later it ran."""
        ops = self.ops(producer)
        if ops:
            return ops[-1]
        call = self.call(producer)
        return int(self._data.calls.order[call]) if call >= 0 else producer - self._first_value

    def sources(self, producer: int) -> list[int]:
        """The inputs of a producer, each once, in the order of its arguments."""
        data = self._data
        call = self.call(producer)
        if call >= 0:
            offsets = data.calls.input_offsets
            return _unique(data.calls.inputs[offsets[call] : offsets[call + 1]].tolist())
        if producer >= self._first_value:
            value = producer - self._first_value
            return [
                int(source[value])
                for source in (data.values.base, data.values.previous)
                if source[value] >= 0
            ][:1]
        return _unique(self._inputs[self._input_starts[producer] : self._input_starts[producer + 1]].tolist())

    def predecessors(self, producer: int) -> list[int]:
        """The producers of its inputs, except those a backward op reads from the forward pass."""
        if producer < self._first_call:
            start, end = self._predecessor_starts[producer], self._predecessor_starts[producer + 1]
            return _unique(self._predecessors[start:end])
        producers = _unique([self._of[value] for value in self.sources(producer)])
        return [each for each in producers if each not in (NO_PRODUCER, producer)]

    def visible_base(self, value: int) -> int:
        """The base of a view made inside an API call: the weight, not its transpose in a linear."""
        values = self._data.values
        while values.base[value] >= 0 and value not in self._returned:
            value = int(values.base[value])
        return value

    @cached_property
    def _heads(self) -> I64:
        """For each op, the API call it is shown as, or itself."""
        ops = self._data.ops
        inside = (ops.parent >= 0) & (ops.phase != _BACKWARD) & (self._groups < len(ops))
        return np.where(inside, self._groups, np.arange(len(ops)))

    @cached_property
    def _returned(self) -> set[int]:
        """The values that the op or call the user wrote returned."""
        ops = self._data.ops
        writers = np.repeat(np.arange(len(ops)), np.diff(ops.output_offsets))
        outer = self._groups[writers] == writers
        return set(ops.outputs[outer].tolist())


def written_calls(data: TraceData) -> I32:
    """For each op the API call the user wrote that ran it; -1 where there is none.

    Nobody wrote the ops inside ``loss.backward()``: they stand for themselves.
    """
    ops = data.ops
    if not len(ops):
        return ops.parent
    inside = (ops.parent >= 0) & (ops.phase != _BACKWARD) & (ops.phase[ops.parent] == ops.phase)
    return np.where(inside, ops.parent, -1).astype(np.int32)


def _groups(index: Index) -> I64:
    """For each op its producer: the API call it came from, or the backward pass of one."""
    ops = index.raw.ops
    count = len(ops)
    if not count:
        return np.arange(0, dtype=np.int64)
    backward = ops.phase == _BACKWARD
    written = written_calls(index.raw)
    groups = np.where(written >= 0, written, np.arange(count, dtype=np.int64))
    back = np.flatnonzero(backward & (ops.forward >= 0) & (ops.level == LEVELS.index("aten")))
    keys = groups[ops.forward[back]] * (count + 1) + ops.parent[back] + 1  # once for each backward pass
    groups[back] = count + np.unique(keys, return_inverse=True)[1].reshape(-1)
    return groups


def _returning_calls(index: Index) -> dict[int, int]:
    """For each value without an op, the innermost module call that returned it and did not take it."""
    calls, values = index.raw.calls, index.raw.values
    returning: dict[int, int] = {}
    if not len(calls) or not ((values.producer < 0) & (values.kind == _ACTIVATION)).any():
        return returning
    inputs, outputs = calls.input_offsets.tolist(), calls.output_offsets.tolist()
    for call in np.argsort(calls.order, kind="stable").tolist():
        call_inputs = set(calls.inputs[inputs[call] : inputs[call + 1]].tolist())
        for value in calls.outputs[outputs[call] : outputs[call + 1]].tolist():
            if value not in call_inputs:
                returning.setdefault(value, call)
    return returning


def _bounds(numbers: I64, size: int) -> I64:
    """The start of each number below ``size`` in a sorted array, and the end of the last."""
    return np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=size))])


def _unique(ids: list[int]) -> list[int]:
    return list(dict.fromkeys(ids))


def creator(value: Value) -> Op | None:
    """The op that made a parameter's tensor, if that was recorded; one that changed it in place did not."""
    at = value
    for _ in range(_MAX_VERSIONS):
        before = at.previous or (at.base if at.producer is None else None)
        if before is None:
            break
        at = before
    if at.previous is None and at.producer is not None:
        return at.producer
    if value.storage < 0:
        return None
    values = value._data.raw.values  # the first tensor in its storage is the argument of ``nn.Parameter``
    first = int(values.producer[np.flatnonzero(values.storage == value.storage)[0]])
    return value._data.ops[first] if first >= 0 else None
