"""Which op and which value of one recording is which of the other.

Modules are paired first. The ops of a pair of calls are then two sequences, aligned by name, size, constants
and fingerprint. One pass in the order of the run follows the data: layout ops go with their inputs, and a
pair whose values differ although other inputs go in is taken apart and tried again by what goes in. What is
left is paired by its numbers: one matrix product in place of three, a fused op in place of its parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Final

import numpy as np

from sightline.diff.constants import floats, same
from sightline.diff.module_calls import ModulePairs
from sightline.diff.op_names import MAKERS, ONE_RESULT, UNSET
from sightline.diff.sequences import Ints, aligned
from sightline.diff.side import Side
from sightline.diff.values import State, Values

_ROUNDS: Final = 2  #: of pairing by numbers, each of which may take a wrong pair apart
_NEAR: Final = 0.02  #: norms this close, relatively, may be of one value in two precisions


class Alignment:
    """Ops and values in pairs: ``ops_a[op]`` and ``values_a[value]`` are those of the other side, or -1."""

    def __init__(self, a: Side, b: Side, values: Values, rename: Mapping[str, str] | None = None) -> None:
        self.a, self.b, self.compare = a, b, values
        self.calls = ModulePairs(a, b, rename)
        self.ops_a: list[int] = [-1] * len(a.data.ops)
        self.ops_b: list[int] = [-1] * len(b.data.ops)
        self.values_a: list[int] = [-1] * len(a.data.values)
        self.values_b: list[int] = [-1] * len(b.data.values)
        self.by_numbers: dict[int, list[tuple[int, int]]] = {}  #: values paired by their numbers, by call
        self._home_a, self._home_b = _homes(a, self.calls.of_a), _homes(b, self.calls.of_b)
        self._pair_leaves()
        partners = self._sequences()
        self._layouts_b = self._by_input(b)
        self._fed_b = self._by_inputs(b)
        self._follow(partners)
        for _ in range(_ROUNDS):
            if not self._pair_by_numbers():
                break
            self._follow({})  # again, with what the numbers have told

    # -- what is compared ----------------------------------------------------------------------

    def checked(self) -> Iterator[tuple[int, int]]:
        """The pairs of values whose numbers are compared: what ops make, what calls return, and leaves."""
        spare = self.spare
        for one, other in enumerate(self.values_a):
            if (
                other >= 0
                and one not in spare
                and (self.a.origin[one] == one or self.b.origin[other] == other)
            ):
                yield one, other
        for x, y in enumerate(self.calls.of_a.tolist()):
            if y < 0:
                continue
            for one, other in zip(*self.exchanged(x, y, "outputs"), strict=False):
                if self.values_a[one] != other:
                    yield one, other

    @cached_property
    def spare(self) -> set[int]:
        """Results that only serve the backward pass, and memory that nobody has set yet."""
        first = np.array(
            [1 if name in ONE_RESULT else 0 if name in UNSET else -1 for name in self.a.names] or [-1]
        )
        firsts = first[self.a.data.ops.name]
        found: set[int] = set()
        for op in np.flatnonzero((firsts >= 0) & self.a.compared).tolist():
            found.update(self.a.outputs(op)[int(firsts[op]) :])
        return found

    def place(self, one: int) -> int:
        """Where in the order of the first run a value stands: when it was made, or first used."""
        maker = self.a.producer[one]
        if maker < 0:
            return self.users.get(one, [len(self.a.data.ops)])[0]
        return maker

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """For each value of the first side that no op made, the ops that compute with it, layout aside."""
        found: dict[int, list[int]] = {}
        a = self.a
        for op in np.flatnonzero(a.compared & ~a.layout).tolist():
            for value in a.inputs(op):
                origin = a.origin[value]
                if a.producer[origin] < 0:
                    found.setdefault(origin, []).append(op)
        return found

    def lone_constants(self) -> set[int]:
        """Calls in which ops without partners have one constant on each side that the other has not."""
        numbers: tuple[dict[int, list[float]], dict[int, list[float]]] = ({}, {})
        for which, (side, partners, homes) in enumerate(
            ((self.a, self.ops_a, self._home_a), (self.b, self.ops_b, self._home_b))
        ):
            calls = side.data.ops.call
            for op in np.flatnonzero(side.compared & ~side.layout).tolist():
                if partners[op] < 0 <= calls[op]:
                    numbers[which].setdefault(int(homes[calls[op]]), []).extend(floats(side.index.ops[op]))
        found = set()
        for home, mine in numbers[0].items():
            its = numbers[1].get(int(self.calls.of_a[home]) if home >= 0 else -1, [])
            left = [x for x in mine if not any(same(x, y) for y in its)]
            right = [y for y in its if not any(same(x, y) for x in mine)]
            if len(left) == len(right) == 1:
                found.add(home)
        return found

    # -- leaves --------------------------------------------------------------------------------

    def _pair_leaves(self) -> None:
        """What goes into paired calls from outside, their parameters, and all others by their names."""
        for x, y in enumerate(self.calls.of_a.tolist()):
            if y < 0:
                continue
            for one, other in self._own_parameters(x, y):
                self._join(one, other)
            for one, other in zip(*self.exchanged(x, y, "inputs"), strict=False):
                if self.a.producer[one] < 0 and self.b.producer[other] < 0:
                    self._join(one, other)
        theirs = {self.calls.name(path): value for path, (_, value) in self.b.parameters.items()}
        for path, (_, value) in self.a.parameters.items():
            other = theirs.get(self.calls.name(path), -1)
            if value >= 0 and other >= 0:
                self._join(value, other)

    def _own_parameters(self, x: int, y: int) -> list[tuple[int, int]]:
        ours, theirs = (
            {info.name: side.parameters[info.path][1] for info in side.module(call).parameters}
            for side, call in ((self.a, x), (self.b, y))
        )
        return [(ours[name], theirs[name]) for name in ours if theirs.get(name, -1) >= 0 <= ours[name]]

    def exchanged(self, x: int, y: int, what: str) -> tuple[list[int], list[int]]:
        """What went into, or came out of, two calls."""
        found = []
        for side, call in ((self.a, x), (self.b, y)):
            calls = side.data.calls
            offsets, flat = getattr(calls, f"{what[:-1]}_offsets"), getattr(calls, what)
            found.append(flat[offsets[call] : offsets[call + 1]].tolist())
        return found[0], found[1]

    def _join(self, one: int, other: int) -> bool:
        if self.values_a[one] >= 0 or self.values_b[other] >= 0:
            return False
        self.values_a[one], self.values_b[other] = other, one
        return True

    # -- sequences -----------------------------------------------------------------------------

    def _sequences(self) -> dict[int, int]:
        """Partners by the order of ops in paired calls; each pair of calls inside is a fixed point."""
        ours, theirs = self._groups(self.a, self._home_a), self._groups(self.b, self._home_b)
        inner_a, inner_b = self._inner_calls()
        bits = bool(len(self.a.data.stats) and len(self.b.data.stats))
        keys_a, keys_b = _all_keys(self.a, bits), _all_keys(self.b, bits)
        partners: dict[int, int] = {}
        for (home, phase), mine in ours.items():
            other = int(self.calls.of_a[home]) if home >= 0 else -1
            its = theirs.get((other, phase))
            if its is None:
                continue
            tokens_a, places_a = _tokens(mine, keys_a, inner_a.get((home, phase), []))
            tokens_b, places_b = _tokens(its, keys_b, inner_b.get((other, phase), []))
            for x, y in aligned(tokens_a, tokens_b):
                if places_a[x] >= 0 and places_b[y] >= 0:
                    partners[places_a[x]] = places_b[y]
        return partners

    def _groups(self, side: Side, homes: Ints) -> dict[tuple[int, int], Ints]:
        """The ops that compute, by the paired call they belong to and by phase, each in order."""
        chosen = np.flatnonzero(side.compared & ~side.layout)
        ops = side.data.ops
        home = homes[ops.call[chosen]] if len(homes) else np.full(len(chosen), -1)
        home = np.where(ops.call[chosen] < 0, -1, home)
        order = np.lexsort((chosen, ops.phase[chosen], home))
        chosen, home, phase = chosen[order], home[order], ops.phase[chosen][order]
        found: dict[tuple[int, int], Ints] = {}
        if len(chosen):
            edges = np.flatnonzero(np.diff(home) | np.diff(phase)) + 1
            for part in np.split(np.arange(len(chosen)), edges):
                found[int(home[part[0]]), int(phase[part[0]])] = chosen[part]
        return found

    def _inner_calls(
        self,
    ) -> tuple[dict[tuple[int, int], list[tuple[int, int]]], dict[tuple[int, int], list[tuple[int, int]]]]:
        """Per paired call and phase, the paired calls inside it: where each begins, and its token."""
        made: tuple[dict[tuple[int, int], list[tuple[int, int]]], ...] = (
            defaultdict(list),
            defaultdict(list),
        )
        for x, y in enumerate(self.calls.of_a.tolist()):
            if y < 0:
                continue
            token = self.a.word(("calls", x, y))
            for side, call, homes, found in (
                (self.a, x, self._home_a, made[0]),
                (self.b, y, self._home_b, made[1]),
            ):
                calls = side.data.calls
                parent = int(calls.parent[call])
                home = int(homes[parent]) if parent >= 0 else -1
                found[home, int(calls.phase[call])].append((int(calls.first_op[call]), token))
        return made[0], made[1]

    # -- following the data --------------------------------------------------------------------

    def _by_input(self, side: Side) -> dict[tuple[int, int], list[int]]:
        """Layout ops by what goes in and their name."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        names = side.name.tolist()
        for op in np.flatnonzero(side.compared & side.layout).tolist():
            found[side.flat_inputs[side.input_offsets[op]], names[op]].append(op)
        return found

    def _by_inputs(self, side: Side) -> dict[tuple[int, tuple[int, ...]], list[int]]:
        """Ops that compute by their name and by what goes in, layout aside."""
        found: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        names, origin, producer = side.name.tolist(), side.origin, side.producer
        for op in np.flatnonzero(side.compared & ~side.layout).tolist():
            fed = {origin[value] for value in side.inputs(op)}
            found[
                names[op], tuple(sorted(v for v in fed if producer[v] >= 0 or v in side.parameter_names))
            ].append(op)
        return found

    def _follow(self, partners: dict[int, int]) -> None:
        """One pass in the order of the run: what goes with what, given all that came before."""
        a, layout = self.a, self.a.layout.tolist()
        for op in np.flatnonzero(a.compared).tolist():
            if self.ops_a[op] >= 0:
                if partners or layout[op] or not self._contradicts(op, self.ops_a[op]):
                    continue
                self._part(op)
            if layout[op]:
                self._follow_layout(op)
                continue
            other = partners.get(op, -1)
            if other >= 0 and self.ops_b[other] < 0 and not self._contradicts(op, other):
                self._pair(op, other)
            else:
                self._follow_inputs(op)

    def _follow_layout(self, op: int) -> None:
        given = self.a.inputs(op)[0]
        source = self.values_a[given]
        if source < 0:
            return
        size = len(self.a.outputs(op))
        free = [
            other
            for other in self._layouts_b.get((source, int(self.a.name[op])), ())
            if self.ops_b[other] < 0
        ]
        for other in free:
            if len(self.b.outputs(other)) == size and self._shape(self.a, op) == self._shape(self.b, other):
                self._pair(op, other)
                return

    def _shape(self, side: Side, op: int) -> tuple[int, ...]:
        return side.data.metas[int(side.data.values.meta[side.outputs(op)[0]])].shape

    def _follow_inputs(self, op: int) -> None:
        """Pair an op with one of the same name that the same values go into."""
        a, b = self.a, self.b
        fed = {a.origin[value] for value in a.inputs(op)}
        sources = tuple(sorted(self.values_a[v] for v in fed if a.producer[v] >= 0 or v in a.parameter_names))
        if not sources or sources[0] < 0:
            return
        free = [other for other in self._fed_b.get((int(a.name[op]), sources), ()) if self.ops_b[other] < 0]
        if len(free) > 1:
            exact = [other for other in free if self._shape(a, op) == self._shape(b, other)
                     and repr(a.index.ops[op].form) == repr(b.index.ops[other].form)]  # fmt: skip
            free = exact or free
        if free:
            self._pair(op, free[0])

    def _contradicts(self, op: int, other: int) -> bool:
        """Whether two ops make different values of different inputs."""
        for one, its in zip(self.a.outputs(op), self.b.outputs(other), strict=False):
            verdict = self.compare(one, its)
            if verdict.agrees:
                return False
            if verdict.state is State.DIFFERENT:
                break
        if self.a.op_name(op) in MAKERS and self._shape(self.a, op) != self._shape(self.b, other):
            return True
        a, b = self.a, self.b
        theirs = {value for given in b.inputs(other) for value in b.shown_by(given)}
        unknown = False
        for given in a.inputs(op):
            sources = [self.values_a[value] for value in a.shown_by(given) if self.values_a[value] >= 0]
            unknown |= not sources
            if sources and theirs.isdisjoint(sources):
                return True
        if not unknown:
            return False
        if a.numel[a.outputs(op)[0]] != b.numel[b.outputs(other)[0]]:
            return True
        mine = {value for given in a.inputs(op) for value in a.shown_by(given)}
        for given in b.inputs(other):
            sources = [self.values_b[value] for value in b.shown_by(given) if self.values_b[value] >= 0]
            if sources and mine.isdisjoint(sources):
                return True
        return False

    def _pair(self, op: int, other: int) -> None:
        self.ops_a[op], self.ops_b[other] = other, op
        for one, its in zip(self.a.outputs(op), self.b.outputs(other), strict=False):
            self._join(one, its)

    def _part(self, op: int) -> None:
        """Undo a pair."""
        other = self.ops_a[op]
        self.ops_a[op] = self.ops_b[other] = -1
        for one, its in zip(self.a.outputs(op), self.b.outputs(other), strict=False):
            if self.values_a[one] == its:
                self.values_a[one] = self.values_b[its] = -1

    # -- by numbers ----------------------------------------------------------------------------

    def _pair_by_numbers(self) -> bool:
        """Pair what is left in a pair of calls and the same by its numbers; whether there was any."""
        paired = False
        groups: dict[tuple[int, int, int], list[tuple[float, int]]] = defaultdict(list)
        for value, home, phase in self._leftover(self.b, self._home_b, self.ops_b, self.values_b):
            numbers = self.b.numbers(value)
            if numbers is not None and numbers.l2 > 0:
                groups[home, phase, self.b.numel[value]].append((numbers.l2, value))
        for found in groups.values():
            found.sort()
        for value, home, phase in self._leftover(self.a, self._home_a, self.ops_a, self.values_a):
            numbers = self.a.numbers(value)
            other = int(self.calls.of_a[home]) if home >= 0 else -1
            near = groups.get((other, phase, self.a.numel[value]))
            if numbers is None or not near or not numbers.l2 > 0:
                continue
            best = self._nearest(value, numbers.l2, near)
            if best >= 0 and self._join(value, best):
                paired = True
                self.by_numbers.setdefault(home, []).append((value, best))
        return paired

    def _nearest(self, value: int, norm: float, near: list[tuple[float, int]]) -> int:
        from bisect import bisect_left

        at = bisect_left(near, (norm * (1 - _NEAR), -1))
        best, smallest = -1, np.inf
        while at < len(near) and near[at][0] <= norm * (1 + _NEAR):
            other = near[at][1]
            at += 1
            if self.values_b[other] >= 0:
                continue
            verdict = self.compare(value, other)
            if verdict.agrees and verdict.error < smallest:
                best, smallest = other, verdict.error
        return best

    def _leftover(
        self, side: Side, homes: Ints, partners: list[int], known: list[int]
    ) -> list[tuple[int, int, int]]:
        """Values without a partner that an op has computed or cut out, with their call and phase."""
        ops, found = side.data.ops, []
        for op in np.flatnonzero(side.compared & (np.array(partners, dtype=np.int64) < 0)).tolist():
            if side.layout[op] and side.numel[side.outputs(op)[0]] == side.numel[side.inputs(op)[0]]:
                continue
            if side.op_name(op) in MAKERS:
                continue
            call = int(ops.call[op])
            home = int(homes[call]) if call >= 0 else -1
            found += [(value, home, int(ops.phase[op])) for value in side.outputs(op) if known[value] < 0]
        return found


