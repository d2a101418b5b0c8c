"""``log()``: module calls and operations as blocks, in the order they ran.

A call without calls inside is a leaf and one block; what runs inside it is left out unless asked for. Every
operation outside leaves has a block: as the user wrote it, or the aten op where no API call was seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.analysis.places import Chains, shown_frames, torch_file
from sightline.analysis.select import Mask, Selection
from sightline.errors import NothingMatched
from sightline.trace import data as d
from sightline.views.blocks import (
    OK,
    RAISED,
    UNFINISHED,
    BlockStyle,
    ModuleEvent,
    OpEvent,
    TensorText,
    tensor_block_text,
)
from sightline.views.numbers import Readings
from sightline.views.outline import Line, Span, View, line

if TYPE_CHECKING:
    from sightline.api import Trace

_OPEN, _CLOSE, _LEAF, _OP = range(4)
_FORWARD: Final = d.PHASES.index("forward")

Step = tuple[int, int, int]  #: what happens, to which call or op, how deep


def log(
    trace: Trace, *, module: str | None = None, op: str | None = None, phase: str | None = None,
    depth: int | None = None, tail: int | None = None, inside: bool = False, root: bool = True,
    title: str | None = None, tensor: TensorText = tensor_block_text, margin: str = "",
    stats: bool | None = None,
) -> View:  # fmt: skip
    """The blocks of a trace; without ``phase``, those of the forward pass."""
    selection = Selection(module, op, phase, depth, tail)
    readings = Readings(trace.data, stats)
    story = _Story(trace, selection, readings, inside=inside or op is not None, root=root)
    steps = list(story.steps())
    if not steps and selection.given:
        given = ", ".join(f"{name}={value!r}" for name, value in selection.given.items())
        raise NothingMatched(f"{given} matches no module call and no op outside leaf modules of this trace.")
    if not steps and title is None:
        return View((line("(no module call and no op of a forward pass was recorded)"),))
    if tail is not None:
        steps = _tail(steps, tail)
    style = BlockStyle(tensor, margin)
    return View(tuple(_lines(story, steps, style, title)))


def _lines(story: _Story, steps: Sequence[Step], style: BlockStyle, title: str | None) -> Iterator[Line]:
    last: int | None = None
    if title is not None:
        yield style.banner(f"TRACING {title} STARTED")
        last = 0
    for step in steps:
        if last is not None:
            yield style.rail(min(last, step[2]))
        yield from story.block(step, style)
        last = step[2]
    if title is not None:
        yield style.rail(0)
        yield style.banner(f"TRACING {title} COMPLETE")


def _tail(steps: Sequence[Step], count: int) -> list[Step]:
    """The last blocks, inside the containers that were open when the first of them came."""
    places = [at for at, step in enumerate(steps) if step[0] in (_LEAF, _OP)][-count:]
    cut = places[0] if places else 0
    open_: list[Step] = []
    for step in steps[:cut]:
        if step[0] == _OPEN:
            open_.append(step)
        elif step[0] == _CLOSE:
            open_.pop()
    return [*open_, *steps[cut:]]


class _Story:
    """What happened in a trace, as steps, and the block of each step."""

    def __init__(
        self, trace: Trace, selection: Selection, readings: Readings, *, inside: bool, root: bool
    ) -> None:
        self._index = trace.index
        self._readings = readings
        self._data = data = trace.data
        self._phase = _FORWARD if selection.phase is None else d.PHASES.index(selection.phase)
        self._inside = inside
        self._calls = self._call_mask(selection)
        self._ops = self._op_mask(selection)
        self._shown = self._calls & (np.asarray(data.calls.parent >= 0) | root)
        self._leaf = self._leaves(selection)
        self._ops &= ~self._in_leaf()
        self._chains = Chains(data, torch_file)
        self._frames = shown_frames(data)
        self._blocks: dict[tuple[object, ...], list[Line]] = {}

    # -- which -----------------------------------------------------------------------------------

    def _call_mask(self, selection: Selection) -> Mask:
        calls = self._data.calls
        meant = Selection(module=selection.module, depth=selection.depth)
        mask = meant.calls(self._index) if len(calls) else np.zeros(0, dtype=np.bool_)
        chosen: Mask = mask & (calls.phase == self._phase)
        return chosen

    def _op_mask(self, selection: Selection) -> Mask:
        """The ops that can have a block: outermost, of the phase asked for, matching the filters."""
        meant = Selection(selection.module, selection.op, selection.phase, selection.depth)
        try:
            mask = meant.ops(self._index)
        except NothingMatched:
            if selection.op is not None:
                raise
            mask = np.zeros(len(self._data.ops), dtype=np.bool_)  # modules may match where no op does
        parents = self._data.ops.parent
        outermost = parents < 0
        if selection.op is not None:  # an aten op may match where the API call it came from does not
            outermost |= ~mask[np.maximum(parents, 0)]
        chosen: Mask = mask & outermost & (self._data.ops.phase == self._phase)
        return chosen

    def _leaves(self, selection: Selection) -> Mask:
        """The calls that are one block: nothing inside them is shown."""
        calls = self._data.calls
        leaf = np.ones(len(calls), dtype=np.bool_)
        inner = self._calls & (calls.parent >= 0)
        leaf[calls.parent[inner]] = False
        if self._inside:
            holding = self._data.ops.call[self._ops]
            leaf[holding[holding >= 0]] = False
        for call in np.flatnonzero(leaf & (calls.parent < 0)).tolist():  # a model without submodules
            module = self._data.modules[calls.module[call]]
            leaf[call] = module.type_module.partition(".")[0] == "torch" or selection.depth == 0
        if selection.op is not None:  # containers of what was asked for stay, other modules go
            self._shown &= ~leaf
        return leaf

    def _in_leaf(self) -> Mask:
        """The ops that ran inside a leaf; a backward op did not, though it belongs to one."""
        hides = np.append(self._leaf & (self._data.calls.phase == self._phase), False)
        return hides[self._data.ops.call]  # an op in no call has call -1: the appended entry

    # -- in which order --------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Every block in order: a container is opened, holds what ran inside it, and is closed."""
        calls = self._data.calls
        firsts, ends, parents = calls.first_op.tolist(), calls.end_op.tolist(), calls.parent.tolist()
        ops = np.flatnonzero(self._ops).tolist()
        at = 0
        stack: list[int] = []  # containers that are open

        def until(limit: int) -> Iterator[Step]:
            """The ops before an op, and the ends of containers between them."""
            nonlocal at
            while at < len(ops) and ops[at] < limit:
                while stack and ends[stack[-1]] <= ops[at]:
                    yield (_CLOSE, stack.pop(), len(stack))
                yield (_OP, ops[at], len(stack))
                at += 1

        for call in np.flatnonzero(self._shown).tolist():
            yield from until(firsts[call])
            while stack and not _holds(parents, stack[-1], call):
                yield (_CLOSE, stack.pop(), len(stack))
            yield (_LEAF if self._leaf[call] else _OPEN, call, len(stack))
            if not self._leaf[call]:
                stack.append(call)
        yield from until(len(self._data.ops))
        while stack:
            yield (_CLOSE, stack.pop(), len(stack))

    # -- what each looks like --------------------------------------------------------------------

    def block(self, step: Step, style: BlockStyle) -> list[Line]:
        """The lines of a step; steps that look alike share them."""
        what, id, depth = step
        columns = self._data.ops if what == _OP else self._data.calls
        inputs = columns.inputs[columns.input_offsets[id] : columns.input_offsets[id + 1]]
        outputs = columns.outputs[columns.output_offsets[id] : columns.output_offsets[id + 1]]
        key: tuple[object, ...] = (what, depth, int(columns.flags[id]))
        for values in (inputs, outputs):
            seen = values if self._readings else self._data.values.meta[values]
            key = (*key, seen.tobytes())
        key += self._op_key(id) if what == _OP else self._call_key(id)
        known = self._blocks.get(key)
        if known is None:
            if what == _OP:
                known = style.op(self._op_event(id, depth, inputs, outputs))
            else:
                event = self._module_event(id, depth, inputs, outputs)
                known = (style.opened, style.closed, style.leaf)[what](event)
            self._blocks[key] = known
        return known

    def _metas(self, values: d.I32) -> list[d.TensorMeta]:
        return [self._data.metas[meta] for meta in self._data.values.meta[values].tolist()]

    def _numbers(self, values: d.I32) -> list[tuple[Span, ...]]:
        """The statistics of each value, where there are any."""
        if not self._readings:
            return []
        readings = map(self._readings.one, values.tolist())
        return [reading.spans if reading else () for reading in readings]

    def _op_key(self, op: int) -> tuple[object, ...]:
        ops = self._data.ops
        call = int(ops.call[op]) if self._phase != _FORWARD else -1
        return (int(ops.name[op]), int(ops.form[op]), int(ops.result[op]), int(self._frames[op]), call)

    def _call_key(self, call: int) -> tuple[object, ...]:
        calls = self._data.calls
        return (int(calls.module[call]), int(calls.input_form[call]), int(calls.output_form[call]))

    def _op_event(self, op: int, depth: int, inputs: d.I32, outputs: d.I32) -> OpEvent:
        row = self._index.ops[op]
        chain = self._chains.of(int(self._frames[op]))
        function = self._index.frames[chain[-1]].function if chain else ""
        note = "" if self._phase == _FORWARD else row.phase
        if note and row.module is not None:
            note += f" of {row.module.label}"
        state = RAISED if row.raised else OK
        return OpEvent(
            row.name, row.flavour, function, depth, row.form, self._metas(inputs), row.result,
            self._metas(outputs), state, note, self._numbers(inputs), self._numbers(outputs),
        )  # fmt: skip

    def _module_event(self, call: int, depth: int, inputs: d.I32, outputs: d.I32) -> ModuleEvent:
        row = self._index.module_calls[call]
        module = row.module
        state = RAISED if row.raised else UNFINISHED if row.unfinished else OK
        return ModuleEvent(
            module.label, module.type, module.extra, depth, bool(self._leaf[call]), row.input_form,
            self._metas(inputs), row.output_form, self._metas(outputs), state, not module.path,
            self._numbers(inputs), self._numbers(outputs),
        )  # fmt: skip


def _holds(parents: Sequence[int], outer: int, inner: int) -> bool:
    """Whether one call runs inside another."""
    while inner > outer:
        inner = parents[inner]
    return inner == outer
