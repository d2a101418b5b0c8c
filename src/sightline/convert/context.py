"""`TableContext`: texts and look-ups that the tables and the timeline share, each derived on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.lifetimes import Lifetimes, lifetimes
from sightline.analysis.row_groups import flat_positions
from sightline.data import trace_data as d
from sightline.data.forms import SUBSCRIPTS
from sightline.data.index import Index

#: Objects by id, and None at the end, where -1 looks.
Objects = NDArray[np.object_]

_CACHED_TEXTS: Final = 1 << 16
_LONGEST: Final = 4000  #: characters of a call; arguments can be anything


class TableContext:
    """A recording with the texts that its rows are written with."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.raw = index.raw
        self._form_texts: dict[tuple[int, tuple[int, ...]], str] = {}
        self._cache: dict[Callable[[TableContext], Objects], Objects] = {}

    def cached(self, read: Callable[[TableContext], Objects]) -> Objects:
        """The result of ``read`` for this recording, computed the first time."""
        if read not in self._cache:
            self._cache[read] = read(self)
        return self._cache[read]

    @cached_property
    def names(self) -> Objects:
        """Names by their id."""
        return objects(self.raw.names)

    @cached_property
    def metas(self) -> Objects:
        """Kinds of tensors as they are written: ``f32[2, 8]``."""
        return objects(self.index.meta_texts)

    def of_metas(self, read: Callable[[d.TensorMeta], Any]) -> Objects:
        """Something about each kind of tensor."""
        return objects([read(meta) for meta in self.raw.metas])

    def of_modules(self, read: Callable[[d.ModuleInfo], Any]) -> Objects:
        """Something about each module."""
        return objects([read(module) for module in self.raw.modules])

    @cached_property
    def labels(self) -> Objects:
        """Paths of modules, or the class of a root."""
        return self.of_modules(lambda module: module.label)

    @cached_property
    def call_numbers(self) -> d.I32:
        """For each op, which call of its module it ran in, from 0; -1 outside all modules."""
        return np.append(self.raw.calls.index, np.int32(-1))[self.raw.ops.call]

    @cached_property
    def producer_modules(self) -> d.I32:
        """The module of the op that made each value."""
        return np.append(self.index.op_modules, np.int32(-1))[self.raw.values.producer]

    # -- source lines ------------------------------------------------------------------------------

    @cached_property
    def op_lines(self) -> d.I32:
        """The frame outside torch where each op is written; for a backward op that of its forward op."""
        return self.index.line_frames[self.index.op_frames]

    @cached_property
    def line_keys(self) -> d.I64:
        """For each op a number that is equal for ops of one source line; -1 without one."""
        frames, codes = self.raw.frames, self.raw.codes
        files = {code.file: at for at, code in enumerate(codes)}
        of_code = np.array([files[code.file] for code in codes], dtype=np.int64)
        return np.append((of_code[frames.code] << 32) + frames.line, -1)[self.op_lines]

    @cached_property
    def call_lines(self) -> d.I32:
        """The frame outside torch that made each module call."""
        return self.index.line_frames[self.raw.calls.frame]

    @cached_property
    def files(self) -> Objects:
        """The file of each frame."""
        return objects([code.file for code in self.raw.codes])[self._frame_codes]

    @cached_property
    def functions(self) -> Objects:
        """The function of each frame."""
        return objects([code.function for code in self.raw.codes])[self._frame_codes]

    @cached_property
    def lines(self) -> Objects:
        """The line number of each frame."""
        return objects(self.raw.frames.line.tolist())

    @cached_property
    def code(self) -> Objects:
        """The source line of each frame, empty where the source is not at hand."""
        files, source = self.files[:-1].tolist(), self.raw.source_lines
        texts = {file: source.lines(file) for file in dict.fromkeys(files)}
        pairs = zip(map(texts.__getitem__, files), self.raw.frames.line.tolist(), strict=True)
        return objects([text[at - 1].strip() if 0 < at <= len(text) else "" for text, at in pairs])

    @cached_property
    def _frame_codes(self) -> d.I32:
        return np.append(self.raw.frames.code, np.int32(-1))

    # -- the run -----------------------------------------------------------------------------------

    @cached_property
    def op_steps(self) -> d.I32:
        """The innermost named step of each op."""
        steps = np.full(len(self.raw.ops), -1, dtype=np.int32)
        longest_first = sorted(
            enumerate(self.index.step_infos), key=lambda pair: pair[1].first_op - pair[1].end_op
        )
        for id, step in longest_first:  # an inner one overwrites the one around it
            steps[step.first_op : step.end_op] = id
        return steps

    @cached_property
    def step_names(self) -> Objects:
        """Names of steps."""
        return objects([step.name for step in self.index.step_infos])

    @cached_property
    def parameters(self) -> list[tuple[str, d.ParameterInfo]]:
        """Every parameter and buffer, with the label of its module."""
        return [(module.label, info) for module in self.raw.modules for info in module.parameters]

    @cached_property
    def edge_sources(self) -> d.I32:
        """For each op input the op that made it."""
        return self.raw.values.producer[self.raw.ops.inputs]

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """When each storage was in use."""
        return lifetimes(self.raw)

    # -- calls as text -------------------------------------------------------------------------------

    def form_text(self, form: int, metas: Sequence[int]) -> str:
        """Arguments or a result as text; the tensors are given by their metadata."""
        key = (form, tuple(metas))
        text = self._form_texts.get(key)
        if text is None:
            if len(self._form_texts) >= _CACHED_TEXTS:
                self._form_texts.clear()
            text = self.raw.forms[form].fill([self.metas[meta] for meta in metas]) if form >= 0 else ""
            self._form_texts[key] = text
        return text

    def op_text(
        self, name: int, form: int, result: int, inputs: Sequence[int], outputs: Sequence[int]
    ) -> str:
        """``mm(f32[2, 8], f32[8, 4]) -> f32[2, 4]``; the tensors are given by their metadata."""
        text = self.raw.names[name]
        if text in SUBSCRIPTS and form >= 0:
            text = "".join(self.raw.forms[form].written(text, [self.metas[meta] for meta in inputs]))
        else:
            text += f"({self.form_text(form, inputs)})"
        returned = self.form_text(result, outputs)
        text = f"{text} -> {returned}" if returned else text
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class Lists:
    """The lists of some rows, out of one flat column: their items, and where each list begins and ends."""

    def __init__(self, offsets: d.I64, flat: d.I32, rows: NDArray[Any]) -> None:
        places, lengths = flat_positions(offsets, rows)
        self.items = flat[places]
        self.bounds: list[int] = [0, *np.cumsum(lengths).tolist()]

    def split(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Something about each item, list by list."""
        return (items[begin:end] for begin, end in pairwise(self.bounds))


def objects(items: Sequence[Any]) -> Objects:
    """Anything by its id, and None for -1, as numpy looks it up."""
    array = np.empty(len(items) + 1, dtype=object)
    array[:-1] = items
    return array
