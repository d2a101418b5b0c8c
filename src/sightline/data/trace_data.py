"""`TraceData`: one recording as columns (`sightline.schema`) and small tables. Built once, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sightline.data.forms import Form
from sightline.data.source_files import SourceFiles
from sightline.notation import tensor_text
from sightline.schema.columns import COLUMN_TABLES, F64, I8, I32, I64, U64, Columns
from sightline.schema.tables import (
    EVALUATION,
    FLAVOURS,
    KINDS,
    LEVELS,
    MUTATES,
    NO_GRAD,
    PHASES,
    RAISED,
    REQUIRES_GRAD,
    TRAINING,
    UNCOUNTED,
    UNFINISHED,
    WORK_KINDS,
    AllocationColumns,
    CallColumns,
    DeviceWorkColumns,
    FrameColumns,
    OpColumns,
    StatColumns,
    TensorLists,
    ValueColumns,
)

__all__ = [
    "COLUMN_TABLES",
    "EVALUATION",
    "F64",
    "FLAVOURS",
    "I8",
    "I32",
    "I64",
    "KIND",
    "KINDS",
    "LEVELS",
    "MUTATES",
    "NO_GRAD",
    "OPTIMIZER_STEP",
    "PHASES",
    "RAISED",
    "REQUIRES_GRAD",
    "ROLES",
    "TRAINING",
    "U64",
    "UNCOUNTED",
    "UNFINISHED",
    "WORK_KINDS",
    "AllocationColumns",
    "CallColumns",
    "CaptureInfo",
    "CodeInfo",
    "Columns",
    "DeviceWorkColumns",
    "FileInfo",
    "FrameColumns",
    "ModuleInfo",
    "OpColumns",
    "ParameterInfo",
    "StatColumns",
    "StepInfo",
    "TensorLists",
    "TensorMeta",
    "TraceData",
    "ValueColumns",
]

KIND: Final = {name: number for number, name in enumerate(KINDS)}  #: the position of each

#: Where a warning came from: any Python code, a function of torch in Python before its ops, an op in C++.
FROM_PYTHON, FROM_TORCH, FROM_CPP = range(3)


#: Quantized dtypes with several elements in one item of torch.
_PACKED: Final = {"quint4x2": 2, "quint2x4": 4}


#: The bytes of a tensor, flat and read-only.
Bytes = NDArray[np.uint8]


class Store(Protocol):
    """The bytes of captured tensors by key."""

    def read(self, key: str) -> Bytes:
        """The elements of a tensor in row-major order, as a flat read-only array of bytes."""
        ...


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


#: The roles of a captured tensor: input or output of a module call, result of an op, spied, or a gradient.
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
