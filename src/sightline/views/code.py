"""``t.code()``: every op, with shapes, under the chain of source lines that ran it.

    h = self.norm(x)  # net.py:8 in Block.forward:
    │ # native_layer_norm(f32[2, 8], [8], f32[8], f32[8], 1e-05) -> (f32[2, 8], f32[2, 1], f32[2, 1]);

Source lines that the op before was already under are not repeated. A backward op stands under the line of its
forward op. Where statistics were taken, an op ends with those of its result:
``0 … 1.42, mean 0.406, std 0.467``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.fold import Node, Repeat, Variation, first_of, length_of
from sightline.analysis.select import Selection, model_part
from sightline.analysis.step_summaries import numbered_steps
from sightline.analysis.value_names import value_names
from sightline.data.index import Index
from sightline.data.live_events import SourceFrame
from sightline.data.not_recorded import other_threads
from sightline.data.trace_data import I64, LEVELS, RAISED
from sightline.data.training_steps import dropped_steps
from sightline.errors import NothingMatched
from sightline.hints import Hint
from sightline.views.code_fold import CodeFold, OpWindow, SourceChains
from sightline.views.rendering import Line, Span, View, comment_lines, line
from sightline.views.source_chain import (
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

#: How many ops are formatted together where lines are read one after the other.
_WINDOW: Final = 512


def code(index: Index, **options: Any) -> View:
    """Ops and shapes under the source lines that ran them; see `Trace.code` for the options."""
    return View(tuple(code_lines(index, window=None, **options)))


def code_lines(
    index: Index, *, level: str | None = None, module: str | None = None, op: str | None = None,
    phase: str | None = None, depth: int | None = None, tail: int | None = None, fold: bool = True,
    torch_frames: bool = False, names: bool = False, stats: bool | None = None, all: bool = False,
    window: int | None = _WINDOW,
) -> Iterator[Line]:  # fmt: skip
    """The same, lazily, line by line: for a pager, over millions of ops.

    ``window`` ops are formatted together; the text does not depend on it. Only the highlighting of a source
    line does: a line that was already yielded is not updated by ops that run in it later.
    """
    selection = Selection(module, op, phase, depth, tail)
    level = chosen_level(index, level)
    statistics = StatisticsIndex(index.raw, stats)
    mask = selection.ops(index, level)
    part = None if all or op is not None else model_part(index)
    chosen = np.flatnonzero(mask if part is None else mask & ~part.excluded)
    excluded = "" if part is None else part.excluded_text(mask)
    head = comment_lines([excluded, other_threads(index.raw)])
    if not len(chosen):
        return iter(head if excluded else [*head, line(("(no ops were recorded)", "dim"))])
    hides = part is not None and not torch_frames and part.hidden_frames.any()
    hidden = part.hidden_frames if part is not None and hides else None
    listing = _Listing(index, statistics, torch_frames=torch_frames, names=names, hidden_frames=hidden)
    if fold or window is None:
        return chain(head, listing.lines([chosen], fold=fold))
    windows = (chosen[at : at + window] for at in range(0, len(chosen), window))
    return chain(head, listing.lines(windows))


def chosen_level(index: Index, level: str | None) -> str | None:
    """The level a view shows: ``level`` if given, else "aten" where it was recorded, else "api"."""
    if level is None:
        return "aten" if (index.raw.ops.level == LEVELS.index("aten")).any() else "api"
    if level in LEVELS and len(index.raw.ops) and not (index.raw.ops.level == LEVELS.index(level)).any():
        other = LEVELS[1 - LEVELS.index(level)]
        raise NothingMatched(
            f"{Hint.option('level', level)}: this trace has no {level} ops; it has {other} ops, "
            f"{Hint.option('level', other)}."
        )
    return level


class _Listing:
    """The lines of the view, made from the columns of a trace."""

    def __init__(
        self, index: Index, statistics: StatisticsIndex, *, torch_frames: bool, names: bool,
        hidden_frames: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        self._data = index.raw
        self._recorded_statistics = statistics
        self._variation = Variation(index.raw)
        self._chains = SourceChains(index.raw, torch_frames=torch_frames, hidden_frames=hidden_frames)
        self._metas = index.meta_texts
        self._names = value_names(index) if names else None
        self._writer = ChainWriter()
        self._repeats: list[int] = []  # the depths of the open repeats
        self._runs = [0]  # offset of each run of the open repeats from the first, in positions
        self._op_texts: dict[Hashable, tuple[Span, ...]] = {}
        steps, numbers = numbered_steps(index), np.full(len(index.raw.ops), -1)
        for number, step in steps.items():
            numbers[max(step.first_op, 0) : max(step.end_op, 0)] = number
        self._steps: list[int] = numbers.tolist()  # the step of each op, -1 outside
        self._step_count = len(steps) + (dropped_steps(index.raw) or 0)
        self._step = -1  # the step of the last rule

    def lines(self, windows: Iterable[I64], *, fold: bool = False) -> Iterator[Line]:
        """The finished lines of some ops, in windows.

        Lines are finished at the end of their window: a later op may highlight more of an open source line,
        and the statistics of consecutive ops are aligned in one column.
        """
        pending: list[PlacedEntry] = []
        for ids in windows:
            self._ops = OpWindow(self._variation, ids)
            nodes: Sequence[Node] = range(len(ids))
            if fold:
                self._fold = CodeFold(self._variation, self._chains, self._ops, self._steps)
                nodes = self._fold.nodes()
            pending += self._entries(nodes, after=())
            end = _final_count(pending) if self._recorded_statistics else len(pending)
            yield from self._finish(pending[:end])
            del pending[:end]
        yield from self._finish(pending)

    def _finish(self, entries: list[PlacedEntry]) -> Iterator[Line]:
        for entry, repeats in align_statistics(entries) if self._recorded_statistics else entries:
            yield entry if isinstance(entry, Line) else entry_line(entry, repeats)

    def _entries(self, nodes: Sequence[Node], after: Sequence[SourceFrame]) -> Iterator[PlacedEntry]:
        writer = self._writer
        for position, node in enumerate(nodes):
            leaf, times = node, 1
            if isinstance(node, Repeat) and len(node.body) == 1 and isinstance(node.body[0], int):
                leaf, times = node.body[0], node.count  # a repeat of one op needs no bracket
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

    def _repeat(self, node: Repeat, after: Sequence[SourceFrame]) -> Iterator[PlacedEntry]:
        """A body of several ops, in a bracket that shows how often it ran."""
        writer, outer = self._writer, tuple(self._repeats)
        if len(phases := {self._ops.phase(leaf) for leaf in _leaves(node)}) == 1:
            for entry in writer.turn(*phases):  # once, not in every run
                yield entry, outer
        chains = {self._chain(leaf) for leaf in _leaves(node)}
        first = self._chain(first_of(node))
        two = range(first_of(node), first_of(node) + 2 * length_of(node) // node.count)  # runs
        low = max(writer.shared(first), shared_lines(first, after), writer.floor)
        depth, loops = self._fold.bracket(first, [*chains], low, two)
        further = any(len(chain) > depth for chain in chains)
        for entry in writer.descend(first, depth, further=further):
            yield entry, outer
        writer.close(depth)
        loop = self._fold.header(depth, loops, two, optimizer=phases == {"optimizer"})
        header = (Span(f"×{node.count}", "number"), *((Span("  "), Span(loop, "code")) if loop else ()))
        yield Line(header, gutter(depth, outer) + "┌ "), outer
        floor, writer.floor = writer.floor, depth
        runs, period = self._runs, sum(map(length_of, node.body))
        self._runs = [later + run * period for later in runs for run in range(node.count)]
        self._repeats.append(depth)
        self._fold.enter(depth, loops)
        yield from self._entries(node.body, first[:depth])
        self._fold.leave()
        self._repeats.pop()
        self._runs = runs
        writer.floor = floor
        writer.close(depth)
        yield Line((), gutter(depth, outer) + "└"), outer

    def _spans(self, runs: Sequence[int], phase: str, times: int) -> tuple[Span, ...]:
        """The text of an op for all its runs, positions in the window; numbers that differ are ``5…9``."""
        ops = self._ops
        kinds = {ops.kinds[run]: ops.ids[run] for run in reversed(runs)}
        differing = [*kinds.values()][::-1]
        alone = len(kinds) == 1 and self._names is None
        key = (ops.text_keys[next(iter(kinds))] if alone else differing[0], times)
        if key not in self._op_texts:
            columns, variation, first = self._data.ops, self._variation, differing[0]
            # Ops of one form have the same number of tensors, unless the file is damaged.
            inputs = map(self._value, zip(*map(variation.inputs, differing), strict=False))
            outputs = map(self._value, zip(*map(variation.outputs, differing), strict=False))
            name, raised = self._data.names[columns.name[first]], bool(columns.flags[first] & RAISED)
            name, arguments = variation.form(columns.form, differing).written(name, [*inputs])
            has_result = columns.result[first] >= 0
            result = variation.form(columns.result, differing).fill([*outputs]) if has_result else ""
            self._op_texts[key] = op_spans(name, arguments, result, phase, raised=raised, times=times)
        return self._op_texts[key]

    def _statistics(self, runs: Sequence[int]) -> tuple[Span, ...]:
        """The statistics of the first measured result, over all runs of an op.

        If that is finite and another result is not, the count of its non-finite elements follows.
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

    def _chain(self, at: int) -> tuple[SourceFrame, ...]:
        return self._chains.of(self._ops.frames[at], self._ops.calls[at])


def _final_count(entries: Sequence[PlacedEntry]) -> int:
    """How many entries are final: the statistics of later ones may be aligned with those that follow."""
    at = len(entries)
    last = entries[-1][0] if entries else None
    if isinstance(last, Note):
        while at and isinstance(note := entries[at - 1][0], Note) and note.depth == last.depth:
            at -= 1
    return at


def _leaves(node: Node) -> Iterator[int]:
    if isinstance(node, Repeat):
        for part in node.body:
            yield from _leaves(part)
    else:
        yield node
