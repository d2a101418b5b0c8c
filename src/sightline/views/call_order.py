"""``call_order()``: the module calls of a trace in the order they were entered or completed.

Each line is a call, indented by its depth; ``#2`` is the third call of its module. Consecutive calls of one
module with the same calls inside are one line with ``×N``. Where a run has calls with and without gradients,
as when it trains and evaluates, they are not taken together, and those without say so. Where all are without,
one line below them says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from sightline.analysis.select import Mask, Selection
from sightline.data.index import Index
from sightline.data.not_recorded import notes
from sightline.data.trace_data import NO_GRAD, PHASES, RAISED, UNFINISHED, TraceData
from sightline.errors import UsageError
from sightline.hints import Hint
from sightline.patterns import choices_text
from sightline.views.rendering import Line, Span, View, comment_lines, line

ORDERS: Final = ("entry", "completion")
_WITHOUT: Final = "all calls are without gradients"


def call_order(
    index: Index, *, order: str = "entry", module: str | None = None, phase: str | None = None,
    depth: int | None = None, tail: int | None = None, fold: bool = True,
) -> View:  # fmt: skip
    """Module calls in order; ``tail`` keeps the last lines, ``fold=False`` gives every call a line."""
    if order not in ORDERS:
        raise UsageError(
            f"{Hint.option('order', order)} is no order of calls; choose {choices_text(ORDERS)}."
        )
    Selection(tail=tail)  # raises if it is wrong
    shown = Selection(module=module, phase=phase, depth=depth).calls(index)
    calls = _Calls(index.raw, shown, fold)
    lines = list(calls.lines(completion=order == "completion"))
    beside = comment_lines([_WITHOUT if calls.all_without else "", *notes(index.raw)])
    if not lines:
        return View((line(("This trace has no module calls.", "dim")), *beside))
    return View((*(lines if tail is None else lines[-tail:]), *beside))


@dataclass(frozen=True, slots=True)
class _Run:
    """Calls that are written as one line."""

    first: int
    calls: tuple[int, ...]


class _Calls:
    """The shown calls as a tree, and its lines."""

    def __init__(self, data: TraceData, shown: Mask, fold: bool) -> None:
        self._data = data
        self._fold = fold
        roots = data.calls.parent < 0
        without = roots & ((data.calls.flags & NO_GRAD) != 0)
        self.all_without = bool(len(roots)) and bool(((data.calls.flags & NO_GRAD) != 0).all())
        self._without = without if (without != roots).any() else np.zeros_like(without)
        self._children: dict[int, list[int]] = {}
        parents = data.calls.parent.tolist()
        for call in np.flatnonzero(shown).tolist():
            parent = parents[call]
            while parent >= 0 and not shown[parent]:
                parent = parents[parent]
            self._children.setdefault(parent, []).append(call)
        #: A key for each call, the same for calls of one module with the same calls inside.
        self._keys: dict[int, int] = {}
        calls = data.calls
        ended = (calls.flags & (RAISED | UNFINISHED)).tolist()
        own = list(
            zip(calls.module.tolist(), ended, calls.phase.tolist(), self._without.tolist(), strict=True)
        )
        numbers: dict[tuple[object, ...], int] = {}
        for call in sorted((call for group in self._children.values() for call in group), reverse=True):
            children = tuple(self._keys[child] for child in self._children.get(call, ()))
            self._keys[call] = numbers.setdefault((own[call], children), len(numbers))

    def lines(self, *, completion: bool) -> Iterator[Line]:
        """The lines in order, without recursion: a model may be deeper than Python's stack."""
        stack = [(run, 0, False) for run in reversed(self._runs(-1))]
        while stack:
            run, depth, done = stack.pop()
            if done or not completion:
                yield self._line(run, depth)
            if done:
                continue
            if completion:
                stack.append((run, depth, True))
            stack += [(inner, depth + 1, False) for inner in reversed(self._runs(run.first))]

    def _runs(self, parent: int) -> Sequence[_Run]:
        calls = self._children.get(parent, [])
        if not self._fold:
            return [_Run(call, (call,)) for call in calls]
        groups = (tuple(group) for _, group in groupby(calls, key=self._keys.__getitem__))
        return [_Run(group[0], group) for group in groups]

    def _line(self, run: _Run, depth: int) -> Line:
        calls = self._data.calls
        module = self._data.modules[calls.module[run.first]]
        first, last = int(calls.index[run.first]), int(calls.index[run.calls[-1]])
        spans = [Span(module.label, "module")]
        if module.path:
            spans.append(Span(f" ({module.type})", "dim"))
        spans.append(Span(f" #{first}" if first == last else f" #{first}…#{last}", "dim"))
        if len(run.calls) > 1:
            spans.append(Span(f" ×{len(run.calls)}", "number"))
        if self._without[run.first]:
            spans.append(Span(" without gradients", "dim"))
        if calls.phase[run.first]:
            spans.append(Span(f" {PHASES[calls.phase[run.first]]}", "warn"))
        flags = int(calls.flags[run.first])
        if flags & RAISED:
            spans.append(Span(" raised", "error"))
        elif flags & UNFINISHED:
            spans.append(Span(" unfinished", "warn"))
        return Line(tuple(spans), "  " * depth)
