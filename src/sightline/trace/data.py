"""`TraceData`: one recording as numpy columns and small plain tables. Built once, never changed.

Ids are positions: op 7 is row 7 of every column of ``ops``. A missing reference is -1. One-to-many
columns are an ``*_offsets`` array of n+1 positions into a flat array of ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sightline.notation import tensor_text
from sightline.trace.forms import Form
from sightline.trace.source_files import SourceFiles

if TYPE_CHECKING:
    from sightline.trace.shards.stores import Store

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

LEVELS: Final = ("api", "aten")
PHASES: Final = ("forward", "backward", "recompute", "optimizer")
#: How the user wrote an API call. Aten ops have the flavour "op"; regions that cannot be recorded, "opaque".
FLAVOURS: Final = ("function", "method", "operator", "property", "op", "opaque")
KINDS: Final = (
    "input", "parameter", "buffer", "state", "constant", "activation", "gradient", "external", "evicted",
)  # fmt: skip
KIND: Final = {name: number for number, name in enumerate(KINDS)}  #: the position of each

UNCOUNTED: Final = -2  #: the FLOPs of an op that multiplies and has no formula
RAISED: Final = 1  #: the op or call ended in an exception
UNFINISHED: Final = 2  #: the recording ended before the op or call did
MUTATES: Final = 4  #: the op changed one of its inputs in place
TRAINING: Final = 8  #: the module that was called was in training mode
EVALUATION: Final = 16  #: it was in evaluation mode; recordings of earlier versions have neither flag
NO_GRAD: Final = 32  #: gradients were off when it was called
REQUIRES_GRAD: Final = 1  #: of a value


#: Quantized dtypes with several elements in what torch calls an item.
_PACKED: Final = {"quint4x2": 2, "quint2x4": 4}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype, device and layout, stored once for all tensors that have them in common."""

    shape: tuple[int, ...]  #: -1: it differs between the parts of a nested tensor, or is a symbol of any size
    stride: tuple[int, ...] | None
    dtype: str
    device: str
    layout: str = "strided"
    itemsize: int = 4
    type: str = "Tensor"  #: the Python class, for tensor subclasses
    elements: int = -1  #: the number of elements of a nested tensor, which its sizes do not give
    symbols: tuple[str, ...] = ()  #: the sizes as torch prints them, where one is a symbol: ``s26``, ``j1``
    placements: tuple[str, ...] = ()  #: of a DTensor, one for each dimension of its mesh: ``Shard(0)``

    @property
    def sizes(self) -> tuple[int | str, ...]:
        """The sizes to print: numbers, or symbols where torch has those."""
        return self.symbols or self.shape

    @property
    def numel(self) -> int:
        if self.elements >= 0:
            return self.elements
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, as if stored densely."""
        if min(self.shape, default=0) < 0 and self.elements < 0:  # of a recording without counts
            return 0
        return -(-self.numel * self.itemsize // _PACKED.get(self.dtype, 1))

    def __str__(self) -> str:
        text = tensor_text(self.sizes, self.dtype, self.device, self.layout)
        return " ".join((text, *self.placements)) if self.placements else text


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """A Python code object: its file, its name and its first line."""

    file: str
    function: str  #: qualified name: ``Net.forward``
    first_line: int


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The state of a source file when the trace was built, to tell later whether it changed."""

    mtime_ns: int
    size: int


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter or buffer that a module owns."""

    name: str  #: the name inside its module: ``weight``
    path: str  #: the name inside the model: ``fc1.weight``
    shape: tuple[int, ...]
    dtype: str
    numel: int
    nbytes: int
    trainable: bool
    buffer: bool
    key: int  #: equal for one tensor under several names, so that it can be counted once


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A module that was called, or that contains one that was."""

    path: str  #: relative to its root; the root's own path is ""
    aliases: tuple[str, ...]  #: every path under which a shared module is registered, the first included
    type: str
    type_module: str  #: where the class is defined: ``torch.nn.modules.linear``
    parent: int
    extra: str  #: ``extra_repr()``: ``in_features=6, out_features=6, bias=True``
    training: bool
    root: int  #: id of the root module it belongs to; its own id for a root
    parameters: tuple[ParameterInfo, ...] = ()

    @property
    def label(self) -> str:
        """The path, or the class name for a root."""
        return self.path or self.type


#: The dtype of a column by the name its annotation has.
_COLUMN_DTYPES: Final = {"I8": "<i1", "I32": "<i4", "I64": "<i8", "U64": "<u8", "F64": "<f8"}


class Columns:
    """A table as columns: the base of dataclasses whose fields are arrays, all with one entry per row."""

    @classmethod
    def dtypes(cls) -> dict[str, str]:
        """The dtype of each column.

        >>> FrameColumns.dtypes()["line"], OpColumns.dtypes()["input_offsets"]
        ('<i4', '<i8')
        """
        return {one.name: _COLUMN_DTYPES[str(one.type)] for one in fields(cls)}  # type: ignore[arg-type]  # it is one

    @classmethod
    def none(cls) -> Self:
        """No rows. Offsets have one entry more than there are rows."""
        return cls(**{
            name: np.zeros(int(name.endswith("_offsets")), dtype) for name, dtype in cls.dtypes().items()
        })  # fmt: skip

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))


