"""Repeats in a sequence: a loop that ran 24 times becomes its body once, and the number 24.

`fold` finds consecutive repeats of any period, the ones that save most first, and then folds each body
again, so that nested loops come out nested. `unfold` is its inverse. The search is exact (ranks of all
windows of length 2^k, no hashing) and takes about n·log²n steps, done by numpy.

From one run of a loop to the next sizes of a batch differ, a learning rate, a number that was read:
`fold_alike` folds ops that differ only in such numbers, and `Variation` writes several of them as one:
``f32[1, 5…9, 64]``, ``lr=5e-05…4e-06``. Sizes of weights do not count: layers of different widths stay apart.

Each view decides which ops it folds: `sightline.views.code_fold`, `sightline.views.log_fold`,
`sightline.graph.fold` and `sightline.page.tree`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.row_groups import RowGroups, flat_positions, group_rows, list_keys
from sightline.data.forms import Form, Record, Symbol
from sightline.data.trace_data import I32, I64, KINDS, PHASES, TraceData
from sightline.notation import constant_text, dtype_name, tensor_text

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A body that ran ``count`` times in a row; its leaves are positions in its first run."""

    body: tuple[Node, ...]
    count: int


#: A position in the sequence, or a repeat that starts there.
Node = int | Repeat


#: Takes a position and a period, and returns the offset at which a body should begin: 0 up to the period.
Start = Callable[[int, int], int]


def fold(keys: Sequence[Hashable], start: Start | None = None) -> list[Node]:
    """The sequence with its consecutive repeats folded.

    >>> fold("xababab")
    [0, Repeat(body=(1, 2), count=3)]

    A repeat has several bodies to choose from, ``ba`` as well as ``ab``. The first one is taken, or the one
    that ``start(position, period)`` prefers where there are two runs of it.

    >>> fold("xabababa", start=lambda position, period: 1)
    [0, 1, Repeat(body=(2, 3), count=3)]
    """
    numbers: dict[Hashable, int] = {}
    coded = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    return _fold_part(coded, 0, start or (lambda _position, _period: 0))


def first_of(node: Node) -> int:
    """The position at which a node begins.

    >>> [first_of(node) for node in fold("xababab")]
    [0, 1]
    """
    while isinstance(node, Repeat):
        node = node.body[0]
    return node


def length_of(node: Node) -> int:
    """How many positions of the sequence a node stands for.

    >>> [length_of(node) for node in fold("xababab")]
    [1, 6]
    """
    return node.count * sum(map(length_of, node.body)) if isinstance(node, Repeat) else 1


def _fold_part(keys: Ints, base: int, prefer: Start) -> list[Node]:
    """Fold ``keys``, whose first element has the position ``base`` in the whole sequence."""
    if len(set(keys.tolist())) == len(keys):
        return list(range(base, base + len(keys)))
    nodes: list[Node] = []
    at = 0
    for start, period, count in _best_runs(_runs(keys), lambda first, period: prefer(base + first, period)):
        nodes += range(base + at, base + start)
        body = _fold_part(keys[start : start + period], base + start, prefer)
        nodes.append(Repeat(tuple(body), count))
        at = start + period * count
    nodes += range(base + at, base + len(keys))
    return nodes


