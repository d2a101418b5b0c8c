"""``t.code()``: every op, with shapes, under the chain of source lines that ran it.

    h = self.norm(x)  # net.py:8 in Block.forward:
    │ # native_layer_norm(f32[2, 8], [8], f32[8], f32[8], 1e-05) -> (f32[2, 8], f32[2, 1], f32[2, 1]);

Source lines that the op before was already under are not repeated. A backward op stands under the line of its
forward op. Where statistics were taken, an op ends with those of its result:
``0 … 1.42, mean 0.406, std 0.467``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.model_part import SHOWS_ALL, model_part
from sightline.analysis.row_groups import flat_positions
from sightline.analysis.select import Selection
from sightline.analysis.sequence_repeats import Node, Repeat, first_of, length_of
from sightline.analysis.source_loops import Loop, header_text, loops_around
from sightline.analysis.step_summaries import numbered_steps
from sightline.analysis.variable_names import value_names
from sightline.errors import NothingMatched
from sightline.trace.data import I32, I64, LEVELS, PHASES, RAISED, TraceData
from sightline.trace.file_owners import torch_file
from sightline.trace.index import Index
from sightline.trace.source_files import indent_of
from sightline.trace.user_frames import FrameChains, op_frames
from sightline.views.fold import Variation, Varying, fold_alike
from sightline.views.rendering import Line, Span, View, line
from sightline.views.source_chain import (
    NO_SOURCE,
    ChainFrame,
    ChainWriter,
    Note,
    PlacedEntry,
    align_statistics,
    entry_line,
    gutter,
    op_spans,
    shared_lines,
)
from sightline.views.statistics_text import StatisticsIndex, ValueStatistics

if TYPE_CHECKING:
    from sightline.api import Trace


#: How many ops are formatted together where lines are read one after the other.
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
    """The same, lazily, line by line: for a pager, over millions of ops.

    ``window`` ops are formatted together; the text does not depend on it. Only the highlighting of a source
    line does: a line that was already yielded is not updated by ops that run in it later.
    """
    index = trace.index
    selection = Selection(module, op, phase, depth, tail)
    level = chosen_level(index, ops)
    statistics = StatisticsIndex(index.raw, stats)
    mask = selection.ops(index, level)
    part = None if everything or op is not None else model_part(index)
    chosen = np.flatnonzero(mask if part is None else mask & ~part.excluded)
    excluded = "" if part is None else part.excluded_text(mask, more)
    head = [line((f"# {excluded}", "dim"))] if excluded else []
    if not len(chosen):
        return iter(head or (line(("(no ops were recorded)", "dim")),))
    hides = part is not None and not torch_frames and part.hidden_frames.any()
    hidden = part.hidden_frames if part is not None and hides else None
    listing = _Listing(index, statistics, torch_frames=torch_frames, names=names, hidden_frames=hidden)
    if fold or window is None:
        return chain(head, listing.lines([chosen], fold=fold))
    windows = (chosen[at : at + window] for at in range(0, len(chosen), window))
    return chain(head, listing.lines(windows))


def chosen_level(index: Index, ops: str | None) -> str | None:
    """The level a view shows: ``ops`` if given, else "aten" where it was recorded, else "api"."""
    if ops is None:
        return "aten" if (index.raw.ops.level == LEVELS.index("aten")).any() else "api"
    if ops in LEVELS and len(index.raw.ops) and not (index.raw.ops.level == LEVELS.index(ops)).any():
        other = LEVELS[1 - LEVELS.index(ops)]
        raise NothingMatched(f"ops={ops!r}: this trace has no {ops} ops; it has {other} ops, ops={other!r}.")
    return ops


class _Ops:
    """The columns of the ops of one window as plain lists, by position in the window.

    Ops of one kind have the same text, except for names of values, and the same line: ``kinds`` has the kind
    of each op, ``first`` the first op of each kind.
    """

    def __init__(self, variation: Variation, ids: I64) -> None:
        data = variation.data
        ops = data.ops
        frames = op_frames(data, ids)
        groups = variation.groups(ids, frames)
        self.ids: list[int] = ids.tolist()
        self.frames: list[int] = frames.tolist()
        self.calls: list[int] = ops.call[ids].tolist()
        self.kinds: list[int] = groups.of.tolist()
        self.first: list[int] = groups.first.tolist()
        columns = (ops.name, ops.phase, ops.form, ops.result, ops.flags)
        plain = (column[ids[groups.first]].tolist() for column in columns)
        inputs = _metas(data, ids[groups.first], ops.input_offsets, ops.inputs)
        outputs = _metas(data, ids[groups.first], ops.output_offsets, ops.outputs)
        #: For each kind a key that equal texts share, names of values aside.
        self.text_keys: list[Hashable] = list(zip(*plain, inputs, outputs, strict=True))
        self._phases: list[int] = ops.phase[ids].tolist()

    def phase(self, at: int) -> str:
        return PHASES[self._phases[at]]


def _metas(data: TraceData, ids: I64, offsets: I64, values: I32) -> list[tuple[int, ...]]:
    """The metas of the values of each op."""
    positions, lengths = flat_positions(offsets, ids)
    metas = data.values.meta[values[positions]].tolist()
    starts = [0, *np.cumsum(lengths).tolist()]
    return [tuple(metas[start:end]) for start, end in pairwise(starts)]


class _Listing:
    """The lines of the view, made from the columns of a trace."""

    def __init__(
        self, index: Index, statistics: StatisticsIndex, *, torch_frames: bool, names: bool,
        hidden_frames: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        self._data = index.raw
        self._recorded_statistics = statistics
        self._variation = Variation(index.raw)
        hidden = (lambda _: False) if torch_frames else torch_file
        self._chains = FrameChains(index.raw, hidden, hidden_frames)
        self._whole = self._chains if hidden_frames is None else FrameChains(index.raw, hidden)
        self._metas = index.meta_texts
        self._names = value_names(index) if names else None
        self._writer = ChainWriter()
        self._repeats: list[int] = []  # the depths of the open repeats
        self._loops: list[Loop | None] = []  # the loops of the open repeats
        self._runs = [0]  # offset of each run of the open repeats from the first, in positions
        self._op_texts: dict[Hashable, tuple[Span, ...]] = {}
        self._frame = cache(self._read_frame)
        self._chain_of = cache(self._read_chain)
        self._whole_chain = cache(self._read_whole_chain)
        self._entered = lru_cache(maxsize=1024)(self._read_entered)
        self._shown = cache(self._read_shown)
        self._shown_frames: dict[tuple[ChainFrame, ...], int] = {}
        self._steps, self._step_count = _op_steps(index)
        self._step = -1  # the one whose rule was written last

    def lines(self, windows: Iterable[I64], *, fold: bool = False) -> Iterator[Line]:
        """The finished lines of some ops, in windows.

        Lines are finished at the end of their window: a later op may highlight more of an open source line,
        and the statistics of consecutive ops are aligned in one column.
        """
        pending: list[PlacedEntry] = []
        for ids in windows:
            self._ops = _Ops(self._variation, ids)
            nodes: Sequence[Node] = range(len(ids))
            if fold:
                keys = self._fold_keys()
                nodes = fold_alike([keys[kind] for kind in self._ops.kinds], self._is_loop, self._loop_start)
            pending += self._entries(nodes, after=())
            end = _final_count(pending) if self._recorded_statistics else len(pending)
            yield from self._finish(pending[:end])
            del pending[:end]
        yield from self._finish(pending)

    def _finish(self, entries: list[PlacedEntry]) -> Iterator[Line]:
        for entry, repeats in align_statistics(entries) if self._recorded_statistics else entries:
            yield entry if isinstance(entry, Line) else entry_line(entry, repeats)

    def _fold_keys(self) -> list[tuple[Hashable, Varying]]:
        """For each kind of op a key that ops share which differ only in numbers, and the numbers.

        The key is an integer, which is faster to compare than what it stands for.
        """
        ids: dict[Hashable, int] = {}
        keys: list[tuple[Hashable, Varying]] = []
        for at in self._ops.first:
            key, numbers = self._variation.op_key(self._ops.ids[at])
            keys.append((ids.setdefault((self._shown(self._ops.frames[at]), key), len(ids)), numbers))
        return keys

    def _read_shown(self, frame: int) -> int:
        """A number that frames share which are shown by the same lines, whatever hidden ones lead to them."""
        if self._whole is self._chains:
            return frame
        lines = tuple(self._frame(each, -1) for each in self._chains.of(frame))
        return self._shown_frames.setdefault(lines, frame)

    def _is_loop(self, ops: Sequence[int]) -> bool:
        """Whether the source has a loop around all these ops, or an optimizer loops over its weights."""
        return all(self._ops.phase(at) == "optimizer" for at in ops) or bool(self._loops_of(ops))

    def _loops_of(self, ops: Sequence[int]) -> list[Loop]:
        """The loops around some ops, the innermost first, also those in frames that are not shown.

        Loops outside a module call that contains all the ops do not count: they do not repeat these ops.
        """
        chains = [*{self._whole_chain(self._ops.frames[at]) for at in ops}]
        inside = _common_call({self._ops.calls[at] for at in ops}, self._data.calls.parent)
        outermost = len(self._whole.of(int(self._data.calls.frame[inside]))) if inside >= 0 else 0
        deepest = min(_shared_depth(chains), *(len(chain) - 1 for chain in chains))
        for at in range(deepest, outermost - 1, -1):
            if loops := self._loops_at(at, chains):
                return loops
        return []

    def _loop_start(self, first: int, period: int) -> int:
        """Where the body of a loop begins in the source: after the largest step back in line numbers.

        Backward ops do not count: they stand under lines of the forward pass.
        """
        forward = [at for at in range(first, first + period) if self._ops.phase(at) != "backward"]
        chains = [self._whole_chain(self._ops.frames[at]) for at in forward]
        depth = _shared_depth(chains) if chains else 0
        if not chains or any(len(chain) <= depth for chain in chains):
            return 0
        lines = [chain[depth].line for chain in chains]
        back = np.roll(lines, 1) - lines
        return forward[int(np.argmax(back))] - first

    def _entries(self, nodes: Sequence[Node], after: Sequence[ChainFrame]) -> Iterator[PlacedEntry]:
        writer = self._writer
        for position, node in enumerate(nodes):
            leaf, times = _single(node)
            if self._step_count > 1 and not self._repeats:
                yield from self._step_rule(node)
            if isinstance(leaf, Repeat):
                rest = nodes[position + 1] if position + 1 < len(nodes) else None
                following = self._chain(first_of(rest)) if rest is not None else after
                yield from self._repeat(leaf, following)
                continue
            phase = self._ops.phase(leaf)
            repeats = tuple(self._repeats)
            same = [leaf + later + run for later in self._runs for run in range(times)]
            spans = self._spans(same, phase, times)
            statistics = self._statistics(same) if self._recorded_statistics else ()
            for entry in writer.op(self._chain(leaf), phase, spans, statistics):
                yield entry, repeats

    def _step_rule(self, node: Node) -> Iterator[PlacedEntry]:
        """A rule where a step begins, or several that are one repeat."""
        first = first_of(node)
        inside = [self._steps[op] for op in self._ops.ids[first : first + length_of(node)]]
        begin, end = min((step for step in inside if step >= 0), default=-1), max(inside)
        if begin > self._step:
            self._step = end
            steps = f"step {begin}" if end == begin else f"steps {begin} … {end}"
            title = f"══ {steps} of {self._step_count} "
            self._writer.close(0)
            yield Note(0, (Span(title + "═" * max(0, 44 - len(title)), "title"),)), ()

    def _repeat(self, node: Repeat, after: Sequence[ChainFrame]) -> Iterator[PlacedEntry]:
        """A body of several ops, in a bracket that shows how often it ran."""
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
        header = header_text(loops, self._shown_loops(depth))
        hides = self._whole is not self._chains
        if (
            not loops and hides and phases != {"optimizer"}
        ):  # it may be a trainer's loop, not one over weights
            header = header_text(self._that_may_repeat(two, self._loops_of(two)[:1]))
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

        The line in the loop goes inside: the innermost one where all ops of the repeat are in a loop of the
        source that no enclosing repeat stands for; else the innermost they have in common, if each has
        another one below. A line that ops before or after the repeat also stand under stays outside.
        """
        common = _shared_depth(chains)
        low = max(self._writer.shared(first), shared_lines(first, after), self._writer.floor)
        low = min(low, common)
        for at in range(min(common, len(first) - 1), low - 1, -1):
            loops = self._that_may_repeat(runs, self._loops_at(at, chains))
            if loops and loops[0] not in self._shown_loops(at):
                return at, loops
        return max(low, min(common - (len(chains) > 1), self._outside(runs))), []

    def _that_may_repeat(self, runs: Sequence[int], loops: Sequence[Loop]) -> list[Loop]:
        """The loops without those around a whole step, if the runs are in one."""
        steps = {self._steps[self._ops.ids[at]] for at in runs}
        if len(steps) > 1 or -1 in steps:
            return [*loops]
        return [loop for loop in loops if loop not in self._loops_of_steps]

    @cached_property
    def _loops_of_steps(self) -> set[Loop]:
        """The loops of the source around the updates of optimizers, each of which ends a step."""
        ops = self._data.ops
        frames = np.unique(ops.frame[ops.phase == PHASES.index("optimizer")])
        chains = [self._whole_chain(frame) for frame in frames.tolist()]
        own = [(at, chain) for chain in chains for at, each in enumerate(chain) if not torch_file(each.file)]
        return {loop for at, chain in own for loop in self._loops_at(at, [chain])}

    def _outside(self, runs: Sequence[int]) -> int:
        """How many source lines enclose the module calls that differ from run to run; all without any."""
        calls = self._data.calls
        shared = _common_call({self._ops.calls[at] for at in runs}, calls.parent)
        entered = self._ops.calls[runs[0]]
        if entered == shared:
            return len(self._chain(runs[0]))
        while int(calls.parent[entered]) != shared:
            entered = int(calls.parent[entered])
        return len(self._chains.of(int(calls.frame[entered])))

    def _loops_at(self, depth: int, chains: Sequence[Sequence[ChainFrame]]) -> list[Loop]:
        """The loops around all frames at a depth, the innermost first."""
        frames = [chain[depth] for chain in chains if depth < len(chain)]
        if len({(frame.file, frame.function) for frame in frames}) > 1:
            return []
        positions = [(frame.line, frame.columns[0] if frame.columns else -1) for frame in frames]
        return loops_around(self._data.source_lines, frames[0].file, positions)

    def _shown_loops(self, depth: int) -> list[Loop]:
        """The loops at a depth that enclosing repeats already stand for."""
        open_ = zip(self._repeats, self._loops, strict=True)
        return [loop for at, loop in open_ if at == depth and loop is not None]

    def _spans(self, runs: Sequence[int], phase: str, times: int) -> tuple[Span, ...]:
        """The text of an op for all its runs, given by position in the window."""
        ops = self._ops
        kinds = {ops.kinds[run]: ops.ids[run] for run in reversed(runs)}
        differing = [*kinds.values()][::-1]
        alone = len(kinds) == 1 and self._names is None
        key = (ops.text_keys[next(iter(kinds))] if alone else differing[0], times)
        if key not in self._op_texts:
            self._op_texts[key] = self._new_spans(differing, phase, times)
        return self._op_texts[key]

    def _new_spans(self, runs: Sequence[int], phase: str, times: int) -> tuple[Span, ...]:
        """The text of an op, or of several that differ only in numbers: ``5…9``."""
        ops, variation, first = self._data.ops, self._variation, runs[0]
        # Ops of one form have the same number of tensors, unless the file is damaged.
        inputs = map(self._value, zip(*map(variation.inputs, runs), strict=False))
        outputs = map(self._value, zip(*map(variation.outputs, runs), strict=False))
        arguments = variation.form(ops.form, runs).fill([*inputs])
        result = variation.form(ops.result, runs).fill([*outputs]) if ops.result[first] >= 0 else ""
        raised = bool(ops.flags[first] & RAISED)
        name = self._data.names[ops.name[first]]
        return op_spans(name, arguments, result, phase, raised=raised, times=times)

    def _statistics(self, runs: Sequence[int]) -> tuple[Span, ...]:
        """The statistics of the first measured result, over all runs of an op.

        If that is finite and another result is not, what is not finite in it follows.
        """
        first: ValueStatistics | None = None
        outputs = [self._variation.outputs(self._ops.ids[run]) for run in runs]
        for slot, values in enumerate(zip(*outputs, strict=False)):
            statistics = self._recorded_statistics.of(values)
            if statistics is not None and first is None:
                first = statistics
            elif first is not None and statistics is not None and statistics.wrong and not first.wrong:
                return (*first.spans, Span(", "), *statistics.wrong, Span(f" in result {slot}", "dim"))
        return first.spans if first is not None else ()

    def _value(self, ids: Sequence[int]) -> str:
        values, id = self._data.values, ids[0]
        alike = len(ids) == 1 or (values.meta[list(ids)] == values.meta[id]).all()
        text: str = self._metas[values.meta[id]] if alike else self._variation.tensor(ids)
        if self._names is None:
            return text
        own = int(values.name[id])
        name = self._data.names[own] if own >= 0 else self._names.get(id)
        return f"{name}: {text}" if name else text

    def _chain(self, at: int) -> tuple[ChainFrame, ...]:
        return self._chain_of(self._ops.frames[at], self._ops.calls[at])

    def _read_chain(self, frame: int, call: int) -> tuple[ChainFrame, ...]:
        visible = self._chains.of(frame)
        if not visible:
            return (NO_SOURCE,)
        entered = self._entered(call)
        outer = (self._frame(each, entered.get(each, -1)) for each in visible[:-1])
        return (*outer, self._frame(visible[-1], -1))

    def _read_whole_chain(self, frame: int) -> tuple[ChainFrame, ...]:
        """The chain of a frame, with the frames that only lead to the model."""
        return tuple(self._frame(each, -1) for each in self._whole.of(frame)) or (NO_SOURCE,)

    def _read_entered(self, call: int) -> dict[int, int]:
        """For each visible frame that leads into a module call, the innermost call entered from it."""
        calls = self._data.calls
        entered: dict[int, int] = {}
        while call >= 0:
            visible = self._chains.of(int(calls.frame[call]))
            if visible:
                entered.setdefault(visible[-1], call)
            call = int(calls.parent[call])
        return entered

    def _read_frame(self, frame: int, call: int) -> ChainFrame:
        frames = self._data.frames
        code = self._data.codes[frames.code[frame]]
        at, column = int(frames.line[frame]), int(frames.column[frame])
        columns = (column, int(frames.end_column[frame])) if column >= 0 else None
        text = self._data.source_lines.line(code.file, at)
        end = int(frames.end_line[frame])
        return ChainFrame(code.file, at, code.function, text.strip(), columns, end, call, indent_of(text))