def _homes(side: Side, paired: Ints) -> Ints:
    """For each call the nearest one around it, itself included, that has a partner; -1 where none has."""
    homes = np.full(len(side.data.calls), -1, dtype=np.int64)
    for call, parent in enumerate(side.data.calls.parent.tolist()):
        homes[call] = call if paired[call] >= 0 else homes[parent] if parent >= 0 else -1
    return homes


def _all_keys(side: Side, bits: bool) -> list[Ints]:
    """The keys of every op that computes, by op."""
    chosen = np.flatnonzero(side.compared & ~side.layout)
    made = []
    for keys in side.keys(chosen, bits):
        whole = np.full(len(side.data.ops), -1, dtype=np.int64)
        whole[chosen] = keys
        made.append(whole)
    return made


def _tokens(ops: Ints, keys: list[Ints], inner: list[tuple[int, int]]) -> tuple[list[Ints], list[int]]:
    """Keys of ops and of the calls between them, and what each place stands for: an op, or -1."""
    if not inner:
        return [each[ops] for each in keys], ops.tolist()
    starts = np.array([start for start, _ in inner], dtype=np.int64)
    tokens = np.array([token for _, token in inner], dtype=np.int64)
    order = np.argsort(np.concatenate([starts * 2, ops * 2 + 1]), kind="stable")
    places = np.concatenate([np.full(len(inner), -1, dtype=np.int64), ops])[order]
    return [np.concatenate([tokens, each[ops]])[order] for each in keys], places.tolist()
