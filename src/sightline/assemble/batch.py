"""A recording as the recorder wrote it: batches of rows, and the small tables they refer to.

A *batch* is everything written between two moments. A row is written when its op or call ends and carries the
id assigned when that began, so it may come in a later batch than its neighbours. Such *late* rows are kept
apart, so that the assembler, which takes batch after batch, has all of them from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sightline.data.arrays import EMPTY, IntArray, concatenate
from sightline.data.forms import Form
from sightline.data.trace_data import F64, CaptureInfo, CodeInfo, FileInfo, ModuleInfo, TensorMeta
from sightline.schema.streams import COUNTS, END, FLOATS, LANES


class Operation(NamedTuple):
    """The properties of an operation that the assembly needs."""

    name: str
    flavour: int  #: position in data.FLAVOURS
    backward: bool  #: it runs a backward pass
    relabels: bool  #: its result is a view of every element of its input
    keeps_order: bool  #: and in the same order
    counted: bool  #: its FLOPs may be known
    multiplies: bool = False  #: it does so much work that a missing formula is reported


class StepMark(NamedTuple):
    """The begin or the end of a step."""

    name: str
    op: int
    time: int
    begins: bool


class ValueUpdate(NamedTuple):
    """A kind or a name of a value that became known after its row was written."""

    value: int
    kind: int  #: -1: unchanged
    name: str  #: "": unchanged


class SourcePosition(NamedTuple):
    """A node of the tree of frames: a position in the source, reached from its parent."""

    parent: int
    code: int
    line: int
    end_line: int
    column: int
    end_column: int


#: FLOPs of (operation, form, result, metadata of the inputs, of the outputs); negative where unknown.
FlopsOf = Callable[[int, int, int, tuple[int, ...], tuple[int, ...]], int]
#: The operator symbol in the source at a stack that called an operation; None for a plain call.
OperatorAt = Callable[[int, int], str | None]


@dataclass
class Tables:
    """The small tables of a recording; rows are only ever appended."""

    flops: FlopsOf
    operator: OperatorAt
    operations: list[Operation] = field(default_factory=list)
    metas: list[TensorMeta] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)
    places: list[SourcePosition] = field(default_factory=list)
    codes: list[CodeInfo] = field(default_factory=list)
    files: dict[str, FileInfo] = field(default_factory=dict)
    modules: list[ModuleInfo] = field(default_factory=list)
    schemas: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)  #: names of device work
    info: dict[str, Any] = field(default_factory=dict)
    one_tensor: int = 0  #: the form of a single tensor
    begin: int = 0  #: the clock when the recording began
    first_sequence: int = 0  #: the number of the first autograd node
    sequences: dict[int, int] = field(default_factory=dict)  #: thread -> its autograd number at the first row
    gaps: list[int] = field(default_factory=list)  #: ids before which rows were lost
    aten_passage: int = 0  #: ns that torch adds to every observed aten op
    api_passage: int = 0
    whole_ops: bool = False  #: autograd numbers were read after the whole op, its autograd part included
    lost_captures: frozenset[str] = frozenset()  #: keys of tensors that could not be written
    fingerprint: bool = False  #: whether statistics include the lanes of a fingerprint


def no_floats() -> F64:
    """An empty table of statistics."""
    return np.zeros((0, FLOATS))


def no_counts() -> IntArray:
    """An empty table of counts."""
    return np.zeros((0, COUNTS + LANES), dtype=np.int64)


@dataclass
class Streams:
    """Rows as they were written."""

    ops: IntArray = field(default_factory=lambda: EMPTY)
    calls: IntArray = field(default_factory=lambda: EMPTY)
    values: IntArray = field(default_factory=lambda: EMPTY)
    fresh: IntArray = field(default_factory=lambda: EMPTY)
    floats: F64 = field(default_factory=no_floats)
    counts: IntArray = field(default_factory=no_counts)

    @classmethod
    def concatenate(cls, parts: list[Streams]) -> Streams:
        """Several as one, in order."""
        return cls(
            concatenate([part.ops for part in parts]), concatenate([part.calls for part in parts]),
            concatenate([part.values for part in parts]), concatenate([part.fresh for part in parts]),
            np.concatenate([no_floats(), *(part.floats for part in parts)]),
            np.concatenate([no_counts(), *(part.counts for part in parts)]),
        )  # fmt: skip


@dataclass
class Batch:
    """Everything written between two moments."""

    rows: Streams = field(default_factory=Streams)
    late: Streams = field(default_factory=Streams)  #: rows that belong to earlier batches
    outputs: IntArray = field(default_factory=lambda: EMPTY)  #: (op, value) pairs: late outputs of opaque ops
    absent: IntArray = field(default_factory=lambda: EMPTY)  #: ids of earlier batches without a value
    #: (value, bytes) of storages not made in the block
    nbytes: IntArray = field(default_factory=lambda: EMPTY)
    late_nbytes: IntArray = field(default_factory=lambda: EMPTY)  #: the same, of values of earlier batches
    memory: IntArray = field(default_factory=lambda: EMPTY)  #: allocations, resizes and frees of storages
    device: IntArray = field(default_factory=lambda: EMPTY)  #: work of devices; names index `Tables.kernels`
    alive: IntArray | None = None  #: values that may be used again; None: all
    end: int = END  #: ids of ops and calls from here on are in later batches
    updates: list[ValueUpdate] = field(default_factory=list)
    steps: list[StepMark] = field(default_factory=list)
    captures: list[CaptureInfo] = field(default_factory=list)
    #: rows of ops and calls that have not ended; only those of the last batch count
    open_ops: IntArray = field(default_factory=lambda: EMPTY)
    open_calls: IntArray = field(default_factory=lambda: EMPTY)


@dataclass
class LateRows:
    """The rows that later batches add to earlier ones, for a whole recording."""

    rows: Streams = field(default_factory=Streams)
    outputs: IntArray = field(default_factory=lambda: EMPTY)
    absent: IntArray = field(default_factory=lambda: EMPTY)
    nbytes: IntArray = field(default_factory=lambda: EMPTY)

    @classmethod
    def of(cls, batches: list[Batch]) -> LateRows:
        """Collected from batches, of which only the late parts are read."""
        return cls(
            Streams.concatenate([batch.late for batch in batches]),
            concatenate([batch.outputs for batch in batches]),
            np.unique(concatenate([batch.absent for batch in batches])),
            concatenate([batch.late_nbytes for batch in batches]),
        )