def _op_steps(index: Index) -> tuple[list[int], int]:
    """The number of the step of each op, -1 outside; and how many steps there are."""
    found = np.full(len(index.raw.ops), -1)
    steps = numbered_steps(index)
    for number, step in steps.items():
        found[max(step.first_op, 0) : max(step.end_op, 0)] = number
    return found.tolist(), len(steps)


def _final_count(entries: Sequence[PlacedEntry]) -> int:
    """How many entries are final: the statistics of later ones may be aligned with those that follow."""
    at = len(entries)
    last = entries[-1][0] if entries else None
    if isinstance(last, Note):
        while at and isinstance(note := entries[at - 1][0], Note) and note.depth == last.depth:
            at -= 1
    return at


def _header(loop: str, count: int) -> tuple[Span, ...]:
    """How often a body ran, and its loop where the source shows it."""
    return (Span(f"×{count}", "number"), *((Span("  "), Span(loop, "code")) if loop else ()))


def _single(node: Node) -> tuple[Node, int]:
    """A repeat of one op as the op and its count, which needs no bracket; else the node itself."""
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
    """The innermost module call that is or contains all of these; -1 without one."""
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


def _shared_depth(chains: Sequence[Sequence[ChainFrame]]) -> int:
    """How many outer lines all the chains share."""
    count = 0
    for frames in zip(*chains, strict=False):
        if len({(frame.file, frame.line, frame.function) for frame in frames}) > 1:
            break
        count += 1
    return count
