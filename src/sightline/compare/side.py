"""`Side`: one of the two recordings, or one step of it, prepared for comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.cost import is_opaque
from sightline.analysis.step_summaries import step_span
from sightline.compare.constants import constants
from sightline.compare.op_names import LAYOUT, PRODUCTS, activations, plain_name
from sightline.compare.sequences import surplus
from sightline.data.index import Index, ValueNumbers
from sightline.data.trace_data import KINDS, LEVELS, ModuleInfo, ParameterInfo, StatColumns, TraceData
from sightline.errors import DamagedFile
from sightline.notation import position_text
from sightline.text_encoding import printable

StepRange = int | str | slice  #: a step: a number, a name, ``"3:5"``, ``"last"``


@printable
@dataclass(frozen=True, slots=True)
class OpLabel:
    """An op of one recording, in words: ``* at port.py:40 (blocks.0.mixer)``."""

    op: int  #: -1 where only its module is known
    name: str  #: as written: ``F.linear``, ``*``
    aten: str
    file: str
    line: int
    function: str
    code: str
    module: str

    @property
    def position(self) -> str:
        """``port.py:40``; "" where no frame was recorded."""
        return position_text(self.file, self.line) if self.file else ""

    def __str__(self) -> str:
        return f"{self.name}{self.where}"

    @property
    def where(self) -> str:
        """`` at port.py:40 (blocks.0.mixer)``."""
        position = f" at {self.position}" if self.file else ""
        return f"{position} ({self.module})" if self.module else position

    def to_dict(self) -> dict[str, Any]:
        return {"op": self.op, "name": self.name, "aten": self.aten, "file": self.file, "line": self.line,
                "function": self.function, "code": self.code, "module": self.module}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Ops [first_op, end_op) and module calls [first_call, end_call)."""

    first_op: int
    end_op: int
    first_call: int
    end_call: int


def span_of(index: Index, step: StepRange | None) -> Span:
    """The span of a step or of several; all of the recording without one."""
    if step is None:
        return Span(0, len(index.raw.ops), 0, len(index.raw.calls))
    info = step_span(index, step)
    return Span(info.first_op, info.end_op, info.first_call, info.end_call)


_ATEN: Final = LEVELS.index("aten")
#: Half the spacing of numbers around one, by dtype: the most that a single rounding changes.
ROUNDING: Final = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-9,
    "complex64": 2.0**-24, "complex128": 2.0**-53, "complex32": 2.0**-11,
    "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4, "float8_e5m2": 2.0**-3, "float8_e5m2fnuz": 2.0**-3,
}  # fmt: skip
#: The precision that ``torch.set_float32_matmul_precision`` allows for products; a GPU takes TF32 for both.
_PRODUCTS: Final = {"high": "TF32", "medium": "bfloat16"}


