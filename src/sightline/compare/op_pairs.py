"""Pairs the ops and values of two recordings.

Module calls are paired first. The ops of a pair of calls are then two sequences, aligned by name, size,
constants and fingerprint. One pass in the order of the run follows the data: layout ops go with their inputs,
and a pair with different values and different inputs is undone and tried again by its inputs. The rest is
paired by statistics: one matrix product for three, a fused op for its parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final, Literal

import numpy as np

from sightline.compare.constants import lone_floats
from sightline.compare.module_pairs import ModulePairs
from sightline.compare.op_names import FACTORIES, ONE_RESULT, UNINITIALIZED_RESULTS
from sightline.compare.sequences import Ints, align
from sightline.compare.side import Side
from sightline.compare.values import UNKNOWN, State, ValueComparer
from sightline.data.trace_data import PHASES

_ROUNDS: Final = 2  #: of pairing by statistics; each may undo a wrong pair
_MAX_SOUGHT: Final = 64  #: ops of one name with the same inputs among which a partner is sought
_OPTIMIZER: Final = PHASES.index("optimizer")
_NEAR: Final = 0.02  #: the relative difference of two norms that may be of one value in two precisions


@dataclass(frozen=True)
class PairedSide:
    """One side of an alignment, with the partners of its ops, values and calls on the other side, or -1."""

    letter: Literal["a", "b"]
    side: Side
    ops: list[int]
    values: list[int]
    calls: Ints

    @property
    def ordinal(self) -> str:
        return "first" if self.letter == "a" else "second"

    def pair(self, own: int, other: int = -1) -> tuple[int, int]:
        """An item of this side and one of the other, that of the first side first."""
        return (own, other) if self.letter == "a" else (other, own)

    @cached_property
    def anchors(self) -> Ints:
        """For each call the nearest one around it, itself included, that has a partner; -1 where none has."""
        parents = self.side.data.calls.parent.tolist()
        anchors = np.full(len(parents), -1, dtype=np.int64)
        for call, parent in enumerate(parents):
            anchors[call] = call if self.calls[call] >= 0 else anchors[parent] if parent >= 0 else -1
        return anchors


class Alignment:
    """Ops and values in pairs: ``ops_a[op]`` and ``values_a[value]`` are their partners, or -1."""

    def __init__(
        self, a: Side, b: Side, compare: ValueComparer, rename: Mapping[str, str] | None = None
    ) -> None:
        self.a, self.b, self.compare = a, b, compare
        self.calls = ModulePairs(a, b, rename)
        self.ops_a: list[int] = [-1] * len(a.data.ops)
        self.ops_b: list[int] = [-1] * len(b.data.ops)
        self.values_a: list[int] = [-1] * len(a.data.values)
        self.values_b: list[int] = [-1] * len(b.data.values)
        self.sides = (
            PairedSide("a", a, self.ops_a, self.values_a, self.calls.of_a),
            PairedSide("b", b, self.ops_b, self.values_b, self.calls.of_b),
        )
        #: Values paired by their statistics, by call.
        self.by_statistics: dict[int, list[tuple[int, int]]] = {}
        self._outcome_pairs: list[tuple[int, int]] = []
        self.outcomes: set[int] = set()  #: values of the first run that leave it
        self._pair_leaves()
        partners = self._align_sequences()
        #: Layout ops of the second side by their input and their name, the first one last.
        self._layout_ops_b: dict[tuple[int, int], list[int]] = defaultdict(list)
        for op in np.flatnonzero(b.compared & b.layout)[::-1].tolist():
            self._layout_ops_b[b.flat_inputs[b.input_offsets[op]], int(b.name[op])].append(op)
        self._ops_by_inputs_b: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        self._first_unpaired: dict[tuple[int, tuple[int, ...]], int] = {}  # into the lists of these ops
        for op in b.computing:
            self._ops_by_inputs_b[self._input_key(op)].append(op)
        self._follow(partners)
        for _ in range(_ROUNDS):
            if not self._pair_by_statistics():
                break
            self._follow({})  # again, with the pairs that the statistics gave

    # -- compared values ----------------------------------------------------------------------

    def compared_values(self) -> Iterator[tuple[int, int]]:
        """The pairs of values to compare: results of ops, of calls and of the runs, and leaves."""
        ignored = self.ignored_values
        for one, other in enumerate(self.values_a):
            if (
                other >= 0
                and one not in ignored
                and (self.a.origin[one] == one or self.b.origin[other] == other)
            ):
                yield one, other
        for x, y in enumerate(self.calls.of_a.tolist()):
            if y < 0:
                continue
            for one, other in self.call_outputs(x, y):
                if self.values_a[one] != other:
                    yield one, other
        yield from self._outcome_pairs

    def pair_outcomes(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Compare values that leave the two runs in the same role, whether or not their ops are pairs."""
        for one, other in pairs:
            self.outcomes.add(one)
            if self.values_a[one] != other:
                self._outcome_pairs.append((one, other))

    def call_outputs(self, x: int, y: int) -> list[tuple[int, int]]:
        """The results of two calls, in pairs.

        Where one side calls a module for parts of the input of the other, the sizes differ and the values
        have no partner: the call around it returns the whole.
        """
        pairs = zip(*self.call_values(x, y, "outputs"), strict=False)
        inner, numel_a, numel_b = self.a.data.calls.parent[x] >= 0, self.a.numel, self.b.numel
        return [(one, other) for one, other in pairs
                if not inner or self.values_a[one] == other or numel_a[one] == numel_b[other]]  # fmt: skip

    @cached_property
    def ignored_values(self) -> set[int]:
        """Results that only serve the backward pass, and uninitialised memory."""
        counts = [
            1 if name in ONE_RESULT else 0 if name in UNINITIALIZED_RESULTS else -1 for name in self.a.names
        ]
        used = np.array(counts or [-1])[self.a.data.ops.name]  # how many results count; -1 for all
        ignored: set[int] = set()
        for op in np.flatnonzero((used >= 0) & self.a.compared).tolist():
            ignored.update(self.a.outputs(op)[int(used[op]) :])
        return ignored

    def position(self, value: int) -> int:
        """The op of the first run that returned a value, or that first used it."""
        producer = self.a.producer[value]
        return producer if producer >= 0 else self.a.leaf_consumers.get(value, [len(self.a.data.ops)])[0]

    def calls_computed_otherwise(self) -> set[int]:
        """Calls whose ops without partners have another constant on each side, or another activation."""
        lone_a, lone_b = (self._lone_ops(each) for each in self.sides)
        result = set()
        for anchor, ops in lone_a.items():
            others = lone_b.get(self._partner_call(anchor), [])
            rows_a, rows_b = self.a.index.ops, self.b.index.ops
            left, right = lone_floats([rows_a[op] for op in ops], [rows_b[op] for op in others])
            functions = self.a.activations(ops), self.b.activations(others)
            if len(left) == len(right) == 1 or (all(functions) and functions[0] != functions[1]):
                result.add(anchor)
        return result

    def _lone_ops(self, paired: PairedSide) -> dict[int, list[int]]:
        """The computing ops inside modules without a partner, by the paired call around them."""
        side, calls = paired.side, paired.side.data.ops.call
        lone: dict[int, list[int]] = {}
        for op in side.computing:
            if paired.ops[op] < 0 <= calls[op]:
                lone.setdefault(int(paired.anchors[calls[op]]), []).append(op)
        return lone

    def compiled_ops(self) -> tuple[list[int], list[int]]:
        """Compiled regions without a partner, and ops without one where the other side has such a region.

        They are sought in the same call, and outside of all calls, as a compiled function may contain these.
        The ops of an optimizer are apart: a compiled model contains none of them. Ops of the same name and
        size that both sides have there are no difference either.
        """
        result: tuple[list[int], list[int]] = ([], [])
        if not (self.a.opaque.any() or self.b.opaque.any()):
            return result
        lone: list[dict[tuple[int, bool], list[int]]] = [defaultdict(list), defaultdict(list)]
        for paired, places in zip(self.sides, lone, strict=True):
            side, columns = paired.side, paired.side.data.ops
            for op in np.flatnonzero(side.compared | side.opaque).tolist():
                if paired.ops[op] < 0:
                    anchor = int(paired.anchors[columns.call[op]]) if columns.call[op] >= 0 else -1
                    places[anchor, bool(columns.phase[op] == _OPTIMIZER)].append(op)
        for (anchor, stepping), ours in lone[0].items():
            theirs = lone[1].get((self._partner_call(anchor), stepping), [])
            both = (self.a, ours), (self.b, theirs)
            compiled = [any(side.opaque[op] for op in ops) for side, ops in both]
            if not any(compiled):
                continue
            for at, (side, ops) in enumerate(both):
                alone = set() if compiled[1 - at] else set(side.unlike(ops, *both[1 - at]))
                result[at].extend(op for op in ops if side.opaque[op] or op not in alone)
        return result

    def _partner_call(self, call: int) -> int:
        return int(self.calls.of_a[call]) if call >= 0 else -1

    # -- leaves --------------------------------------------------------------------------------

    def _pair_leaves(self) -> None:
        """Pair the outside inputs of paired calls, their parameters, and all other parameters by name."""
        for x, y in enumerate(self.calls.of_a.tolist()):
            if y < 0:
                continue
            first, second = (
                {info.name: side.parameters[info.path][1] for info in side.module(call).parameters}
                for side, call in ((self.a, x), (self.b, y))
            )
            for name, value in first.items():
                if value >= 0 and second.get(name, -1) >= 0:
                    self._pair_values(value, second[name])
            for one, other in zip(*self.call_values(x, y, "inputs"), strict=False):
                if self.a.producer[one] < 0 and self.b.producer[other] < 0:
                    self._pair_values(one, other)
        values_b = {self.calls.name(path): value for path, (_, value) in self.b.parameters.items()}
        for path, (_, value) in self.a.parameters.items():
            other = values_b.get(self.calls.name(path), -1)
            if value >= 0 and other >= 0:
                self._pair_values(value, other)

    def call_values(self, x: int, y: int, kind: Literal["inputs", "outputs"]) -> tuple[list[int], list[int]]:
        """The "inputs" or the "outputs" of two calls."""
        values = []
        for side, call in ((self.a, x), (self.b, y)):
            calls = side.data.calls
            offsets, flat = getattr(calls, f"{kind[:-1]}_offsets"), getattr(calls, kind)
            values.append(flat[offsets[call] : offsets[call + 1]].tolist())
        return values[0], values[1]

    def _pair_values(self, one: int, other: int) -> bool:
        if self.values_a[one] >= 0 or self.values_b[other] >= 0:
            return False
        self.values_a[one], self.values_b[other] = other, one
        return True

    # -- sequences -----------------------------------------------------------------------------

    def _align_sequences(self) -> dict[int, int]:
        """Partners by the order of ops in paired calls; each pair of calls inside is a fixed point."""
        groups_a, groups_b = map(self._group_ops, self.sides)
        # By paired call and phase, the paired calls inside: the first op of each, and its token.
        inner: list[dict[tuple[int, int], list[tuple[int, int]]]] = [defaultdict(list), defaultdict(list)]
        for x, y in enumerate(self.calls.of_a.tolist()):
            if y < 0:
                continue
            token = self.a.key_id(("calls", x, y))
            for paired, call, tokens in zip(self.sides, (x, y), inner, strict=True):
                calls = paired.side.data.calls
                parent = int(calls.parent[call])
                anchor = int(paired.anchors[parent]) if parent >= 0 else -1
                tokens[anchor, int(calls.phase[call])].append((int(calls.first_op[call]), token))
        bits = bool(len(self.a.stats) and len(self.b.stats))
        keys_a, keys_b = _op_keys(self.a, bits), _op_keys(self.b, bits)
        partners: dict[int, int] = {}
        for (anchor, phase), group_a in groups_a.items():
            other = self._partner_call(anchor)
            group_b = groups_b.get((other, phase))
            if group_b is None:
                continue
            tokens_a, ops_a = _tokens(group_a, keys_a, inner[0].get((anchor, phase), []))
            tokens_b, ops_b = _tokens(group_b, keys_b, inner[1].get((other, phase), []))
            for x, y in align(tokens_a, tokens_b):
                if ops_a[x] >= 0 and ops_b[y] >= 0:
                    partners[ops_a[x]] = ops_b[y]
        return partners

    def _group_ops(self, paired: PairedSide) -> dict[tuple[int, int], Ints]:
        """The computing ops in order, by the paired call around them and by phase."""
        side, anchors = paired.side, paired.anchors
        chosen = np.flatnonzero(side.compared & ~side.layout)
        ops = side.data.ops
        anchor = anchors[ops.call[chosen]] if len(anchors) else np.full(len(chosen), -1)
        anchor = np.where(ops.call[chosen] < 0, -1, anchor)
        order = np.lexsort((chosen, ops.phase[chosen], anchor))
        chosen, anchor, phase = chosen[order], anchor[order], ops.phase[chosen][order]
        groups: dict[tuple[int, int], Ints] = {}
        if len(chosen):
            edges = np.flatnonzero(np.diff(anchor) | np.diff(phase)) + 1
            for part in np.split(np.arange(len(chosen)), edges):
                groups[int(anchor[part[0]]), int(phase[part[0]])] = chosen[part]
        return groups

    # -- following the data --------------------------------------------------------------------

    def _follow(self, partners: dict[int, int]) -> None:
        """Pair ops in one pass in the order of the run, each given the pairs before it."""
        a, layout = self.a, self.a.layout.tolist()
        for op in np.flatnonzero(a.compared).tolist():
            if self.ops_a[op] >= 0:
                if partners or layout[op] or not self._contradicts(op, self.ops_a[op]):
                    continue
                other = self.ops_a[op]
                self.ops_a[op] = self.ops_b[other] = -1
                self._first_unpaired.pop(self._input_key(other), None)
                for value_a, value_b in zip(a.outputs(op), self.b.outputs(other), strict=False):
                    if self.values_a[value_a] == value_b:
                        self.values_a[value_a] = self.values_b[value_b] = -1
            if layout[op]:
                self._follow_layout(op)
                continue
            other = partners.get(op, -1)
            if other >= 0 and self.ops_b[other] < 0 and not self._contradicts(op, other):
                self._pair_ops(op, other)
            else:
                self._follow_inputs(op)

    def _follow_layout(self, op: int) -> None:
        """Pair a layout op with one of the same name and shape on the partner of its input."""
        source = self.values_a[self.a.inputs(op)[0]]
        if source < 0:
            return
        size = len(self.a.outputs(op))
        waiting = self._layout_ops_b.get((source, int(self.a.name[op])))
        while waiting and self.ops_b[waiting[-1]] >= 0:  # a weight is transposed again in every step
            waiting.pop()
        for other in islice(reversed(waiting or ()), _MAX_SOUGHT):
            if self.ops_b[other] >= 0 or len(self.b.outputs(other)) != size:
                continue
            if self.a.shape(self.a.outputs(op)[0]) == self.b.shape(self.b.outputs(other)[0]):
                self._pair_ops(op, other)
                return

    def _is_one_of_parts(self, op: int, other: int) -> bool:
        """Whether the second side runs an op several times, on parts of the input of the first."""
        b = self.b
        if self.a.numel[self.a.outputs(op)[0]] == b.numel[b.outputs(other)[0]]:
            return False
        return len(self._ops_by_inputs_b[self._input_key(other)]) > 1

    def _input_key(self, op: int) -> tuple[int, tuple[int, ...]]:
        """The name of an op of the second side, with the origins of its inputs."""
        b = self.b
        origins = {b.origin[value] for value in b.inputs(op)}
        sources = sorted(v for v in origins if b.producer[v] >= 0 or v in b.parameter_names)
        return int(b.name[op]), tuple(sources)

    def _follow_inputs(self, op: int) -> None:
        """Pair an op with one that has the same name and the same inputs."""
        a, b = self.a, self.b
        origins = {a.origin[value] for value in a.inputs(op)}
        sources = tuple(
            sorted(self.values_a[v] for v in origins if a.producer[v] >= 0 or v in a.parameter_names)
        )
        if not sources or sources[0] < 0:
            return
        key = (int(a.name[op]), sources)
        ops, first = self._ops_by_inputs_b.get(key, []), self._first_unpaired.get(key, 0)
        while first < len(ops) and self.ops_b[ops[first]] >= 0:  # some weights are used alone in every step
            first += 1
            self._first_unpaired[key] = first
        unpaired = (ops[at] for at in range(first, len(ops)) if self.ops_b[ops[at]] < 0)
        free = [other for other in islice(unpaired, _MAX_SOUGHT) if not self._is_one_of_parts(op, other)]
        if len(free) > 1:
            shape = a.shape(a.outputs(op)[0])
            exact = [other for other in free if shape == b.shape(b.outputs(other)[0])
                     and repr(a.index.ops[op].form) == repr(b.index.ops[other].form)]  # fmt: skip
            free = exact or free
        if free:
            self._pair_ops(op, free[0])

    def _contradicts(self, op: int, other: int) -> bool:
        """Whether two ops have different values and different inputs, or one is a part of the other."""
        if self._is_one_of_parts(op, other):
            return True
        for value_a, value_b in zip(self.a.outputs(op), self.b.outputs(other), strict=False):
            verdict = self.compare(value_a, value_b)
            if verdict.agrees:
                return False
            if verdict.state is State.DIFFERENT:
                break
        a, b = self.a, self.b
        if a.op_name(op) in FACTORIES and a.shape(a.outputs(op)[0]) != b.shape(b.outputs(other)[0]):
            return True
        inputs_b = {source for value in b.inputs(other) for source in b.layout_chain(value)}
        unknown = False
        for value in a.inputs(op):
            partners = [self.values_a[v] for v in a.layout_chain(value) if self.values_a[v] >= 0]
            unknown |= not partners
            if partners and inputs_b.isdisjoint(partners):
                return True
        if not unknown:
            return False
        if a.numel[a.outputs(op)[0]] != b.numel[b.outputs(other)[0]]:
            return True
        inputs_a = {source for value in a.inputs(op) for source in a.layout_chain(value)}
        for value in b.inputs(other):
            partners = [self.values_b[v] for v in b.layout_chain(value) if self.values_b[v] >= 0]
            if partners and inputs_a.isdisjoint(partners):
                return True
        return False

    def _pair_ops(self, op: int, other: int) -> None:
        self.ops_a[op], self.ops_b[other] = other, op
        for value_a, value_b in zip(self.a.outputs(op), self.b.outputs(other), strict=False):
            self._pair_values(value_a, value_b)

    # -- by statistics ----------------------------------------------------------------------------

    def _pair_by_statistics(self) -> bool:
        """Pair the rest of each pair of calls where the statistics agree; whether there was any.

        Results of paired calls are pairs, too, where they agree or where compiled code made one of them: no
        op of the other side will pair with that.
        """
        paired = False
        for x in np.flatnonzero(self.calls.of_a >= 0).tolist():
            for one, other in self.call_outputs(x, int(self.calls.of_a[x])):
                if self.values_a[one] < 0 and self.values_b[other] < 0:
                    producers = (self.a, self.a.producer[one]), (self.b, self.b.producer[other])
                    compiled = any(op >= 0 and bool(side.opaque[op]) for side, op in producers)
                    if compiled or self.compare(one, other).agrees:
                        paired |= self._pair_values(one, other)
        groups: dict[tuple[int, int, int], list[tuple[float, int]]] = defaultdict(list)
        for value, anchor, phase in self._unpaired_values(self.sides[1]):
            numbers = self.b.numbers(value)
            if numbers is not None and numbers.l2 > 0:
                groups[anchor, phase, self.b.numel[value]].append((numbers.l2, value))
        for group in groups.values():
            group.sort()
        for value, anchor, phase in self._unpaired_values(self.sides[0]):
            numbers = self.a.numbers(value)
            near = groups.get((self._partner_call(anchor), phase, self.a.numel[value]))
            if numbers is None or not near or not numbers.l2 > 0:
                continue
            best = self._nearest(value, numbers.l2, near)
            if best >= 0 and self._pair_values(value, best):
                paired = True
                self.by_statistics.setdefault(anchor, []).append((value, best))
        return paired

    def _nearest(self, value: int, norm: float, candidates: list[tuple[float, int]]) -> int:
        """The candidate without a partner that agrees best with a value; -1 if none does."""
        best, smallest = -1, np.inf
        for at in range(bisect_left(candidates, (norm * (1 - _NEAR), -1)), len(candidates)):
            size, other = candidates[at]
            if size > norm * (1 + _NEAR):
                break
            verdict = self.compare(value, other) if self.values_b[other] < 0 else UNKNOWN
            if verdict.agrees and verdict.error < smallest:
                best, smallest = other, verdict.error
        return best

    def _unpaired_values(self, paired: PairedSide) -> list[tuple[int, int, int]]:
        """Values without a partner that an op computed or selected, with their paired call and phase."""
        side, columns, unpaired = paired.side, paired.side.data.ops, []
        for op in np.flatnonzero(side.compared & (np.array(paired.ops, dtype=np.int64) < 0)).tolist():
            if side.layout[op] and side.numel[side.outputs(op)[0]] == side.numel[side.inputs(op)[0]]:
                continue
            if side.op_name(op) in FACTORIES:
                continue
            call, phase = int(columns.call[op]), int(columns.phase[op])
            anchor = int(paired.anchors[call]) if call >= 0 else -1
            unpaired += [(value, anchor, phase) for value in side.outputs(op) if paired.values[value] < 0]
        return unpaired


def _op_keys(side: Side, bits: bool) -> list[Ints]:
    """The keys of every computing op, by op; -1 for all others."""
    chosen = np.flatnonzero(side.compared & ~side.layout)
    columns = []
    for keys in side.keys(chosen, bits):
        column = np.full(len(side.data.ops), -1, dtype=np.int64)
        column[chosen] = keys
        columns.append(column)
    return columns


def _tokens(ops: Ints, keys: list[Ints], inner: list[tuple[int, int]]) -> tuple[list[Ints], list[int]]:
    """The keys of ops and of the calls between them, and the op at each position, or -1."""
    if not inner:
        return [each[ops] for each in keys], ops.tolist()
    starts = np.array([start for start, _ in inner], dtype=np.int64)
    tokens = np.array([token for _, token in inner], dtype=np.int64)
    order = np.argsort(np.concatenate([starts * 2, ops * 2 + 1]), kind="stable")
    positions = np.concatenate([np.full(len(inner), -1, dtype=np.int64), ops])[order]
    return [np.concatenate([tokens, each[ops]])[order] for each in keys], positions.tolist()
