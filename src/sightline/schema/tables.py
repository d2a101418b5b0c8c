"""The tables of columns of a recording: ops, values, module calls, frames, statistics, memory, device work.

Ids are positions: op 7 is row 7 of every column of ``ops``. A missing reference is -1. Lists are a column of
offsets, n+1 positions into a flat column of ids.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from sightline.schema.columns import (
    F64,
    I8,
    I32,
    I64,
    U64,
    Columns,
    bits,
    choice,
    number,
    offsets,
    ref,
    table,
)

LEVELS: Final = ("api", "aten")
PHASES: Final = ("forward", "backward", "recompute", "optimizer")
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = range(4)  # positions in PHASES
#: How the user wrote an API call. Aten ops have the flavour "op"; regions that cannot be recorded, "opaque".
FLAVOURS: Final = ("function", "method", "operator", "property", "op", "opaque")
KINDS: Final = (
    "input", "parameter", "buffer", "state", "constant", "activation", "gradient", "external", "evicted",
)  # fmt: skip
#: Kinds of device work.
WORK_KINDS: Final = ("kernel", "copy", "fill")

UNCOUNTED: Final = -2  #: the FLOPs of an op that multiplies and has no formula
RAISED: Final = 1  #: the op or call ended in an exception
UNFINISHED: Final = 2  #: the recording ended before the op or call did
MUTATES: Final = 4  #: the op changed one of its inputs in place
TRAINING: Final = 8  #: the module that was called was in training mode
EVALUATION: Final = 16  #: it was in evaluation mode; recordings of earlier versions have neither flag
NO_GRAD: Final = 32  #: gradients were off when it was called
REQUIRES_GRAD: Final = 1  #: of a value

OP_FLAGS: Final = MappingProxyType({"raised": RAISED, "unfinished": UNFINISHED, "mutates": MUTATES})
CALL_FLAGS: Final = MappingProxyType({
    "raised": RAISED, "unfinished": UNFINISHED, "training": TRAINING, "evaluation": EVALUATION,
    "no_grad": NO_GRAD,
})  # fmt: skip
VALUE_FLAGS: Final = MappingProxyType({"requires_grad": REQUIRES_GRAD})


class TensorLists(Columns):
    """The common columns of ops and module calls: lists of the values each took and returned."""

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


@table("ops", "API calls and aten ops, in the order they began")
class OpColumns(TensorLists):
    """API calls and aten ops, in the order they began."""

    name: I32 = ref("names", "mm, add.Tensor, F.linear, Tensor.view, @")
    level: I8 = choice(LEVELS, "a call as the user wrote it, or an op of the dispatcher")
    flavour: I8 = choice(FLAVOURS, "how a call was written; op: an aten op, opaque: a compiled region")
    phase: I8 = choice(PHASES, "the phase it ran in; recompute: of a checkpoint")
    call: I32 = ref("calls", "its module call; a backward op has its forward's", optional=True)
    frame: I32 = ref("frames", "the position that ran it, torch's own lines included", optional=True)
    parent: I32 = ref("ops", "of an aten op, the API call it came from", optional=True, earlier=True)
    forward: I32 = ref("ops", "of a backward op, its forward op", optional=True, earlier=True)
    form: I32 = ref("forms", "its arguments", recorded=True)
    result: I32 = ref("forms", "how its results are nested")
    start: I64 = number("since the recording began", unit="ns", recorded=True)
    duration: I64 = number("host time with the ops in it, the recorder's own left out", unit="ns")
    flops: I64 = number("-1 where there is no formula, -2 where there should be one", optional=True)
    flags: I8 = bits(OP_FLAGS, "it raised, had not ended, changed an input in place")
    thread: I8 = number("which thread ran it, from 0")
    input_offsets: I64 = offsets("inputs", "where the inputs of each op begin")
    inputs: I32 = ref("values", "tensors it read")
    output_offsets: I64 = offsets("outputs", "where the outputs of each op begin")
    outputs: I32 = ref("values", "tensors it returned")


@table("values", "tensors, one row per version")
class ValueColumns(Columns):
    """Tensors, one row per version."""

    meta: I32 = ref("metas", "shape, dtype and device")
    storage: I32 = ref("storages", "its memory, which it may share with others", optional=True)
    offset: I64 = number("elements from the start of the storage", row=False)
    kind: I8 = choice(KINDS, "its role in the model")
    name: I32 = ref(
        "names", "fc1.weight of a parameter, fc1.weight.exp_avg of optimizer state", optional=True
    )
    producer: I32 = ref("ops", "the op that made it", optional=True)
    slot: I32 = number(
        "which output of its producer; -1 where another value was changed", optional=True, row=False
    )
    previous: I32 = ref(
        "values", "the value that it replaced, by an in-place op", optional=True, earlier=True
    )
    base: I32 = ref("values", "the value it is a view of", optional=True, earlier=True)
    flags: I8 = bits(VALUE_FLAGS, "it requires a gradient")


@table("calls", "calls of modules, in the order of entry")
class CallColumns(TensorLists):
    """Module calls, in the order of entry."""

    module: I32 = ref("modules", "the module that was called", recorded=True)
    index: I32 = number("which call of this module, from 0")
    parent: I32 = ref("calls", "the call around it", optional=True, earlier=True, chain=True)
    frame: I32 = ref("frames", "the source position that called it", optional=True)
    phase: I8 = choice(PHASES, "the phase it ran in")
    start: I64 = number("since the recording began", unit="ns", recorded=True)
    duration: I64 = number("host time with the calls in it, the recorder's own left out", unit="ns")
    first_op: I32 = number("its first op; the ops up to `end_op` ran inside it")
    end_op: I32 = number("the op after its last one")
    flags: I8 = bits(CALL_FLAGS, "it raised, had not ended, and the modes of the module and of autograd")
    input_form: I32 = ref("forms", "how its inputs are nested", optional=True, recorded=True)
    output_form: I32 = ref("forms", "how its outputs are nested", optional=True, recorded=True)
    input_offsets: I64 = offsets("inputs", "where the inputs of each call begin")
    inputs: I32 = ref("values", "tensors it was given")
    output_offsets: I64 = offsets("outputs", "where the outputs of each call begin")
    outputs: I32 = ref("values", "tensors it returned")
    order: I32 = number("its rank by completion: children come before their parent")


@table("frames", "source positions; a row and its parents are a stack")
class FrameColumns(Columns):
    """Source positions as a tree: a row and its parents are a stack."""

    parent: I32 = ref("frames", "the position that called it", optional=True, earlier=True, chain=True)
    code: I32 = ref("codes", "file, function and first line", row=False)
    line: I32 = number("line of the expression")
    end_line: I32 = number("its last line")
    column: I32 = number(
        "first column, from 0, in UTF-8 bytes as Python counts them", optional=True, row=False
    )
    end_column: I32 = number("last column", optional=True, row=False)


@table("stats", "statistics of the elements of a tensor, where they were measured")
class StatColumns(Columns):
    """Statistics of the elements of tensors: one row for each value that was measured.

    Minimum, maximum, mean, standard deviation and norm are over the finite elements.
    """

    value: I32 = ref("values", "the value that was measured; ascending")
    min: F64 = number("of the finite elements")
    max: F64 = number("of the finite elements")
    mean: F64 = number("of the finite elements")
    std: F64 = number("of the finite elements")
    l2: F64 = number("of the finite elements")
    zeros: I64 = number("how many")
    nans: I64 = number("how many")
    infs: I64 = number("how many")
    fingerprint: U64 = number("64 bits; 0 where none was taken")


@table(
    "allocations", "allocated memory: a row from when a storage is seen first, or resized, until it is freed"
)
class AllocationColumns(Columns):
    """Allocated memory: a row from when a storage is seen first, or resized, until it is freed.

    Storages are torch's: results that share memory although torch does not say so have one each, and a
    storage without a recorded tensor has no row.
    """

    value: I32 = ref("values", "the first value in it", optional=True)
    nbytes: I64 = number("its size", unit="bytes")
    start: I64 = number("since the recording began", unit="ns")
    end: I64 = number(
        "when it was freed; -1 if it was not before the recording ended", unit="ns", optional=True
    )


@table("device_work", 'work of devices, in the order it began; with time="device"')
class DeviceWorkColumns(Columns):
    """Work of devices (``time="device"``), in the order of start; times are ns since the recording began."""

    name: I32 = ref("names", "of the kernel, or the direction of the copy")
    kind: I8 = choice(WORK_KINDS, "the kind of work")
    device: I8 = number("which device")
    stream: I32 = number("which stream of it")
    launch: I64 = number("when the host launched it, since the recording began", unit="ns")
    start: I64 = number("since the recording began", unit="ns")
    duration: I64 = number("by the device's own clock", unit="ns")
