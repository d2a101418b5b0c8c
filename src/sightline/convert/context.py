"""What the tables and the timeline read out of a recording: texts and look-ups, each derived on first use."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.lifetimes import Lifetimes, lifetimes
from sightline.notation import call_text
from sightline.trace import data as d
from sightline.trace.index import Index

Objects = NDArray[np.object_]

_KEPT: Final = 1 << 16  #: texts of calls that are remembered
_LONGEST: Final = 4000  #: characters of a call; arguments can be anything


class TableContext:
    """A recording with the texts that its rows are written with."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.raw = index.raw
        self._calls: dict[tuple[Any, ...], str] = {}
        self._once: dict[Callable[[TableContext], Objects], Objects] = {}

    def once(self, read: Callable[[TableContext], Objects]) -> Objects:
        """What a function makes of these facts, made the first time."""
        if read not in self._once:
            self._once[read] = read(self)
        return self._once[read]

    @cached_property
    def names(self) -> Objects:
        return texts(self.raw.names)

    @cached_property
    def metas(self) -> Objects:
        """Tensors as they are written: ``f32[2, 8]``."""
        return texts(self.index.meta_texts)

    def of_metas(self, read: Callable[[d.TensorMeta], Any]) -> Objects:
        return texts([read(meta) for meta in self.raw.metas])

    def of_modules(self, read: Callable[[d.ModuleInfo], Any]) -> Objects:
        return texts([read(module) for module in self.raw.modules])

    @cached_property
    def labels(self) -> Objects:
        """Of modules: the path, or the class of a root."""
        return self.of_modules(lambda module: module.label)

    @cached_property
    def producer_modules(self) -> d.I32:
        """The module of the op that made each value."""
        return np.append(self.index.op_modules, np.int32(-1))[self.raw.values.producer]

    @cached_property
    def op_lines(self) -> d.I32:
        """The frame outside torch where each op is written; for a backward op that of its forward op."""
        return self.index.line_frames[self.index.op_frames]

    @cached_property
    def call_lines(self) -> d.I32:
        return self.index.line_frames[self.raw.calls.frame]

    @cached_property
    def files(self) -> Objects:
        """Of frames, as are the next ones."""
        return texts([code.file for code in self.raw.codes])[self._frame_codes]

    @cached_property
    def functions(self) -> Objects:
        return texts([code.function for code in self.raw.codes])[self._frame_codes]

    @cached_property
    def lines(self) -> Objects:
        return texts(self.raw.frames.line.tolist())

    @cached_property
    def code(self) -> Objects:
        """The source line, empty where the source is not at hand."""
        files, lines = self.files[:-1].tolist(), self.raw.source_lines
        known = {file: lines.lines(file) for file in dict.fromkeys(files)}
        placed = zip(map(known.__getitem__, files), self.raw.frames.line.tolist(), strict=True)
        return texts([held[at - 1].strip() if 0 < at <= len(held) else "" for held, at in placed])

    @cached_property
    def _frame_codes(self) -> d.I32:
        return np.append(self.raw.frames.code, np.int32(-1))

    @cached_property
    def op_steps(self) -> d.I32:
        """The innermost named step of each op."""
        found = np.full(len(self.raw.ops), -1, dtype=np.int32)
        inner_last = sorted(
            enumerate(self.index.step_infos), key=lambda pair: pair[1].first_op - pair[1].end_op
        )
        for id, step in inner_last:
            found[step.first_op : step.end_op] = id
        return found

    @cached_property
    def step_names(self) -> Objects:
        return texts([step.name for step in self.index.step_infos])

    @cached_property
    def parameters(self) -> list[tuple[str, d.ParameterInfo]]:
        """Every parameter and buffer, with the label of its module."""
        modules = self.raw.modules
        return [(module.label, info) for module in modules for info in module.parameters]

    @cached_property
    def edge_sources(self) -> d.I32:
        """For each op input the op that made it."""
        return self.raw.values.producer[self.raw.ops.inputs]

    @cached_property
    def lifetimes(self) -> Lifetimes:
        return lifetimes(self.raw)

    def op_text(
        self, name: int, form: int, result: int, inputs: Sequence[int], outputs: Sequence[int]
    ) -> str:
        """``mm(f32[2, 8], f32[8, 4]) -> f32[2, 4]``; the tensors are given by their metadata."""
        key = (name, form, result, *inputs, None, *outputs)
        text = self._calls.get(key)
        if text is None:
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            metas, forms = self.metas, self.raw.forms
            returned = forms[result].fill([metas[meta] for meta in outputs])
            text = call_text(self.raw.names[name], forms[form], [metas[meta] for meta in inputs], returned)
            text = self._calls[key] = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        return text


class Lists:
    """The lists of some rows, out of one flat column: their items, and where each list begins and ends."""

    def __init__(self, offsets: d.I64, flat: d.I32, rows: NDArray[Any]) -> None:
        begin, count = offsets[rows], offsets[rows + 1] - offsets[rows]
        self.bounds = np.concatenate([[0], np.cumsum(count)])
        self.items = flat[np.repeat(begin - self.bounds[:-1], count) + np.arange(self.bounds[-1])]


def texts(items: Sequence[Any]) -> Objects:
    """Anything by its id, and None for -1, as numpy looks it up."""
    found = np.empty(len(items) + 1, dtype=object)
    found[:-1] = items
    return found


def json_text(value: Any) -> str:
    """Plain data as JSON that every parser takes: no NaN, and no half of a surrogate pair.

    >>> json_text({"a": [1, float("nan"), "\\ud800"]})
    '{"a":[1,null,"\\\\ufffd"]}'
    """
    try:
        text = _STRICT.encode(value)
    except ValueError:
        text = _STRICT.encode(_without_nan(value))
    return text if "\\ud" not in text else _STRICT.encode(_whole(json.loads(text)))


_STRICT: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=repr)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value
