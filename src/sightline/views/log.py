"""``log()``: module calls and operations as blocks, in the order they ran.

A call without calls inside is a leaf and one block; the ops inside it are left out by default. Every
operation outside leaves has a block: as the user wrote it, or the aten op where no API call was recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import numpy as np

from sightline.analysis.fold import Variation, sizes_text
from sightline.analysis.select import Mask, ModelPart, Selection, model_part
from sightline.data import trace_data as d
from sightline.data.index import Index
from sightline.data.not_recorded import notes
from sightline.errors import NothingMatched
from sightline.hints import Hint
from sightline.views.log_blocks import (
    OK,
    RAISED,
    UNFINISHED,
    BlockStyle,
    LogModule,
    LogOp,
    TensorText,
    tensor_block_text,
)
from sightline.views.log_fold import (
    CLOSE,
    LEAF,
    OP,
    OPEN,
    REPEAT,
    REPEATED,
    BlockKey,
    FoldedBlock,
    Step,
    fold_blocks,
)
from sightline.views.rendering import Line, Span, View, comment_lines, line
from sightline.views.statistics_text import StatisticsIndex

_FORWARD: Final = d.PHASES.index("forward")
#: How many blocks are folded together: often only the beginning of a long recording is read.
_WINDOW: Final = 4096
_NUMBERED: Final = re.compile(r"(?<![^.])\d+(?![^.])")  #: in the path of a module: its position in a list


def log(index: Index, **options: Any) -> View:
    """The blocks of a trace; see `Trace.log` and `log_lines` for the options."""
    return View(tuple(log_lines(index, **options)))


def log_lines(
    index: Index, *, module: str | None = None, op: str | None = None, phase: str | None = None,
    depth: int | None = None, tail: int | None = None, inside: bool = False, root: bool = True,
    title: str | None = None, tensor: TensorText = tensor_block_text, margin: str = "",
    stats: bool | None = None, fold: bool = True, all: bool = False,
) -> Iterator[Line]:  # fmt: skip
    """The lines of the blocks, lazily; without ``phase``, those of the forward pass."""
    selection = Selection(module, op, phase, depth, tail)
    statistics = StatisticsIndex(index.raw, stats)
    part = None if all or op is not None else model_part(index)
    builder = _LogBuilder(index, selection, statistics, inside=inside or op is not None, root=root, part=part)
    steps = builder.steps()
    first = next(steps, None)
    excluded = "" if part is None else part.excluded_text(builder.chosen_ops)
    head = comment_lines([excluded, *notes(index.raw)])
    if first is None and selection.filters and not excluded:
        filters = ", ".join(f"{Hint.option(name, value)}" for name, value in selection.filters.items())
        raise NothingMatched(
            f"{filters} matches no module call and no op outside leaf modules of this trace."
        )
    if first is None and title is None:
        nothing = line("(no module call and no op of a forward pass was recorded)")
        return iter(head if excluded else [*head, nothing])
    every: Iterator[Step] = chain([first] if first is not None else [], steps)
    if tail is not None:
        every = iter(_tail(list(every), tail))
    style = BlockStyle(tensor, margin)
    return chain(head, _lines(builder, every, style, title, fold))


def _lines(
    builder: _LogBuilder, steps: Iterator[Step], style: BlockStyle, title: str | None, fold: bool
) -> Iterator[Line]:
    last: int | None = None  # depth of the block before
    if title is not None:
        yield style.banner(f"TRACING {title} STARTED")
        last = 0
    for part in _windows(steps):
        for block in fold_blocks(part, builder.block_key, builder.loop_start, fold):
            if last is not None and block.kind != REPEATED:
                yield style.rail(min(last, block.depth))
            last = block.depth
            yield from builder.lines(block, style)
    if title is not None:
        yield style.rail(0)
        yield style.banner(f"TRACING {title} COMPLETE")


def _windows(steps: Iterator[Step]) -> Iterator[list[Step]]:
    """The steps in windows that are folded together; none ends inside a container."""
    part: list[Step] = []
    for step in steps:
        part.append(step)
        if len(part) >= _WINDOW and step[2] == 0 and step[0] != OPEN:
            yield part
            part = []
    if part:
        yield part


def _tail(steps: Sequence[Step], count: int) -> list[Step]:
    """The last blocks, inside the containers that were open before the first of them."""
    blocks = [at for at, step in enumerate(steps) if step[0] in (LEAF, OP)][-count:]
    cut = blocks[0] if blocks else 0
    open_: list[Step] = []
    for step in steps[:cut]:
        if step[0] == OPEN:
            open_.append(step)
        elif step[0] == CLOSE:
            open_.pop()
    return [*open_, *steps[cut:]]


class _LogBuilder:
    """The calls and ops of a trace as steps, and the block of each step."""

    def __init__(
        self, index: Index, selection: Selection, statistics: StatisticsIndex, *, inside: bool, root: bool,
        part: ModelPart | None = None,
    ) -> None:  # fmt: skip
        self._index = index
        self._statistics = statistics
        self._data = data = index.raw
        self._phase = _FORWARD if selection.phase is None else d.PHASES.index(selection.phase)
        self._inside = inside
        calls = data.calls
        self._calls = np.zeros(0, dtype=np.bool_)
        if len(calls):
            self._calls = Selection(module=selection.module, depth=selection.depth).calls(index)
            self._calls = self._calls & (calls.phase == self._phase)
        self._ops = self._op_mask(selection)
        self.chosen_ops = self._ops.copy()  #: with those that are not the model's
        if part is not None:
            self._ops &= ~part.excluded
        self._shown = self._calls & (np.asarray(calls.parent >= 0) | root)
        self._leaf = self._leaves(selection)
        # A backward op did not run inside a leaf, though it belongs to one.
        leaf = np.append(self._leaf & (calls.phase == self._phase), False)
        hidden = leaf[data.ops.call]  # call -1 reads the appended entry
        self._ops &= ~hidden
        self.chosen_ops &= ~hidden
        self._chains = self._index.user_chains
        self._frames = self._index.op_frames
        self._variation = Variation(data)
        self._blocks: dict[tuple[object, ...], list[Line]] = {}

    # -- masks -----------------------------------------------------------------------------------

    def _op_mask(self, selection: Selection) -> Mask:
        """The ops that can have a block: outermost, of the selected phase, matching the filters."""
        filters = Selection(selection.module, selection.op, selection.phase, selection.depth)
        try:
            mask = filters.ops(self._index)
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
        """The calls that are one block, without the calls and ops inside."""
        calls = self._data.calls
        leaf = np.ones(len(calls), dtype=np.bool_)
        inner = self._calls & (calls.parent >= 0)
        leaf[calls.parent[inner]] = False
        if self._inside:
            with_ops = self._data.ops.call[self._ops]
            leaf[with_ops[with_ops >= 0]] = False
        for call in np.flatnonzero(leaf & (calls.parent < 0)).tolist():  # a model without submodules
            module = self._data.modules[calls.module[call]]
            leaf[call] = module.type_module.partition(".")[0] == "torch" or selection.depth == 0
        if selection.op is not None:  # only modules that contain a selected op are shown
            self._shown &= ~leaf
        return leaf

    # -- steps -----------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Every block in order: a container is opened, contains its calls and ops, and is closed."""
        calls = self._data.calls
        firsts, ends, parents = calls.first_op.tolist(), calls.end_op.tolist(), calls.parent.tolist()
        ops = np.flatnonzero(self._ops).tolist()
        at = 0
        stack: list[int] = []  # containers that are open

        def ops_before(limit: int) -> Iterator[Step]:
            """The ops before an op, and the ends of containers between them."""
            nonlocal at
            while at < len(ops) and ops[at] < limit:
                while stack and ends[stack[-1]] <= ops[at]:
                    yield (CLOSE, stack.pop(), len(stack))
                yield (OP, ops[at], len(stack))
                at += 1

        for call in np.flatnonzero(self._shown).tolist():
            yield from ops_before(firsts[call])
            while stack:
                outer = call
                while outer > stack[-1]:
                    outer = parents[outer]
                if outer == stack[-1]:
                    break
                yield (CLOSE, stack.pop(), len(stack))
            yield (LEAF if self._leaf[call] else OPEN, call, len(stack))
            if not self._leaf[call]:
                stack.append(call)
        yield from ops_before(len(self._data.ops))
        while stack:
            yield (CLOSE, stack.pop(), len(stack))

    # -- blocks ----------------------------------------------------------------------------------

    def block_key(self, step: Step) -> BlockKey:
        """The key of a step's block: its text depends on nothing else."""
        kind, id, _ = step
        if kind == OP:
            frame = int(self._frames[id])
            key, numbers = self._variation.op_key(id)
            call = int(self._data.ops.call[id]) if self._phase != _FORWARD else -1
            path = self._data.modules[self._data.calls.module[call]].path if call >= 0 else ""
            return BlockKey((frame, key, _NUMBERED.sub("#", path)), numbers, (frame, path), frame)
        calls = self._data.calls
        module = self._data.modules[calls.module[id]]
        key, numbers = self._variation.call_key(id)
        key = (key, module.type, module.extra, _NUMBERED.sub("#", module.path), int(calls.flags[id]))
        return BlockKey(key, numbers, int(calls.module[id]), int(calls.frame[id]))

    def loop_start(self, frames: Sequence[int]) -> int:
        """The beginning of a loop body in the source: after the largest step back in line numbers."""
        chains = [self._chains.of(frame) for frame in frames]
        depth = 0
        while all(len(chain) > depth + 1 for chain in chains) and len({c[depth] for c in chains}) == 1:
            depth += 1
        if any(len(chain) <= depth for chain in chains):
            return 0
        lines = [int(self._data.frames.line[chain[depth]]) for chain in chains]
        return int(np.argmax(np.roll(lines, 1) - lines))

    def lines(self, block: FoldedBlock, style: BlockStyle) -> list[Line]:
        """The lines of a block, or of the end of a bracket."""
        if block.kind == REPEAT:
            return [style.repeat(block.depth, block.times)]
        if block.kind == REPEATED:
            return [style.repeated(block.depth)]
        if len(block.runs) == 1:
            return self._cached_lines(block, style)
        return self._block_lines(block, style)

    def _cached_lines(self, block: FoldedBlock, style: BlockStyle) -> list[Line]:
        """The lines of one call or op, cached for equal ones."""
        kind, id = block.kind, block.runs[0]
        columns: Any = self._data.ops if kind == OP else self._data.calls
        inputs = columns.inputs[columns.input_offsets[id] : columns.input_offsets[id + 1]]
        outputs = columns.outputs[columns.output_offsets[id] : columns.output_offsets[id + 1]]
        key: tuple[object, ...] = (kind, block.depth, int(columns.flags[id]))
        for values in (inputs, outputs):
            shown = values if self._statistics else self._data.values.meta[values]
            key = (*key, shown.tobytes())
        if kind == OP:
            call = int(columns.call[id]) if self._phase != _FORWARD else -1
            forms = int(columns.form[id]), int(columns.result[id])
            key = (*key, int(columns.name[id]), *forms, int(self._frames[id]), call)
        else:
            forms = int(columns.input_form[id]), int(columns.output_form[id])
            key = (*key, int(columns.module[id]), *forms)
        lines = self._blocks.get(key)
        if lines is None:
            lines = self._blocks[key] = self._block_lines(block, style)
        return lines

    def _block_lines(self, block: FoldedBlock, style: BlockStyle) -> list[Line]:
        if block.kind == OP:
            return style.op(self._op_event(block))
        event = self._module_event(block)
        return {OPEN: style.opened, CLOSE: style.closed, LEAF: style.leaf}[block.kind](event)

    def _values(self, block: FoldedBlock, slot: str) -> list[tuple[int, ...]]:
        """The values of each "input" or "output" over all runs, in order."""
        columns = self._data.ops if block.kind == OP else self._data.calls
        flat, offsets = getattr(columns, f"{slot}s"), getattr(columns, f"{slot}_offsets")
        # Runs that are alike have the same number of tensors, unless the file is damaged.
        return list(
            zip(*(flat[offsets[run] : offsets[run + 1]].tolist() for run in block.runs), strict=False)
        )

    def _metas(self, values: Sequence[tuple[int, ...]]) -> list[d.TensorMeta]:
        """The metas of values; sizes that differ between runs are ranges."""
        result = []
        for each in values:
            metas = [
                self._data.metas[id] for id in dict.fromkeys(self._data.values.meta[list(each)].tolist())
            ]
            meta = metas[0]
            if len(metas) > 1:
                sizes: tuple[Any, ...] = ("…",)  # an optimizer treats weights of any rank alike
                if len({len(other.shape) for other in metas}) == 1:
                    sizes = tuple(
                        column[0] if len(set(column)) == 1 else sizes_text(column)
                        for column in zip(*(other.sizes for other in metas), strict=True)
                    )
                meta = replace(meta, shape=sizes, symbols=())
            result.append(meta)
        return result

    def _statistics_spans(self, values: Sequence[tuple[int, ...]]) -> list[tuple[Span, ...]]:
        """The statistics of each value, over all runs."""
        if not self._statistics:
            return []
        return [each.spans if each else () for each in map(self._statistics.of, values)]

    def _op_event(self, block: FoldedBlock) -> LogOp:
        op, ops = block.runs[0], self._data.ops
        row = self._index.ops[op]
        chain = self._chains.of(int(self._frames[op]))
        function = self._index.frames[chain[-1]].function if chain else ""
        note = "" if self._phase == _FORWARD else row.phase
        if note and row.module is not None:
            labels = (self._index.ops[run].module for run in block.runs)
            note += f" of {_range_text([module.label for module in labels if module is not None])}"
        state = RAISED if row.raised else OK
        form, result = (self._variation.form(column, block.runs) for column in (ops.form, ops.result))
        inputs, outputs = self._values(block, "input"), self._values(block, "output")
        return LogOp(
            row.name, row.flavour, function, block.depth, form, self._metas(inputs), result,
            self._metas(outputs), state, note, self._statistics_spans(inputs),
            self._statistics_spans(outputs), block.times,
        )  # fmt: skip

    def _module_event(self, block: FoldedBlock) -> LogModule:
        call, calls = block.runs[0], self._data.calls
        row = self._index.module_calls[call]
        module = row.module
        state = RAISED if row.raised else UNFINISHED if row.unfinished else OK
        modules = dict.fromkeys(calls.module[list(block.runs)].tolist())
        label = _range_text([self._index.modules[each].label for each in modules])
        form, result = (self._variation.form(column, block.runs)
                        for column in (calls.input_form, calls.output_form))  # fmt: skip
        inputs, outputs = self._values(block, "input"), self._values(block, "output")
        return LogModule(
            label, module.type, module.extra, block.depth, bool(self._leaf[call]), form,
            self._metas(inputs), result, self._metas(outputs), state, not module.path,
            self._statistics_spans(inputs), self._statistics_spans(outputs), block.times,
        )  # fmt: skip


def _range_text(labels: Sequence[str]) -> str:
    """Paths that differ only in positions of lists, as one.

    >>> _range_text(["h.0.attn", "h.1.attn", "h.2.attn"])
    'h.0…2.attn'
    """
    ends = zip(labels[0].split("."), labels[-1].split("."), strict=False)
    return ".".join(first if first == last else f"{first}…{last}" for first, last in ends)