class Side:
    """A recording with the look-ups of a comparison: one entry per op or value."""

    def __init__(self, index: Index, level: str, key_ids: dict[Any, int], span: Span) -> None:
        self.index = index
        self.data: TraceData = index.raw
        self.span = span
        #: The statistics, or none with the reason where the file is damaged there.
        self.stats, self.stats_fault = StatColumns.none(), ""
        try:
            self.stats = replace(self.data.stats)  # reads every column
        except DamagedFile as error:
            self.stats_fault = str(error).removesuffix(".")
        self._weights: dict[int, NDArray[np.float64]] = {}
        self._key_ids = key_ids  # shared by both sides: equal keys have equal ids
        ops = self.data.ops
        self.input_offsets, self.flat_inputs = _numbers(ops.input_offsets), _numbers(ops.inputs)
        self.output_offsets, self.flat_outputs = _numbers(ops.output_offsets), _numbers(ops.outputs)
        plain = [plain_name(name) for name in self.data.names]
        plain_ids = np.array([self.key_id(name) for name in plain] or [0], dtype=np.int64)
        self.name: NDArray[np.int64] = plain_ids[ops.name] if len(ops) else np.zeros(0, dtype=np.int64)
        self.names: list[str] = plain
        self.name_ids: memoryview[int] = _numbers(ops.name)
        self.compared = self._compared_ops(level)
        #: Which ops only return elements of their first input.
        self.layout: NDArray[np.bool_] = np.diff(ops.input_offsets) > 0
        if len(ops):
            self.layout &= np.array([name in LAYOUT for name in plain])[ops.name]

        #: Which ops are compiled regions, whose own ops were not recorded.
        self.opaque: NDArray[np.bool_] = is_opaque(self.data)
        self.opaque[: span.first_op] = self.opaque[span.end_op :] = False

    @cached_property
    def computing(self) -> list[int]:
        """The compared ops that compute something, in order."""
        ops: list[int] = np.flatnonzero(self.compared & ~self.layout).tolist()
        return ops

    def key_id(self, key: Any) -> int:
        """The id of a key, which is the same on both sides."""
        return self._key_ids.setdefault(key, len(self._key_ids))

    def inputs(self, op: int) -> list[int]:
        return self.flat_inputs[self.input_offsets[op] : self.input_offsets[op + 1]].tolist()

    def outputs(self, op: int) -> list[int]:
        return self.flat_outputs[self.output_offsets[op] : self.output_offsets[op + 1]].tolist()

    def op_name(self, op: int) -> str:
        """The plain name of an op."""
        return self.names[self.name_ids[op]]

    def unlike(self, ops: Iterable[int], other: Side, others: Iterable[int]) -> list[int]:
        """The given ops beyond those of the same name and size that the other side has."""

        def name_and_size(side: Side, op: int) -> tuple[str, tuple[int, ...]]:
            return side.op_name(op), tuple(side.numel[value] for value in side.outputs(op))

        return surplus(
            ((op, name_and_size(self, op)) for op in ops), (name_and_size(other, op) for op in others)
        )

    def op_label(self, op: int) -> OpLabel:
        """The name of an op as written, its line and its module."""
        row = self.index.ops[op]
        file, line, function, code = "", 0, "", ""
        user_frame = int(self.index.op_user_frames[op])
        if user_frame >= 0:
            frame = self.index.frames[user_frame]
            file, line, function, code = frame.file, frame.line, frame.function, frame.code
        module = self.label(int(self.data.ops.call[op]))
        written = row.parent if row.parent is not None and row.phase != "backward" else row
        return OpLabel(op, written.name, row.name, file, line, function, code, module)

    def call_label(self, value: int) -> OpLabel | None:
        """The module that first returned a value, where the op that made it is unknown."""
        calls = self.data.calls
        returned = np.flatnonzero(calls.outputs == value)
        if not len(returned):
            return None
        callers = np.searchsorted(calls.output_offsets, returned, side="right") - 1
        call = int(callers[np.argmin(calls.order[callers])])
        return OpLabel(-1, self.module(call).type, "", "", 0, "", "", self.label(call))

    def _compared_ops(self, level: str) -> NDArray[np.bool_]:
        """Which ops are compared: those that contain no other op and return something new."""
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
        for op in np.flatnonzero(chosen & (ops.level != _ATEN)).tolist():
            # It returns its input unchanged, as `.to()` often does.
            chosen[op] = not set(self.outputs(op)) <= set(self.inputs(op))
        return chosen

    # -- values --------------------------------------------------------------------------------

    @cached_property
    def producer(self) -> memoryview[int]:
        """The compared op that returned each value; -1 where there is none."""
        producer = np.full(len(self.data.values), -1, dtype=np.int64)
        ops = self.data.ops
        counts = np.diff(ops.output_offsets)
        returning = np.repeat(np.arange(len(ops)), counts)
        recorded = self.data.values.producer
        own = (recorded >= 0) & self.compared[np.maximum(recorded, 0)] if len(ops) else recorded >= 0
        keep = self.compared[returning] if len(returning) else np.zeros(0, dtype=np.bool_)
        # The first compared op that returns a value, unless the recorded producer is compared itself.
        producer[ops.outputs[keep][::-1]] = returning[keep][::-1]
        producer[own] = recorded[own]
        return _numbers(producer)

    @cached_property
    def origin(self) -> memoryview[int]:
        """The value whose elements each value has: itself, unless it is the result of a layout op."""
        origin = _numbers(np.arange(len(self.data.values)))
        for op in np.flatnonzero(self.compared & self.layout).tolist():
            source = self.inputs(op)[0]
            for value in self.outputs(op):
                if value != source:
                    origin[value] = origin[source]
        return origin

    def layout_chain(self, value: int) -> list[int]:
        """A value and the inputs of the layout ops behind it, back to its origin."""
        chain = [value]
        origin = self.origin[value]
        while value != origin:
            value = self.inputs(self.producer[value])[0]
            chain.append(value)
        return chain

    @cached_property
    def numel(self) -> memoryview[int]:
        sizes = np.array([meta.numel for meta in self.data.metas] or [0], dtype=np.int64)
        return _numbers(sizes[self.data.values.meta])

    @cached_property
    def rounding(self) -> memoryview[float]:
        """The error of one rounding in the dtype of each value; 0 where that is not floating."""
        sizes = np.array([ROUNDING.get(meta.dtype, 0.0) for meta in self.data.metas] or [0.0])
        return _numbers(sizes[self.data.values.meta])

    @cached_property
    def history(self) -> memoryview[float]:
        """The coarsest rounding in each value and in everything it was computed from."""
        return self._past[0]

    @cached_property
    def depth(self) -> memoryview[int]:
        """The number of computing ops behind each value, along the longest path."""
        return self._past[1]

    @cached_property
    def _past(self) -> tuple[memoryview[float], memoryview[int]]:
        rounding = self.rounding.tolist()
        coarsest: list[float] = list(rounding)
        depths = [0] * len(self.data.values)
        products = self._product_rounding
        names, metas = self.name_ids, self.data.values.meta.tolist() if products else []
        layout = self.layout.tolist()
        for op in np.flatnonzero(self.compared).tolist():
            worst, deepest = 0.0, 0
            for value in self.inputs(op):
                worst, deepest = max(worst, coarsest[value]), max(deepest, depths[value])
            deepest += not layout[op]
            if products:
                worst = max(worst, products.get((names[op], metas[self.outputs(op)[0]]), 0.0))
            for value in self.outputs(op):
                depths[value] = max(depths[value], deepest)
                if rounding[value] and worst > coarsest[value]:
                    coarsest[value] = worst
        return _numbers(np.array(coarsest, dtype=np.float64)), _numbers(np.array(depths, dtype=np.int64))

    @cached_property
    def precision(self) -> dict[str, str]:
        """The precision of float32 products where that is coarser: ``{"matmul": "TF32"}``."""
        settings = self.data.info.get("precision") or {}
        kinds = {"matmul": _PRODUCTS.get(str(settings.get("float32_matmul")), "")}
        kinds["convolution"] = "TF32" if settings.get("cudnn_tf32") is True else ""
        return {name: kind for name, kind in kinds.items() if kind}

    @cached_property
    def _product_rounding(self) -> dict[tuple[int, int], float]:
        """The rounding of float32 products by the name of an op and the form of its result."""
        roundings: dict[tuple[int, int], float] = {}
        metas = [at for at, meta in enumerate(self.data.metas) if meta.dtype == "float32"]
        for name, plain in enumerate(self.names) if self.precision else ():
            kind = self.precision.get("convolution" if plain == "convolution" else "matmul", "")
            if not kind or plain not in PRODUCTS:
                continue
            for meta in metas:
                on_gpu = self.data.metas[meta].device.startswith("cuda")
                if on_gpu or plain != "convolution":  # a processor has no TF32 for convolutions
                    roundings[name, meta] = 2.0**-11 if on_gpu or kind == "TF32" else 2.0**-9
        return roundings

    @cached_property
    def stat_row(self) -> memoryview[int]:
        """The row of each value in the statistics; -1 where it was not measured."""
        rows = np.full(len(self.data.values), -1, dtype=np.int64)
        rows[self.stats.value] = np.arange(len(self.stats))
        return _numbers(rows)

    @cached_property
    def _stats(self) -> list[memoryview[Any]]:
        names = ("min", "max", "mean", "std", "l2", "zeros", "nans", "infs", "fingerprint")
        return [_numbers(getattr(self.stats, name)) for name in names]

    def numbers(self, value: int) -> ValueNumbers | None:
        """The statistics of a value, or None."""
        row = self.stat_row[value]
        return None if row < 0 else ValueNumbers(*(column[row] for column in self._stats))

    @cached_property
    def fingerprints(self) -> memoryview[int]:
        """The fingerprint of each value; 0 where none was taken."""
        bits = np.zeros(len(self.data.values), dtype=np.uint64)
        bits[self.stats.value] = self.stats.fingerprint
        return _numbers(bits)

    def shape(self, value: int) -> tuple[int, ...]:
        return self.data.metas[int(self.data.values.meta[value])].shape

    def kind(self, value: int) -> str:
        return KINDS[int(self.data.values.kind[value])]

    @cached_property
    def leaf_consumers(self) -> dict[int, list[int]]:
        """The computing ops that use each value that no op returned."""
        consumers: dict[int, list[int]] = {}
        for op in self.computing:
            for value in self.inputs(op):
                origin = self.origin[value]
                if self.producer[origin] < 0:
                    consumers.setdefault(origin, []).append(op)
        return consumers

    def consumers(self, value: int) -> list[int]:
        """The ops that use a value, in order."""
        offsets, ops = self._consumers
        return ops[offsets[value] : offsets[value + 1]].tolist()

    @cached_property
    def _consumers(self) -> tuple[memoryview[int], memoryview[int]]:
        """The consumers of all values, one after the other, and where those of each begin."""
        ops = np.repeat(np.arange(len(self.compared)), np.diff(self.data.ops.input_offsets))
        chosen = self.compared[ops]
        ops, values = ops[chosen], self.data.ops.inputs[chosen]
        offsets = np.zeros(len(self.data.values) + 1, dtype=np.int64)
        np.cumsum(np.bincount(values, minlength=len(self.data.values)), out=offsets[1:])
        return _numbers(offsets), _numbers(ops[np.argsort(values, kind="stable")])

    def activations(self, ops: Iterable[int]) -> frozenset[str] | None:
        """The functions at the heart of the activations among ops; None where exponentials may hide one."""
        names = []
        for op in ops:
            name = self.op_name(op)
            approximate = dict(constants(self.index.ops[op])).get("approximate") if name == "gelu" else ""
            names.append("tanh" if approximate == "tanh" else name)
        return activations(names)

    # -- keys ----------------------------------------------------------------------------------

    def keys(self, ops: NDArray[np.int64], fingerprints: bool) -> list[NDArray[np.int64]]:
        """Keys of ops for `sequences.align`: with fingerprint, with constants and size, by name."""
        columns = self.data.ops
        if not len(ops):
            return [np.zeros(0, dtype=np.int64)] * 3
        results = columns.outputs[columns.output_offsets[ops]]
        sizes = np.asarray(self.numel)[results] if len(self.numel) else results
        name = self.name[ops]
        plain = np.array([self.key_id(("op", n)) for n in name.tolist()], dtype=np.int64)
        keys = zip(name.tolist(), sizes.tolist(), self._forms[ops].tolist(), strict=True)
        sized = np.array([self.key_id(key) for key in keys], dtype=np.int64)
        strict = np.full(len(ops), -1, dtype=np.int64)
        if fingerprints:
            bits = np.asarray(self.fingerprints)[results].tolist()
            named = zip(name.tolist(), bits, strict=True)
            strict = np.array([self.key_id((n, "bits", b)) if b else -1 for n, b in named], dtype=np.int64)
        return [strict, sized, plain]

    @cached_property
    def _forms(self) -> NDArray[np.int64]:
        """A number for the constants of each op; equal constants have equal numbers on both sides."""
        ids = np.array([self.key_id(("form", repr(form))) for form in self.data.forms] or [0], dtype=np.int64)
        return ids[self.data.ops.form] if len(self.data.ops) else ids[:0]

    # -- parameters ----------------------------------------------------------------------------

    @cached_property
    def _used_values(self) -> NDArray[np.bool_]:
        """Which values are inputs of ops in the span, in all of the recording all values."""
        ops = self.data.ops
        if (self.span.first_op, self.span.end_op) == (0, len(ops)):
            return np.ones(len(self.data.values), dtype=np.bool_)
        used = np.zeros(len(self.data.values), dtype=np.bool_)
        used[ops.inputs[ops.input_offsets[self.span.first_op] : ops.input_offsets[self.span.end_op]]] = True
        return used

    @cached_property
    def parameters(self) -> dict[str, tuple[ParameterInfo, int]]:
        """Every parameter and buffer by its path, with its first value in the span, or -1."""
        named: dict[str, int] = {}
        names, values = self.data.names, self.data.values
        weights = np.isin(values.kind, [KINDS.index("parameter"), KINDS.index("buffer")]) & (values.name >= 0)
        used = self._used_values
        for value in np.flatnonzero(weights).tolist():
            path = names[int(values.name[value])]
            first = named.setdefault(path, value)
            better = (bool(used[value]), self.stat_row[value] >= 0)
            if better > (bool(used[first]), self.stat_row[first] >= 0):
                named[path] = value
        by_key: dict[int, int] = {}
        for module in self.data.modules:
            for info in module.parameters:
                if info.path in named:
                    by_key.setdefault(info.key, named[info.path])
        return {
            info.path: (info, named.get(info.path, by_key.get(info.key, -1)))
            for module in self.data.modules
            for info in module.parameters
        }

    @cached_property
    def usual_rounding(self) -> float:
        """The coarsest rounding among the dtypes of the parameters."""
        return max((ROUNDING.get(info.dtype, 0.0) for info, _ in self.parameters.values()), default=0.0)

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """The path of each value that is a parameter or buffer."""
        return {value: path for path, (_, value) in reversed(self.parameters.items()) if value >= 0}

    # -- modules -------------------------------------------------------------------------------

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The compared calls inside each call; those at the top are under -1."""
        first, end = self.span.first_call, self.span.end_call
        if (first, end) == (0, len(self.data.calls)):
            return self.index.calls_of_parent
        children: dict[int, list[int]] = {}
        for call in range(first, end):
            parent = int(self.data.calls.parent[call])
            children.setdefault(parent if parent >= first else -1, []).append(call)
        return children

    def module(self, call: int) -> ModuleInfo:
        return self.data.modules[int(self.data.calls.module[call])]

    def label(self, call: int) -> str:
        """The path of the module of a call, or the class of a root; "" outside every module."""
        return self.module(call).label if call >= 0 else ""

    @cached_property
    def _subtrees(self) -> dict[int, list[int]]:
        subtrees: dict[int, list[int]] = {}
        for id in range(len(self.data.modules)):
            at = id
            while at >= 0:
                subtrees.setdefault(at, []).append(id)
                at = self.data.modules[at].parent
        return subtrees

    def weights(self, module: int) -> NDArray[np.float64]:
        """The size and norm of every parameter in a module and below it, in order; NaN where not measured."""
        weights = self._weights.get(module)
        if weights is None:
            rows = []
            for inner in self._subtrees.get(module, [module]):
                for info in self.data.modules[inner].parameters:
                    if info.buffer:
                        continue
                    value = self.parameters[info.path][1]
                    numbers = self.numbers(value) if value >= 0 else None
                    rows.append((info.numel, numbers.l2 if numbers else np.nan))
            weights = self._weights[module] = np.array(rows, dtype=np.float64).reshape(-1, 2)
        return weights


def _numbers(column: NDArray[Any]) -> memoryview[Any]:
    """A column whose items are plain numbers: nearly as fast as a list, in a fifth of its memory."""
    return np.ascontiguousarray(column).data
