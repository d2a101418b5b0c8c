"""`Side`: one of the two recordings, or one step of it, laid out for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.argument_checks import argument_text
from sightline.diff.op_names import LAYOUT, plain_name
from sightline.errors import NothingMatched, UsageError
from sightline.trace.data import KINDS, LEVELS, ModuleInfo, ParameterInfo, TraceData
from sightline.trace.index import Index, ValueNumbers


@dataclass(frozen=True, slots=True)
class Span:
    """Ops [first_op, end_op) and module calls [first_call, end_call)."""

    first_op: int
    end_op: int
    first_call: int
    end_call: int


def span_of(data: TraceData, step: str | int | None) -> Span:
    """The span of a step, by its name or its number; all of the recording without one."""
    if step is None:
        return Span(0, len(data.ops), 0, len(data.calls))
    if type(step) not in (str, int):
        raise UsageError(
            f"step={argument_text(step)} must be the name or the number of a step, or a pair of them."
        )
    names = [info.name for info in data.steps]
    if isinstance(step, int) and 0 <= step < len(names):
        found = data.steps[step]
    elif step in names:
        found = data.steps[names.index(str(step))]
    else:
        known = (
            f"it has {', '.join(map(repr, names[:6]))}{', …' if len(names) > 6 else ''}"
            if names
            else "it has none"
        )
        raise NothingMatched(f"step={step!r} is no step of this recording; {known}.")
    return Span(found.first_op, found.end_op, found.first_call, found.end_call)


_ATEN: Final = LEVELS.index("aten")
#: Half the distance of neighbours around one, by dtype: what a single rounding changes at most.
ROUNDING: Final = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-9,
    "complex64": 2.0**-24, "complex128": 2.0**-53, "complex32": 2.0**-11,
    "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4, "float8_e5m2": 2.0**-3, "float8_e5m2fnuz": 2.0**-3,
}  # fmt: skip


class Side:
    """A recording with what a comparison looks up: plain lists, one entry per op or value."""

    def __init__(self, index: Index, level: str, words: dict[Any, int], span: Span) -> None:
        self.index = index
        self.data: TraceData = index.raw
        self.span = span
        self._words = words  # shared by both sides: equal keys have equal numbers
        ops = self.data.ops
        self.input_offsets: list[int] = ops.input_offsets.tolist()
        self.flat_inputs: list[int] = ops.inputs.tolist()
        self.output_offsets: list[int] = ops.output_offsets.tolist()
        self.flat_outputs: list[int] = ops.outputs.tolist()
        plain = [plain_name(name) for name in self.data.names]
        self._plain = np.array([self.word(name) for name in plain] or [0], dtype=np.int64)
        self._is_layout = np.array([name in LAYOUT for name in plain] or [False])
        self.name: NDArray[np.int64] = self._plain[ops.name] if len(ops) else np.zeros(0, dtype=np.int64)
        self.names: list[str] = plain
        self.name_ids: list[int] = ops.name.tolist()
        self.compared = self._compared(level)
        self.layout: NDArray[np.bool_] = self._layout()

    def word(self, key: Any) -> int:
        """A number that both sides have for this key."""
        return self._words.setdefault(key, len(self._words))

    def inputs(self, op: int) -> list[int]:
        return self.flat_inputs[self.input_offsets[op] : self.input_offsets[op + 1]]

    def outputs(self, op: int) -> list[int]:
        return self.flat_outputs[self.output_offsets[op] : self.output_offsets[op + 1]]

    def op_name(self, op: int) -> str:
        """The plain name of an op."""
        return self.names[self.name_ids[op]]

    def _compared(self, level: str) -> NDArray[np.bool_]:
        """Which ops take part: those without ops inside that make something new."""
        ops = self.data.ops
        chosen = np.ones(len(ops), dtype=np.bool_)
        if level == "aten":
            chosen[ops.parent[ops.parent >= 0]] = False
        elif level == "api":
            chosen = ops.level != _ATEN
        else:
            chosen[:] = False
        chosen[: self.span.first_op] = chosen[self.span.end_op :] = False
        counts = np.diff(ops.output_offsets)
        chosen &= counts > 0
        if level != "none":
            for op in np.flatnonzero(chosen & (ops.level != _ATEN)).tolist():
                if set(self.outputs(op)) <= set(self.inputs(op)):  # handed on, as `.to()` often does
                    chosen[op] = False
        return chosen

    def _layout(self) -> NDArray[np.bool_]:
        ops = self.data.ops
        found = self._is_layout[ops.name] if len(ops) else np.zeros(0, dtype=np.bool_)
        return found & (np.diff(ops.input_offsets) > 0)

    # -- values --------------------------------------------------------------------------------

    @cached_property
    def producer(self) -> list[int]:
        """For each value the compared op that made it; -1 where there is none."""
        made = np.full(len(self.data.values), -1, dtype=np.int64)
        ops = self.data.ops
        counts = np.diff(ops.output_offsets)
        users = np.repeat(np.arange(len(ops)), counts)
        known = self.data.values.producer
        at_own = (known >= 0) & self.compared[np.maximum(known, 0)] if len(ops) else known >= 0
        keep = self.compared[users] if len(users) else np.zeros(0, dtype=np.bool_)
        # the first compared op that returns a value, unless the recording names one itself
        made[ops.outputs[keep][::-1]] = users[keep][::-1]
        made[at_own] = known[at_own]
        found: list[int] = made.tolist()
        return found

    @cached_property
    def origin(self) -> list[int]:
        """For each value the one whose elements it shows: itself unless a layout op made it."""
        origin = list(range(len(self.data.values)))
        for op in np.flatnonzero(self.compared & self.layout).tolist():
            given = self.inputs(op)
            for value in self.outputs(op):
                if value != given[0]:
                    origin[value] = origin[given[0]]
        return origin

    def shown_by(self, value: int) -> list[int]:
        """A value and those whose elements it shows, through layout ops."""
        found = [value]
        origin = self.origin[value]
        while value != origin:
            value = self.inputs(self.producer[value])[0]
            found.append(value)
        return found

    @cached_property
    def numel(self) -> list[int]:
        sizes = np.array([meta.numel for meta in self.data.metas] or [0], dtype=np.int64)
        found: list[int] = sizes[self.data.values.meta].tolist()
        return found

    @cached_property
    def rounding(self) -> list[float]:
        """What one rounding changes, by the dtype of each value; 0 for what is not floating."""
        sizes = np.array([ROUNDING.get(meta.dtype, 0.0) for meta in self.data.metas] or [0.0])
        found: list[float] = sizes[self.data.values.meta].tolist()
        return found

    @cached_property
    def history(self) -> list[float]:
        """The coarsest rounding that each value, or anything it was made of, has been through."""
        return self._past[0]

    @cached_property
    def depth(self) -> list[int]:
        """How many ops that compute each value has been through, along the longest way."""
        return self._past[1]

    @cached_property
    def _past(self) -> tuple[list[float], list[int]]:
        coarsest, depths = list(self.rounding), [0] * len(self.data.values)
        layout = self.layout.tolist()
        for op in np.flatnonzero(self.compared).tolist():
            worst, deepest = 0.0, 0
            for value in self.inputs(op):
                worst, deepest = max(worst, coarsest[value]), max(deepest, depths[value])
            deepest += not layout[op]
            for value in self.outputs(op):
                depths[value] = max(depths[value], deepest)
                if self.rounding[value] and worst > coarsest[value]:
                    coarsest[value] = worst
        return coarsest, depths

    @cached_property
    def stat_row(self) -> list[int]:
        """Where in the statistics each value is; -1 where it was not measured."""
        rows = np.full(len(self.data.values), -1, dtype=np.int64)
        rows[self.data.stats.value] = np.arange(len(self.data.stats))
        found: list[int] = rows.tolist()
        return found

    @cached_property
    def _stats(self) -> list[list[Any]]:
        stats = self.data.stats
        names = ("min", "max", "mean", "std", "l2", "zeros", "nans", "infs", "fingerprint")
        return [getattr(stats, name).tolist() for name in names]

    def numbers(self, value: int) -> ValueNumbers | None:
        """The statistics of a value, if they were taken."""
        row = self.stat_row[value]
        return None if row < 0 else ValueNumbers(*(column[row] for column in self._stats))

    @cached_property
    def fingerprints(self) -> list[int]:
        """The fingerprint of each value; 0 where none was taken."""
        bits = np.zeros(len(self.data.values), dtype=np.uint64)
        bits[self.data.stats.value] = self.data.stats.fingerprint
        found: list[int] = bits.tolist()
        return found

    def kind(self, value: int) -> str:
        return KINDS[int(self.data.values.kind[value])]

    # -- keys ----------------------------------------------------------------------------------

    def keys(self, ops: NDArray[np.int64], fingerprints: bool) -> list[NDArray[np.int64]]:
        """Keys of ops for `sequences.aligned`: with fingerprint, with constants and size, by name."""
        columns = self.data.ops
        if not len(ops):
            none = np.zeros(0, dtype=np.int64)
            return [none, none, none]
        made = columns.outputs[columns.output_offsets[ops]]
        sizes = np.array(self.numel, dtype=np.int64)[made] if len(self.numel) else made
        name = self.name[ops]
        plain = np.array([self.word(("op", n)) for n in name.tolist()], dtype=np.int64)
        sized = np.array(
            [
                self.word(key)
                for key in zip(name.tolist(), sizes.tolist(), self._forms[ops].tolist(), strict=True)
            ],
            dtype=np.int64,
        )
        strict = np.full(len(ops), -1, dtype=np.int64)
        if fingerprints:
            rows = np.array(self.stat_row, dtype=np.int64)[made]
            bits = (
                np.where(rows >= 0, self.data.stats.fingerprint[np.maximum(rows, 0)], 0)
                if len(self.data.stats)
                else rows * 0
            )
            strict = np.array(
                [
                    self.word((n, "bits", b)) if b else -1
                    for n, b in zip(name.tolist(), bits.tolist(), strict=True)
                ],
                dtype=np.int64,
            )
        return [strict, sized, plain]

    @cached_property
    def _forms(self) -> NDArray[np.int64]:
        """A number for the constants of each op, the same on both sides for the same constants."""
        known = np.array([self.word(("form", repr(form))) for form in self.data.forms] or [0], dtype=np.int64)
        return known[self.data.ops.form] if len(self.data.ops) else known[:0]

    # -- parameters ----------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> dict[str, tuple[ParameterInfo, int]]:
        """Every parameter and buffer by its path, with the first value it had; -1 where none was seen."""
        named: dict[str, int] = {}
        names, values = self.data.names, self.data.values
        held = np.isin(values.kind, [KINDS.index("parameter"), KINDS.index("buffer")]) & (values.name >= 0)
        for value in np.flatnonzero(held).tolist():
            known = named.setdefault(names[int(values.name[value])], value)
            if self.stat_row[known] < 0 <= self.stat_row[value]:
                named[names[int(values.name[value])]] = value
        by_key: dict[int, int] = {}
        for module in self.data.modules:
            for info in module.parameters:
                if info.path in named:
                    by_key.setdefault(info.key, named[info.path])
        found = {}
        for module in self.data.modules:
            for info in module.parameters:
                found[info.path] = (info, named.get(info.path, by_key.get(info.key, -1)))
        return found

    @cached_property
    def usual_rounding(self) -> float:
        """The rounding of the dtype that the parameters have, the coarsest of them."""
        return max((ROUNDING.get(info.dtype, 0.0) for info, _ in self.parameters.values()), default=0.0)

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """The value of a parameter or buffer and its path."""
        return {value: path for path, (_, value) in reversed(self.parameters.items()) if value >= 0}

    # -- modules -------------------------------------------------------------------------------

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The calls inside each call that are compared; -1 has the outermost."""
        first, end = self.span.first_call, self.span.end_call
        if (first, end) == (0, len(self.data.calls)):
            return self.index.calls_of_parent
        found: dict[int, list[int]] = {}
        for call in range(first, end):
            parent = int(self.data.calls.parent[call])
            found.setdefault(parent if parent >= first else -1, []).append(call)
        return found

    def module(self, call: int) -> ModuleInfo:
        return self.data.modules[int(self.data.calls.module[call])]

    def label(self, call: int) -> str:
        """The path of the module of a call, or the class of a root; "" outside every module."""
        if call < 0:
            return ""
        info = self.module(call)
        return info.path or info.type

    @cached_property
    def _subtrees(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for id in range(len(self.data.modules)):
            at = id
            while at >= 0:
                found.setdefault(at, []).append(id)
                at = self.data.modules[at].parent
        return found

    @cached_property
    def _weights(self) -> dict[int, NDArray[np.float64]]:
        return {}

    def weights(self, module: int) -> NDArray[np.float64]:
        """Size and norm of every parameter at and below a module, in order; NaN where not measured."""
        known = self._weights.get(module)
        if known is None:
            rows = []
            for inner in self._subtrees.get(module, [module]):
                for info in self.data.modules[inner].parameters:
                    if info.buffer:
                        continue
                    value = self.parameters[info.path][1]
                    numbers = self.numbers(value) if value >= 0 else None
                    rows.append((info.numel, numbers.l2 if numbers else np.nan))
            known = self._weights[module] = np.array(rows, dtype=np.float64).reshape(-1, 2)
        return known