def _best_runs(runs: list[tuple[int, int, int]], prefer: Start) -> list[tuple[int, int, int]]:
    """Of overlapping runs (start, end, period) those that save most, as (start, period, count) in order.

    If a better run has taken a part of one, the rest of it is tried again.
    """
    heap = [(-_saving(*run), *run) for run in runs]
    heapq.heapify(heap)
    taken: list[tuple[int, int, int]] = []  # (start, end, period), apart from each other, sorted
    while heap:
        _, start, end, period = heapq.heappop(heap)
        index = bisect_left(taken, (start, 0, 0))
        if index and taken[index - 1][1] > start:
            index -= 1
        pieces: list[tuple[int, int]] = []  # the parts of the run that no taken one covers
        at = start
        while index < len(taken) and taken[index][0] < end:
            if taken[index][0] > at:
                pieces.append((at, taken[index][0]))
            at = max(at, taken[index][1])
            index += 1
        if at < end:
            pieces.append((at, end))
        if pieces == [(start, end)]:
            later = prefer(start, period)
            start += later if end - start - later >= 2 * period else 0
            insort(taken, (start, start + (end - start) // period * period, period))
            continue
        for left, right in pieces:
            if right - left >= 2 * period:
                heapq.heappush(heap, (-_saving(left, right, period), left, right, period))
    return [(start, period, (end - start) // period) for start, end, period in taken]


def _saving(start: int, end: int, period: int) -> int:
    return ((end - start) // period - 1) * period


def _runs(keys: Ints) -> list[tuple[int, int, int]]:
    """Every maximal run (start, end, period) in which each key equals the one a period before.

    A run of at least two periods contains a multiple j of its period with keys[j] == keys[j + period], so
    only these pairs, about n·ln n, are examined and then extended to both sides. Periods are taken in blocks
    from short to long: inside a long run of period 3, period 6 is skipped.
    """
    n = len(keys)
    ranks = _ranks(keys)
    runs: list[tuple[int, int, int]] = []
    known_end, known_period = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    low = 1
    while low <= n // 2:
        first, period = _pairs(keys, low, min(2 * low, n // 2 + 1))
        new = (known_end[first] <= first + period) | (period % known_period[first] != 0)
        first, period = first[new], period[new]
        ahead = _common(ranks, first, first + period, n)
        behind = _common(ranks, first, first + period, n, before=True)
        long = ahead + behind >= period
        starts, ends, periods = (first - behind)[long], (first + period + ahead)[long], period[long]
        _, unique = np.unique(periods * n + starts, return_index=True)
        for start, end, size in np.stack([starts, ends, periods], axis=1)[unique].tolist():
            runs.append((start, end, size))
            if end - start >= 4 * size:  # long enough to be a run of twice the period, too
                known_end[start:end], known_period[start:end] = end, size
        low *= 2
    return runs


def _pairs(keys: Ints, low: int, high: int) -> tuple[Ints, Ints]:
    """The pairs (j, p) with low <= p < high, j a multiple of p, and keys[j] == keys[j + p]."""
    n = len(keys)
    periods = np.arange(low, high, dtype=np.int64)
    counts = (n - 1) // periods  # j = 0, p, … with j + p < n
    period = np.repeat(periods, counts)
    starts = np.cumsum(counts) - counts
    first = (np.arange(len(period), dtype=np.int64) - np.repeat(starts, counts)) * period
    same = keys[first] == keys[first + period]
    return first[same], period[same]


def _ranks(keys: Ints) -> list[Ints]:
    """For each k a number per position, equal where the 2^k keys from there on are equal."""
    ranks = [keys]
    length = 1
    while 4 * length <= len(keys):
        last = ranks[-1]
        pairs = last[:-length] * (int(last.max()) + 1) + last[length:]
        names, rank = np.unique(pairs, return_inverse=True)
        if len(names) == len(pairs):
            break
        ranks.append(rank.astype(np.int64))
        length *= 2
    return ranks


def _common(ranks: list[Ints], a: Ints, b: Ints, n: int, *, before: bool = False) -> Ints:
    """How many keys from ``a`` and from ``b`` (> a) on are equal; or how many just before them."""
    total = np.zeros(len(a), dtype=np.int64)
    for k in range(len(ranks) - 1, -1, -1):
        rank, length = ranks[k], 1 << k
        again = k == len(ranks) - 1  # beyond the longest rank kept, step by it as often as it matches
        active = np.arange(len(a))
        while len(active):
            shift = -total[active] - length if before else total[active]
            at, to = a[active] + shift, b[active] + shift
            fits = (at >= 0) & (to + length <= n)
            fits[fits] = rank[at[fits]] == rank[to[fits]]
            active = active[fits]
            total[active] += length
            if not again:
                break
    return total


_MIN_RUNS: Final = 3  #: two runs always differ by some amount; a third shows whether it is constant
_WEIGHTS: Final = frozenset(map(KINDS.index, ("parameter", "buffer")))
_OPTIMIZER: Final = PHASES.index("optimizer")

#: Integers that differ, such as sizes; and all other numbers, such as a learning rate.
Varying = tuple[tuple[int, ...], tuple[Any, ...]]


def fold_alike(
    keys: Sequence[tuple[Hashable, Varying]], is_loop: Callable[[Sequence[int]], bool],
    start: Start | None = None,
) -> list[Node]:  # fmt: skip
    """Fold ops that differ only in numbers.

    ``keys`` has for each op a key without its numbers, and the numbers. A repeat in which these differ is
    kept if a loop runs its ops again (``is_loop``, called with two runs), or if integers change by the same
    amount from run to run.

    >>> keys = [("mm", ((size,), ())) for size in (5, 6, 7, 9, 4)]
    >>> fold_alike(keys, lambda ops: False)
    [Repeat(body=(0,), count=3), 3, 4]
    >>> fold_alike(keys, lambda ops: True)
    [Repeat(body=(0,), count=5)]
    """
    ids: dict[Varying, int] = {}
    kinds = np.array([ids.setdefault(numbers, len(ids)) for _, numbers in keys], dtype=np.int64)

    def split_repeats(nodes: Iterable[Node]) -> list[Node]:
        result: list[Node] = []
        for node in nodes:
            result += split(node) if isinstance(node, Repeat) else [node]
        return result

    def split(node: Repeat) -> list[Node]:
        first, period = first_of(node), length_of(node) // node.count
        runs = kinds[first : first + node.count * period].reshape(node.count, period)
        differing = (first + np.flatnonzero((runs != runs[0]).any(axis=0))).tolist()
        offsets = [run * period for run in range(node.count)]
        whole = [[number for at in differing for number in keys[at + by][1][0]] for by in offsets]
        other = [[number for at in differing for number in keys[at + by][1][1]] for by in offsets]
        spans = _steady_spans(np.array(whole, dtype=np.int64), other)
        if spans != [(0, node.count)] and is_loop(range(first, first + 2 * period)):
            steady = _steady_spans(np.array(whole, dtype=np.int64), [[] for _ in offsets])
            # A prompt and then token after token are two spans; batches of any size are one.
            spans = steady if len(steady) <= 2 else [(0, node.count)]
        result: list[Node] = []
        for begin, count in spans:
            body = split_repeats(_shift(part, begin * period) for part in node.body)
            result += [Repeat(tuple(body), count)] if count > 1 else body
        return result

    return split_repeats(fold([key for key, _ in keys], start))


def _shift(node: Node, by: int) -> Node:
    """The same node in a later run."""
    if isinstance(node, Repeat):
        return Repeat(tuple(_shift(part, by) for part in node.body), node.count)
    return node + by


def _steady_spans(whole: Any, other: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """The rows as (first, count) of spans that change by a constant amount; single rows where none do.

    The items of ``other`` must not change at all.
    """
    steps = np.diff(whole, axis=0)
    same = (steps[1:] == steps[:-1]).all(axis=1).tolist() if len(steps) else []
    spans: list[tuple[int, int]] = []
    at = 0
    while at < len(whole):
        count = 2
        while at + count < len(whole) and same[at + count - 2]:
            count += 1
        if at + count > len(whole) or (count < _MIN_RUNS and steps[at].any()):
            count = 1
        equal = 1
        while equal < count and other[at + equal] == other[at]:
            equal += 1
        if equal < _MIN_RUNS and count > equal and steps[at].any():
            equal = 1
        spans.append((at, equal))
        at += equal
    return spans


class Variation:
    """Keys of the ops of a trace without their numbers, and the text of several ops as one."""

    def __init__(self, data: TraceData) -> None:
        self.data = data
        self._forms: dict[tuple[int, bool], tuple[Hashable, Varying]] = {(-1, True): ((), ((), ()))}

    def groups(self, ids: I64, frames: I32) -> RowGroups:
        """Groups of ops of one frame with the same text, key and numbers."""
        ops, values = self.data.ops, self.data.values
        lists = []
        for flat, offsets in ((ops.inputs, ops.input_offsets), (ops.outputs, ops.output_offsets)):
            positions, lengths = flat_positions(offsets, ids)
            members = flat[positions]
            weights = np.isin(values.kind[members], [*_WEIGHTS])
            weights &= np.repeat(ops.phase[ids] != _OPTIMIZER, lengths)
            lists.append(list_keys(2 * values.meta[members].astype(np.int64) + weights, lengths))
        columns = (ops.name, ops.phase, ops.form, ops.result, ops.flags)
        return group_rows(frames, *(column[ids] for column in columns), *lists)

    def op_key(self, op: int) -> tuple[Hashable, Varying]:
        """A key of an op without its numbers, and the numbers."""
        ops, values = self.data.ops, self.data.values
        form, (whole, other) = self._form_key(int(ops.form[op]), result=False)
        result, (_, returned) = self._form_key(int(ops.result[op]), result=True)
        optimizer = ops.phase[op] == _OPTIMIZER
        sizes = [*whole]
        kinds: list[Hashable] = []
        for value in (*self.inputs(op), *self.outputs(op)):
            meta = self.data.metas[values.meta[value]]
            kind = meta.dtype, meta.device, meta.layout, meta.type
            if optimizer:  # weights of any size are treated alike
                kinds.append(kind)
            elif values.kind[value] in _WEIGHTS:
                kinds.append((*kind, meta.shape))
            else:
                kinds.append((*kind, len(meta.shape)))
                sizes += meta.shape
        key = (int(ops.name[op]), int(ops.phase[op]), int(ops.flags[op]), form, result, tuple(kinds))
        return key, (tuple(sizes), (*other, *returned))

    def call_key(self, call: int) -> tuple[Hashable, Varying]:
        """A key of a module call without the numbers in its inputs and outputs, and the numbers."""
        calls, values, metas = self.data.calls, self.data.values, self.data.metas
        form, (whole, other) = self._form_key(int(calls.input_form[call]), result=False)
        result, (_, returned) = self._form_key(int(calls.output_form[call]), result=True)
        kinds: list[Hashable] = []
        sizes = [*whole]
        for value in (*calls.inputs_of(call), *calls.outputs_of(call)):
            meta = metas[values.meta[value]]
            kinds.append((meta.dtype, meta.device, meta.layout, meta.type, len(meta.shape)))
            sizes += meta.shape
        return (form, result, tuple(kinds)), (tuple(sizes), (*other, *returned))

    def inputs(self, op: int) -> list[int]:
        """The input values of an op."""
        return self.data.ops.inputs_of(op)

    def outputs(self, op: int) -> list[int]:
        """The output values of an op."""
        return self.data.ops.outputs_of(op)

    def form(self, column: Any, runs: Sequence[int]) -> Form:
        """The form of several ops as one: ``5…9`` where a number differs."""
        forms = [self.data.forms[one] for one in dict.fromkeys(int(column[op]) for op in runs)]
        args, kwargs = [form.args for form in forms], [form.kwargs for form in forms]
        return forms[0] if len(forms) == 1 else Form(_merge(args), _merge(kwargs))

    def tensor(self, ids: Sequence[int]) -> str:
        """Values that differ only in sizes: ``f32[1, 5…9, 64]``; of different ranks ``f32[…]``."""
        metas = [self.data.metas[meta] for meta in dict.fromkeys(self.data.values.meta[list(ids)].tolist())]
        first = metas[0]
        if len({len(meta.shape) for meta in metas}) > 1:
            return f"{dtype_name(first.dtype)}[…]"
        sizes = [sizes_text(column) for column in zip(*(meta.sizes for meta in metas), strict=True)]
        return tensor_text(sizes, first.dtype, first.device, first.layout)

    def _form_key(self, form: int, result: bool) -> tuple[Hashable, Varying]:
        """A key of arguments, or of a result, without the numbers in it, and the numbers."""
        if form < 0:
            return (), ((), ())
        if (form, result) not in self._forms:
            whole: list[int] = []
            other: list[Any] = []
            arguments = self.data.forms[form]
            key = (_key(arguments.args, whole, other), _key(arguments.kwargs, whole, other))
            # An integer that an op returns is a number that was read, not a size.
            numbers: Varying = ((), (*whole, *other)) if result else (tuple(whole), tuple(other))
            self._forms[form, result] = (key, numbers)
        return self._forms[form, result]


def _key(item: Any, whole: list[int], other: list[Any]) -> Hashable:
    """A key of an argument without its numbers, which are appended to ``whole`` and ``other``."""
    if type(item) is int and abs(item) < 1 << 62:  # the ends of open slices stay as they are
        whole.append(item)
        return "int"
    if type(item) is float:
        other.append(item)
        return "float"
    if isinstance(item, list | tuple):
        return (type(item).__name__, *(_key(part, whole, other) for part in item))
    if isinstance(item, dict):
        return tuple((key, _key(part, whole, other)) for key, part in item.items())
    if isinstance(item, Record):
        return (item.type, _key(item.fields, whole, other))
    return (type(item).__name__, constant_text(item))


def _merge(items: Sequence[Any]) -> Any:
    """Arguments that differ only in numbers, as one."""
    one = items[0]
    if type(one) in (int, float):
        return one if len(set(items)) == 1 else Symbol(spread(items))
    if isinstance(one, list | tuple):
        return type(one)(_merge(parts) for parts in zip(*items, strict=True))
    if isinstance(one, dict):
        return {key: _merge([item[key] for item in items]) for key in one}
    if isinstance(one, Record):
        return Record(one.type, _merge([item.fields for item in items]))
    return one


def sizes_text(sizes: Sequence[int | str]) -> str:
    """The sizes of one dimension: a range of numbers, or a list of symbols.

    >>> sizes_text([5, 9]), sizes_text(["s26", "s26", "2*s26"])
    ('5…9', 's26…2*s26')
    """
    if all(isinstance(size, int) for size in sizes):
        return spread(sizes)
    return "…".join(dict.fromkeys(map(str, sizes)))


def spread(numbers: Sequence[Any], text: Callable[[Any], str] = constant_text) -> str:
    """The first and the last of numbers that only rise or only fall, else the minimum and the maximum.

    >>> spread([5, 6, 9]), spread([0.3, 0.2, 0.1]), spread([8, 31, 12]), spread([4, 4])
    ('5…9', '0.3…0.1', '8…31', '4')
    """
    steps = {(b > a) - (b < a) for a, b in pairwise(numbers)} - {0}
    if not steps and numbers[0] == numbers[0]:
        return text(numbers[0])
    ends = (numbers[0], numbers[-1]) if len(steps) == 1 else (min(numbers), max(numbers))
    return "…".join(map(text, ends))
