"""A recording as it was written down: batches of rows, and the small tables they refer to.

A *batch* is everything written between two moments. Rows are written when an op or call ends and carry the id
it was given when it began, so a row may come in a later batch than its neighbours: such a row is *late*, and
kept apart, so that whoever assembles batch after batch can have all of them from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sightline.trace.assembly.arrays import NONE, Numbers, joined
from sightline.trace.assembly.layout import COUNTS, FLOATS, LANES
from sightline.trace.data import F64, CaptureInfo, CodeInfo, FileInfo, ModuleInfo, TensorMeta
from sightline.trace.forms import Form


class Operation(NamedTuple):
    """What is known of an operation, as far as the assembly needs it."""

    name: str
    flavour: int  #: position in data.FLAVOURS
    backward: bool  #: it runs a backward pass
    relabels: bool  #: its result is a view of every element of its input
    keeps_order: bool  #: and in the same order
    counted: bool  #: its FLOPs may be known
    multiplies: bool = False  #: it does so much work that it is named where they are not


class StepMark(NamedTuple):
    """Where a step begins or ends in a recording."""

    name: str
    op: int
    time: int
    begins: bool


class Learned(NamedTuple):
    """A kind or a name of a value that became known after it was written down."""

    value: int
    kind: int  #: -1: as it was
    name: str  #: "": as it was


class SourcePosition(NamedTuple):
    """A node of the trie of frames."""

    parent: int
    code: int
    line: int
    end_line: int
    column: int
    end_column: int


#: FLOPs of (operation, form, result, metadata of the inputs, of the outputs); negative where nobody knows.
FlopsOf = Callable[[int, int, int, tuple[int, ...], tuple[int, ...]], int]
#: The operator that was written at a stack where an operation was called, or None for a plain call.
OperatorAt = Callable[[int, int], str | None]


@dataclass
class Tables:
    """The small tables of a recording; they only ever grow."""

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
    kernels: list[str] = field(default_factory=list)  #: what devices ran, by name
    info: dict[str, Any] = field(default_factory=dict)
    one_tensor: int = 0  #: the form of a single tensor
    begin: int = 0  #: the clock when the recording began
    first_sequence: int = 0  #: the number of the first autograd node
    aten_passage: int = 0  #: ns torch adds to every aten op for being watched
    api_passage: int = 0
    whole_ops: bool = False  #: autograd numbers were read when all of an op had run, its autograd part too
    fingerprint: bool = False  #: whether statistics come with the lanes of a fingerprint


def no_floats() -> F64:
    """No statistics."""
    return np.zeros((0, FLOATS))


def no_counts() -> Numbers:
    """No statistics."""
    return np.zeros((0, COUNTS + LANES), dtype=np.int64)


@dataclass
class Streams:
    """Rows as they were written."""

    ops: Numbers = field(default_factory=lambda: NONE)
    calls: Numbers = field(default_factory=lambda: NONE)
    values: Numbers = field(default_factory=lambda: NONE)
    fresh: Numbers = field(default_factory=lambda: NONE)
    floats: F64 = field(default_factory=no_floats)
    counts: Numbers = field(default_factory=no_counts)

    @classmethod
    def joined(cls, parts: list[Streams]) -> Streams:
        """One after the other."""
        return cls(
            joined([part.ops for part in parts]), joined([part.calls for part in parts]),
            joined([part.values for part in parts]), joined([part.fresh for part in parts]),
            np.concatenate([no_floats(), *(part.floats for part in parts)]),
            np.concatenate([no_counts(), *(part.counts for part in parts)]),
        )  # fmt: skip


@dataclass
class Batch:
    """Everything written between two moments."""

    rows: Streams = field(default_factory=Streams)
    late: Streams = field(default_factory=Streams)  #: rows whose place is in an earlier batch
    outputs: Numbers = field(default_factory=lambda: NONE)  #: (op, value) pairs: late outputs of opaque ops
    absent: Numbers = field(default_factory=lambda: NONE)  #: values of earlier batches that never came
    nbytes: Numbers = field(default_factory=lambda: NONE)  #: (value, bytes) of storages not made in the block
    late_nbytes: Numbers = field(default_factory=lambda: NONE)  #: the same, of values of earlier batches
    memory: Numbers = field(default_factory=lambda: NONE)  #: when storages are taken, resized and freed
    device: Numbers = field(default_factory=lambda: NONE)  #: what devices did; names by `Tables.kernels`
    alive: Numbers | None = None  #: values that may be used again; None: all
    end: int = 1 << 62  #: ids of ops and calls from here on are in later batches
    learned: list[Learned] = field(default_factory=list)
    steps: list[StepMark] = field(default_factory=list)
    captures: list[CaptureInfo] = field(default_factory=list)
    #: rows of what has begun and not ended; they count only in the last batch
    open_ops: Numbers = field(default_factory=lambda: NONE)
    open_calls: Numbers = field(default_factory=lambda: NONE)


@dataclass
class Late:
    """What later batches add to earlier ones, of a whole recording."""

    rows: Streams = field(default_factory=Streams)
    outputs: Numbers = field(default_factory=lambda: NONE)
    absent: Numbers = field(default_factory=lambda: NONE)
    nbytes: Numbers = field(default_factory=lambda: NONE)

    @classmethod
    def of(cls, batches: list[Batch]) -> Late:
        """Of batches in which only what is late needs to be there."""
        return cls(
            Streams.joined([batch.late for batch in batches]), joined([batch.outputs for batch in batches]),
            np.unique(joined([batch.absent for batch in batches])),
            joined([batch.late_nbytes for batch in batches]),
        )  # fmt: skip