class TensorLists(Columns):
    """What ops and module calls have in common: lists of the values each took and returned."""

    input_offsets: I64
    inputs: I32
    output_offsets: I64
    outputs: I32

    def inputs_of(self, row: int) -> list[int]:
        """Ids of the values that a row took."""
        values: list[int] = self.inputs[self.input_offsets[row] : self.input_offsets[row + 1]].tolist()
        return values

    def outputs_of(self, row: int) -> list[int]:
        """Ids of the values that a row returned."""
        values: list[int] = self.outputs[self.output_offsets[row] : self.output_offsets[row + 1]].tolist()
        return values


@dataclass(frozen=True)
class OpColumns(TensorLists):
    """API calls and aten ops, in the order they began."""

    name: I32  #: into ``TraceData.names``
    level: I8
    flavour: I8
    phase: I8
    call: I32  #: the module call it ran in
    frame: I32
    parent: I32  #: the API op an aten op came from
    forward: I32  #: the forward op a backward op belongs to
    form: I32  #: its arguments, into ``TraceData.forms``
    result: I32  #: the form of its result
    start: I64  #: ns since the recording began
    duration: I64  #: ns of host time, without the recorder's own
    flops: I64  #: -1 where there is no formula; `UNCOUNTED` where there should be one
    flags: I8
    thread: I8
    input_offsets: I64
    inputs: I32
    output_offsets: I64
    outputs: I32


@dataclass(frozen=True)
class ValueColumns(Columns):
    """Tensors, one row per version."""

    meta: I32
    storage: I32
    offset: I64  #: elements from the start of the storage
    kind: I8
    name: I32  #: into ``TraceData.names``
    producer: I32
    slot: I32  #: which output of its producer
    previous: I32  #: the value this one replaced in place
    base: I32  #: the value this one is a view of
    flags: I8


@dataclass(frozen=True)
class CallColumns(TensorLists):
    """Module calls, in the order of entry."""

    module: I32
    index: I32  #: which call of this module
    parent: I32
    frame: I32  #: the line that called it
    phase: I8
    start: I64
    duration: I64
    first_op: I32  #: ops [first_op, end_op) ran inside it
    end_op: I32
    flags: I8
    input_form: I32
    output_form: I32
    input_offsets: I64
    inputs: I32
    output_offsets: I64
    outputs: I32
    order: I32  #: rank by completion


@dataclass(frozen=True)
class FrameColumns(Columns):
    """Source positions as a tree: a row and its parents are a stack."""

    parent: I32
    code: I32
    line: I32
    end_line: I32
    column: I32  #: 0-based, in UTF-8 bytes, as Python counts them; -1 unknown
    end_column: I32


@dataclass(frozen=True)
class StatColumns(Columns):
    """Statistics of the elements of tensors: one row for each value that was measured.

    Minimum, maximum, mean, standard deviation and norm are over the finite elements.
    """

    value: I32  #: into ``values``, ascending
    min: F64
    max: F64
    mean: F64
    std: F64
    l2: F64
    zeros: I64
    nans: I64
    infs: I64
    fingerprint: U64  #: 0 where none was taken


@dataclass(frozen=True)
class AllocationColumns(Columns):
    """Allocated memory: a row from when a storage is seen first, or resized, until it is freed.

    Storages are torch's: results that share memory although torch does not say so have one each, and a
    storage without a recorded tensor has no row.
    """

    value: I32  #: the first value in it; -1 if that is unknown
    nbytes: I64
    start: I64  #: ns since the recording began
    end: I64  #: the same; -1 if it was not freed before the recording ended


#: Kinds of device work.
WORK_KINDS: Final = ("kernel", "copy", "fill")


@dataclass(frozen=True)
class DeviceWorkColumns(Columns):
    """Work of devices (``time="device"``), in the order of start; times are ns since the recording began."""

    name: I32  #: into ``TraceData.names``
    kind: I8  #: into `WORK_KINDS`
    device: I8
    stream: I32
    launch: I64  #: when the host launched it
    start: I64
    duration: I64


#: The tables of columns of a `TraceData`.
COLUMN_TABLES: Final[dict[str, type[Columns]]] = {
    "ops": OpColumns,
    "values": ValueColumns,
    "calls": CallColumns,
    "frames": FrameColumns,
    "stats": StatColumns,
    "allocations": AllocationColumns,
    "device_work": DeviceWorkColumns,
}


