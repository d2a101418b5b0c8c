"""``t.code()``: every op, with shapes, under the chain of source lines that ran it.

    h = self.norm(x)  # net.py:8 in Block.forward:
    │ # native_layer_norm(f32[2, 8], [8], f32[8], f32[8], 1e-05) -> (f32[2, 8], f32[2, 1], f32[2, 1]);

Only what differs from the op before is written. A backward op stands under the line of its forward op. Where
statistics were taken, an op ends with those of its result: ``0 … 1.42, mean 0.406, std 0.467``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.fold import Node, Repeat, first_of, length_of
from sightline.analysis.model_part import SHOWS_ALL, model_part
from sightline.analysis.row_groups import flat_positions
from sightline.analysis.select import Selection
from sightline.analysis.source_loops import Loop, header_text, loops_around
from sightline.analysis.variable_names import value_names
from sightline.errors import NothingMatched
from sightline.trace.data import I32, I64, LEVELS, PHASES, RAISED, TraceData
from sightline.trace.index import Index
from sightline.trace.source_lines import indent_of
from sightline.trace.user_frames import Chains, shown_frames, torch_file
from sightline.views.outline import Line, Span, View, line
from sightline.views.source_chain import (
    NO_SOURCE,
    ChainFrame,
    ChainWriter,
    Note,
    Placed,
    aligned,
    as_line,
    gutter,
    op_spans,
    shared_lines,
)
from sightline.views.statistics_text import StatisticsIndex, ValueStatistics
from sightline.views.variation import Variation, Varying, fold_alike

if TYPE_CHECKING:
    from sightline.api import Trace


#: Ops whose lines are made at one time where lines are asked for one after the other.
_WINDOW: Final = 512


def code(trace: Trace, **options: Any) -> View:
    """Ops and shapes under the source lines that ran them; see `Trace.code` for the options."""
    return View(tuple(code_lines(trace, window=None, **options)))


def code_lines(
    trace: Trace, *, ops: str | None = None, module: str | None = None, op: str | None = None,
    phase: str | None = None, depth: int | None = None, tail: int | None = None, fold: bool = False,
    torch_frames: bool = False, names: bool = False, stats: bool | None = None, everything: bool = False,
    window: int | None = _WINDOW, more: str = SHOWS_ALL,
) -> Iterator[Line]:  # fmt: skip
    """The same line by line, the first before the last are made: for a pager, over millions of ops.

    ``window`` ops are looked at together; the text does not depend on it. Only the mark on a source line
    does: one that has been given away is not widened by what runs in it later.
    """
    index = trace.index
    selection = Selection(module, op, phase, depth, tail)
    level = chosen_level(index, ops)
    readings = StatisticsIndex(index.raw, stats)
    mask = selection.ops(index, level)
    part = None if everything or op is not None else model_part(index.raw)
    chosen = np.flatnonzero(mask if part is None else mask & ~part.excluded)
    told = "" if part is None else part.excluded_text(mask, more)
    left_out = [line((f"# {told}", "dim"))] if told else []
    if not len(chosen):
        return iter(left_out or (line(("(no ops were recorded)", "dim")),))
    hides = part is not None and not torch_frames and part.hidden_frames.any()
    hidden = part.hidden_frames if part is not None and hides else None
    listing = _Listing(index, readings, torch_frames=torch_frames, names=names, hidden_frames=hidden)
    if fold or window is None:
        return chain(left_out, listing.lines([chosen], fold=fold))
    windows = (chosen[at : at + window] for at in range(0, len(chosen), window))
    return chain(left_out, listing.lines(windows))


def chosen_level(index: Index, ops: str | None) -> str | None:
    """The level a view shows: the one asked for, else "aten" where it was recorded, else "api"."""
    if ops is None:
        return "aten" if (index.raw.ops.level == LEVELS.index("aten")).any() else "api"
    if ops in LEVELS and len(index.raw.ops) and not (index.raw.ops.level == LEVELS.index(ops)).any():
        other = LEVELS[1 - LEVELS.index(ops)]
        raise NothingMatched(f"ops={ops!r}: this trace has no {ops} ops; it has {other} ops, ops={other!r}.")
    return ops


class _Ops:
    """The ops at hand as plain lists, by their place among them: a long recording is not read for forty.

    Ops of one kind have one text, but for names of values, and stand on one line: ``kinds`` has the kind of
    each op, ``first`` the first op of each kind.
    """

    def __init__(self, variation: Variation, ids: I64) -> None:
        data = variation.data
        ops = data.ops
        frames = shown_frames(data, ids)
        groups = variation.groups(ids, frames)
        self.ids: list[int] = ids.tolist()
        self.frames: list[int] = frames.tolist()
        self.calls: list[int] = ops.call[ids].tolist()
        self.kinds: list[int] = groups.of.tolist()
        self.first: list[int] = groups.first.tolist()
        columns = (ops.name, ops.phase, ops.form, ops.result, ops.flags)
        plain = (column[ids[groups.first]].tolist() for column in columns)
        given = _metas(data, ids[groups.first], ops.input_offsets, ops.inputs)
        made = _metas(data, ids[groups.first], ops.output_offsets, ops.outputs)
        #: For each kind what the text is made of, names of values left out.
        self.looks: list[Hashable] = list(zip(*plain, given, made, strict=True))
        self._phases: list[int] = ops.phase[ids].tolist()

    def phase(self, at: int) -> str:
        return PHASES[self._phases[at]]


def _metas(data: TraceData, ids: I64, offsets: I64, values: I32) -> list[tuple[int, ...]]:
    """What the values of each op look like."""
    places, lengths = flat_positions(offsets, ids)
    metas = data.values.meta[values[places]].tolist()
    starts = [0, *np.cumsum(lengths).tolist()]
    return [tuple(metas[start:end]) for start, end in pairwise(starts)]


class _Listing:
    """The lines of the view, made from the columns of a trace."""

    def __init__(
        self, index: Index, readings: StatisticsIndex, *, torch_frames: bool, names: bool,
        hidden_frames: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        self._data = index.raw
        self._readings = readings
        self._variation = Variation(index.raw)
        hidden = (lambda _: False) if torch_frames else torch_file
        self._chains = Chains(index.raw, hidden, hidden_frames)
        self._whole = self._chains if hidden_frames is None else Chains(index.raw, hidden)
        self._metas = [str(meta) for meta in index.raw.metas]
        self._names = value_names(index) if names else None
        self._writer = ChainWriter()
        self._repeats: list[int] = []
        self._loops: list[Loop | None] = []  # the loops of the open repeats
        self._runs = [0]  # how much later, by position, each run of the open repeats is than the first
        self._made: dict[Hashable, tuple[Span, ...]] = {}
        self._place = cache(self._read_place)
        self._chain_of = cache(self._read_chain)
        self._whole_chain = cache(self._read_whole_chain)
        self._entered = lru_cache(maxsize=1024)(self._read_entered)

    def lines(self, windows: Iterable[I64], *, fold: bool = False) -> Iterator[Line]:
        """The finished lines of some ops, in windows.

        Lines are made when all of their window are known: a later op may widen the mark on an open source
        line, and numbers that stand below each other are set in one column.
        """
        held: list[Placed] = []
        for ids in windows:
            self._ops = _Ops(self._variation, ids)
            nodes: Sequence[Node] = range(len(ids))
            if fold:
                looks = self._looks()
                nodes = fold_alike([looks[kind] for kind in self._ops.kinds], self._is_loop, self._loop_start)
            held += self._entries(nodes, after=())
            end = _settled(held) if self._readings else len(held)
            yield from self._finished(held[:end])
            del held[:end]
        yield from self._finished(held)

    def _finished(self, placed: list[Placed]) -> Iterator[Line]:
        for entry, repeats in aligned(placed) if self._readings else placed:
            yield entry if isinstance(entry, Line) else as_line(entry, repeats)

    def _looks(self) -> list[tuple[Hashable, Varying]]:
        """For each kind of op what makes it the same to a reader as another but for numbers, and the numbers.

        What it is without them is a whole number, which is compared faster than all that it stands for.
        """
        known: dict[Hashable, int] = {}
        made: list[tuple[Hashable, Varying]] = []
        for at in self._ops.first:
            look, numbers = self._variation.look(self._ops.ids[at])
            made.append((known.setdefault((self._ops.frames[at], look), len(known)), numbers))
        return made

    def _is_loop(self, ops: Sequence[int]) -> bool:
        """Whether the source has a loop around all of some ops, or an optimizer goes over its weights."""
        return all(self._ops.phase(at) == "optimizer" for at in ops) or bool(self._loops_of(ops))

    def _loops_of(self, ops: Sequence[int]) -> list[Loop]:
        """The loops around some ops, the innermost first, also those in frames that are not shown.

        Not those outside a module call that all of them are in: they do not run these ops again.
        """
        chains = [*{self._whole_chain(self._ops.frames[at]) for at in ops}]
        inside = _common_call({self._ops.calls[at] for at in ops}, self._data.calls.parent)
        outermost = len(self._whole.of(int(self._data.calls.frame[inside]))) if inside >= 0 else 0
        deepest = min(_common(chains), *(len(chain) - 1 for chain in chains))
        for at in range(deepest, outermost - 1, -1):
            if loops := self._loops_at(at, chains):
                return loops
        return []

    def _loop_start(self, first: int, period: int) -> int:
        """Where the body of a loop begins in the source: where, line by line, it goes back the furthest.

        Backward ops do not count: they stand under lines of the forward pass.
        """
        forward = [at for at in range(first, first + period) if self._ops.phase(at) != "backward"]
        chains = [self._whole_chain(self._ops.frames[at]) for at in forward]
        depth = _common(chains) if chains else 0
        if not chains or any(len(chain) <= depth for chain in chains):
            return 0
        lines = [chain[depth].line for chain in chains]
        back = np.roll(lines, 1) - lines
        return forward[int(np.argmax(back))] - first

    def _entries(self, nodes: Sequence[Node], after: Sequence[ChainFrame]) -> Iterator[Placed]:
        writer = self._writer
        for position, node in enumerate(nodes):
            leaf, times = _single(node)
            if isinstance(leaf, Repeat):
                rest = nodes[position + 1] if position + 1 < len(nodes) else None
                following = self._chain(first_of(rest)) if rest is not None else after
                yield from self._repeat(leaf, following)
                continue
            phase = self._ops.phase(leaf)
            repeats = tuple(self._repeats)
            same = [leaf + later + run for later in self._runs for run in range(times)]
            spans = self._spans(same, phase, times)
            numbers = self._numbers(same) if self._readings else ()
            for entry in writer.op(self._chain(leaf), phase, spans, numbers):
                yield entry, repeats

    def _repeat(self, node: Repeat, after: Sequence[ChainFrame]) -> Iterator[Placed]:
        """A body of several ops, set in a bracket that says how often it ran."""
        writer, outer = self._writer, tuple(self._repeats)
        if len(phases := {self._ops.phase(leaf) for leaf in _leaves(node)}) == 1:
            for entry in writer.turn(*phases):  # once, not in every run
                yield entry, outer
        chains = {self._chain(leaf) for leaf in _leaves(node)}
        first = self._chain(first_of(node))
        two = range(first_of(node), first_of(node) + 2 * length_of(node) // node.count)  # runs
        depth, loops = self._bracket(first, [*chains], after, two)
        further = any(len(chain) > depth for chain in chains)
        for entry in writer.descend(first, depth, further=further):
            yield entry, outer
        writer.close(depth)
        header = header_text(loops, self._taken(depth))
        if not loops and self._whole is not self._chains:  # it may be one of a trainer's
            header = header_text(self._loops_of(two)[:1])
        yield Line(_header(header, node.count), gutter(depth, outer) + "┌ "), outer
        floor, writer.floor = writer.floor, depth
        runs, period = self._runs, sum(map(length_of, node.body))
        self._runs = [later + run * period for later in runs for run in range(node.count)]
        self._repeats.append(depth)
        self._loops.append(loops[0] if loops else None)
        yield from self._entries(node.body, first[:depth])
        self._loops.pop()
        self._repeats.pop()
        self._runs = runs
        writer.floor = floor
        writer.close(depth)
        yield Line((), gutter(depth, outer) + "└"), outer

    def _bracket(
        self, first: Sequence[ChainFrame], chains: Sequence[Sequence[ChainFrame]],
        after: Sequence[ChainFrame],
        runs: Sequence[int],
    ) -> tuple[int, list[Loop]]:  # fmt: skip
        """How many source lines stay outside a repeat, and the loops it may be the body of.

        The line in the loop goes inside: the innermost one where all ops of the repeat are in a loop, as far
        as the source says, that is not the loop of a repeat around this one; else the innermost they have in
        common, if they have another one each. Never one that ops before or after the repeat stand under, too.
        """
        common = _common(chains)
        low = max(self._writer.shared(first), shared_lines(first, after), self._writer.floor)
        low = min(low, common)
        for at in range(min(common, len(first) - 1), low - 1, -1):
            loops = self._loops_at(at, chains)
            if loops and loops[0] not in self._taken(at):
                return at, loops
        return max(low, min(common - (len(chains) > 1), self._outside(runs))), []

    def _outside(self, runs: Sequence[int]) -> int:
        """How many source lines are around the module calls that differ from run to run; else all."""
        calls = self._data.calls
        shared = _common_call({self._ops.calls[at] for at in runs}, calls.parent)
        entered = self._ops.calls[runs[0]]
        if entered == shared:
            return len(self._chain(runs[0]))
        while int(calls.parent[entered]) != shared:
            entered = int(calls.parent[entered])
        return len(self._chains.of(int(calls.frame[entered])))

    def _loops_at(self, depth: int, chains: Sequence[Sequence[ChainFrame]]) -> list[Loop]:
        """The loops around all of what runs at a depth, the innermost first."""
        places = [chain[depth] for chain in chains if depth < len(chain)]
        if len({(place.file, place.function) for place in places}) > 1:
            return []
        spots = [(place.line, place.columns[0] if place.columns else -1) for place in places]
        return loops_around(self._data.source_lines, places[0].file, spots)

    def _taken(self, depth: int) -> list[Loop]:
        """The loops that are told by the repeats around, of those in the function at a depth."""
        open_ = zip(self._repeats, self._loops, strict=True)
        return [loop for at, loop in open_ if at == depth and loop is not None]

    def _spans(self, runs: Sequence[int], phase: str, times: int) -> tuple[Span, ...]:
        """The text of an op, for all its runs: where each of them is among the ops at hand."""
        ops = self._ops
        kinds = {ops.kinds[run]: ops.ids[run] for run in reversed(runs)}
        differing = [*kinds.values()][::-1]
        alone = len(kinds) == 1 and self._names is None
        key = (ops.looks[next(iter(kinds))] if alone else differing[0], times)
        if key not in self._made:
            self._made[key] = self._new_spans(differing, phase, times)
        return self._made[key]

    def _new_spans(self, runs: Sequence[int], phase: str, times: int) -> tuple[Span, ...]:
        """The text of an op; of several that differ in numbers, with all: ``5…9``."""
        ops, variation, first = self._data.ops, self._variation, runs[0]
        # Ops of one form have the same number of tensors, unless somebody has altered the file.
        inputs = map(self._value, zip(*map(variation.inputs, runs), strict=False))
        outputs = map(self._value, zip(*map(variation.outputs, runs), strict=False))
        arguments = variation.form(ops.form, runs).fill([*inputs])
        result = variation.form(ops.result, runs).fill([*outputs]) if ops.result[first] >= 0 else ""
        raised = bool(ops.flags[first] & RAISED)
        name = self._data.names[ops.name[first]]
        return op_spans(name, arguments, result, phase, raised=raised, times=times)

    def _numbers(self, runs: Sequence[int]) -> tuple[Span, ...]:
        """The statistics of the first result that has any, over all runs of an op.

        Of the others only what is not finite, and only where the first one is.
        """
        first: ValueStatistics | None = None
        outputs = [self._variation.outputs(self._ops.ids[run]) for run in runs]
        for slot, made in enumerate(zip(*outputs, strict=False)):
            reading = self._readings.of(made)
            if reading is not None and first is None:
                first = reading
            elif first is not None and reading is not None and reading.wrong and not first.wrong:
                return (*first.spans, Span(", "), *reading.wrong, Span(f" in result {slot}", "dim"))
        return first.spans if first is not None else ()

    def _value(self, ids: Sequence[int]) -> str:
        values, id = self._data.values, ids[0]
        alike = len(ids) == 1 or (values.meta[list(ids)] == values.meta[id]).all()
        text: str = self._metas[values.meta[id]] if alike else self._variation.tensor(ids)
        if self._names is None:
            return text
        known = int(values.name[id])
        name = self._data.names[known] if known >= 0 else self._names.get(id)
        return f"{name}: {text}" if name else text

    def _chain(self, at: int) -> tuple[ChainFrame, ...]:
        return self._chain_of(self._ops.frames[at], self._ops.calls[at])

    def _read_chain(self, frame: int, call: int) -> tuple[ChainFrame, ...]:
        visible = self._chains.of(frame)
        if not visible:
            return (NO_SOURCE,)
        entered = self._entered(call)
        outer = (self._place(each, entered.get(each, -1)) for each in visible[:-1])
        return (*outer, self._place(visible[-1], -1))

    def _read_whole_chain(self, frame: int) -> tuple[ChainFrame, ...]:
        """Also with the frames that only lead to the model."""
        return tuple(self._place(each, -1) for each in self._whole.of(frame)) or (NO_SOURCE,)

    def _read_entered(self, call: int) -> dict[int, int]:
        """For each visible frame on the way into a module call, the innermost call entered from it."""
        calls = self._data.calls
        found: dict[int, int] = {}
        while call >= 0:
            visible = self._chains.of(int(calls.frame[call]))
            if visible:
                found.setdefault(visible[-1], call)
            call = int(calls.parent[call])
        return found

    def _read_place(self, frame: int, call: int) -> ChainFrame:
        frames = self._data.frames
        known = self._data.codes[frames.code[frame]]
        at, column = int(frames.line[frame]), int(frames.column[frame])
        columns = (column, int(frames.end_column[frame])) if column >= 0 else None
        text = self._data.source_lines.line(known.file, at)
        end = int(frames.end_line[frame])
        return ChainFrame(known.file, at, known.function, text.strip(), columns, end, call, indent_of(text))


def _settled(placed: Sequence[Placed]) -> int:
    """How many entries stand as they are: those after may be set in a column with what comes next."""
    at = len(placed)
    last = placed[-1][0] if placed else None
    if isinstance(last, Note):
        while at and isinstance(note := placed[at - 1][0], Note) and note.depth == last.depth:
            at -= 1
    return at


def _header(loop: str, count: int) -> tuple[Span, ...]:
    """How often a body ran, and the loop it is the body of where the source says so."""
    return (Span(f"×{count}", "number"), *((Span("  "), Span(loop, "code")) if loop else ()))


def _single(node: Node) -> tuple[Node, int]:
    """A repeat of one op as that op and how often it ran; it needs no bracket."""
    if isinstance(node, Repeat) and len(node.body) == 1 and isinstance(node.body[0], int):
        return node.body[0], node.count
    return node, 1


def _leaves(node: Node) -> Iterator[int]:
    if isinstance(node, Repeat):
        for part in node.body:
            yield from _leaves(part)
    else:
        yield node


def _common_call(calls: set[int], parents: I32) -> int:
    """The innermost module call that all of some are in, or are; -1 where there is none."""
    paths = []
    for call in calls:
        path = []
        while call >= 0:
            path.append(call)
            call = int(parents[call])
        paths.append(path[::-1])
    shared = -1
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        shared = level[0]
    return shared


def _common(chains: Sequence[Sequence[ChainFrame]]) -> int:
    """How many lines all the chains begin with."""
    count = 0
    for places in zip(*chains, strict=False):
        if len({(place.file, place.line, place.function) for place in places}) > 1:
            break
        count += 1
    return count