#: The name of a stretch in which an optimizer stepped; ``sl.step`` accepts no empty name.
OPTIMIZER_STEP: Final = ""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A stretch of the run: ``with sl.step("step0"):``, or the step of an optimizer."""

    name: str  #: `OPTIMIZER_STEP` where an optimizer stepped
    first_op: int  #: ops [first_op, end_op) ran in it
    end_op: int
    first_call: int  #: and module calls [first_call, end_call)
    end_call: int
    start: int  #: ns since the recording began
    duration: int


#: What a captured tensor is: input or output of a module call, result of an op, spied, or a gradient.
ROLES: Final = ("input", "output", "op", "spy", "gradient")


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """A captured tensor, and where it belongs."""

    step: str  #: "" outside every step
    module: str  #: label of the module: its path, or the class of a root; "" outside every module
    name: str  #: "input", "output", the op, or its name in ``sl.spy``; a gradient's ends in ``.grad``
    call: int  #: how many captures of this name in this module came before
    slot: int  #: the index of the tensor in a nested value
    role: str
    path: str  #: its path in a nested value: ``[0]``, ``.logits``
    value: int  #: into ``values``; -1 if unknown
    shape: tuple[int, ...]  #: as stored
    dtype: str  #: as stored, by torch's name
    whole: bool = True  #: False if only a sample of its elements is stored

    @property
    def key(self) -> str:
        """``step0/blocks.0.attn/output/0/0``, without empty parts."""
        return "/".join((*filter(None, (self.step, self.module, self.name)), f"{self.call}/{self.slot}"))


@dataclass(frozen=True)
class TraceData:
    """Everything a view needs, and nothing that needs torch."""

    ops: OpColumns
    values: ValueColumns
    calls: CallColumns
    frames: FrameColumns
    modules: list[ModuleInfo]
    codes: list[CodeInfo]
    files: dict[str, FileInfo]
    metas: list[TensorMeta]
    forms: list[Form]
    names: list[str]
    storages: I64  #: bytes of each storage
    schemas: dict[str, tuple[str, ...]] = field(default_factory=dict)  #: op -> ``self``, ``alpha=1`` …
    info: dict[str, Any] = field(default_factory=dict)  #: name, ops level, versions, faults, exception …
    stats: StatColumns = field(default_factory=StatColumns.none)
    allocations: AllocationColumns = field(default_factory=AllocationColumns.none)
    device_work: DeviceWorkColumns = field(default_factory=DeviceWorkColumns.none)
    steps: list[StepInfo] = field(default_factory=list)
    captures: list[CaptureInfo] = field(default_factory=list)
    store: Store | None = None  #: where the bytes of the captures are
    source_lines: SourceFiles = field(default_factory=SourceFiles)  #: the text that the frames point into


class Reference(NamedTuple):
    """What the ids of a column point at."""

    label: str  #: for messages: ``name of op``
    low: int  #: the smallest id: -1 where a row may refer to nothing
    target: str | int  #: a table of `TraceData`, or the number of choices


#: Every column of ids, by table and column.
REFERENCES: Final[dict[tuple[str, str], Reference]] = {
    ("ops", "name"): Reference("name of op", 0, "names"),
    ("ops", "level"): Reference("level of op", 0, len(LEVELS)),
    ("ops", "flavour"): Reference("flavour of op", 0, len(FLAVOURS)),
    ("ops", "phase"): Reference("phase of op", 0, len(PHASES)),
    ("ops", "call"): Reference("module call of op", -1, "calls"),
    ("ops", "frame"): Reference("frame of op", -1, "frames"),
    ("ops", "parent"): Reference("parent of op", -1, "ops"),
    ("ops", "forward"): Reference("forward op of op", -1, "ops"),
    ("ops", "form"): Reference("arguments of op", 0, "forms"),
    ("ops", "result"): Reference("result of op", 0, "forms"),
    ("ops", "inputs"): Reference("op input", 0, "values"),
    ("ops", "outputs"): Reference("op output", 0, "values"),
    ("values", "meta"): Reference("metadata of value", 0, "metas"),
    ("values", "storage"): Reference("storage of value", -1, "storages"),
    ("values", "kind"): Reference("kind of value", 0, len(KINDS)),
    ("values", "name"): Reference("name of value", -1, "names"),
    ("values", "producer"): Reference("producer of value", -1, "ops"),
    ("values", "previous"): Reference("previous version of value", -1, "values"),
    ("values", "base"): Reference("base of value", -1, "values"),
    ("calls", "module"): Reference("module of call", 0, "modules"),
    ("calls", "parent"): Reference("parent of call", -1, "calls"),
    ("calls", "frame"): Reference("frame of call", -1, "frames"),
    ("calls", "phase"): Reference("phase of call", 0, len(PHASES)),
    ("calls", "input_form"): Reference("input form of call", -1, "forms"),
    ("calls", "output_form"): Reference("output form of call", -1, "forms"),
    ("calls", "inputs"): Reference("call input", 0, "values"),
    ("calls", "outputs"): Reference("call output", 0, "values"),
    ("frames", "parent"): Reference("parent of frame", -1, "frames"),
    ("frames", "code"): Reference("code of frame", 0, "codes"),
    ("stats", "value"): Reference("value of statistics", 0, "values"),
    ("allocations", "value"): Reference("value of allocation", -1, "values"),
    ("device_work", "name"): Reference("name of device work", 0, "names"),
    ("device_work", "kind"): Reference("kind of device work", 0, len(WORK_KINDS)),
}
