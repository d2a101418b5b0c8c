"""The tables of a recording: ops, module calls, values, modules, parameters, steps, memory, statistics …"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.cost import exclusive_call_times, exclusive_times
from sightline.analysis.lifetimes import USES
from sightline.convert.context import Lists, TableContext
from sightline.convert.encoding import json_text
from sightline.convert.stored_columns import with_stored
from sightline.convert.table_columns import (
    Column,
    Reader,
    Rows,
    Table,
    choice,
    lookup,
    number,
    record_field,
    reference,
    row_id,
    tensor_lists,
)
from sightline.data import trace_data as d
from sightline.data.device_time import device_name
from sightline.schema.columns import ABOUT

Array = NDArray[Any]
_INT: Final = "integer"
_REAL: Final = "real"
_TEXT: Final = "text"
_BOOL: Final = "boolean"


def _value_meta(context: TableContext) -> Array:
    return context.raw.values.meta


def _meta(read: Callable[[d.TensorMeta], Any]) -> Reader:
    return lookup(lambda c: c.of_metas(read), _value_meta)


def _call_module(context: TableContext) -> Array:
    return context.raw.calls.module


def _op_text(context: TableContext, rows: Rows) -> list[Any]:
    ops, meta = context.raw.ops, context.raw.values.meta
    inputs, outputs = op_inputs(context, rows), op_outputs(context, rows)
    columns = (column[rows].tolist() for column in (ops.name, ops.form, ops.result))
    metas = (lists.split(meta[lists.items].tolist()) for lists in (inputs, outputs))
    return list(map(context.op_text, *columns, *metas))


def op_inputs(context: TableContext, rows: Rows) -> Lists:
    """The values that each op took."""
    return Lists(context.raw.ops.input_offsets, context.raw.ops.inputs, rows)


def op_outputs(context: TableContext, rows: Rows) -> Lists:
    """The values that each op returned."""
    return Lists(context.raw.ops.output_offsets, context.raw.ops.outputs, rows)


def _device_time(column: Callable[[TableContext], Array | None]) -> Reader:
    """Device time; null where it was not recorded."""

    def read(context: TableContext, rows: Rows) -> list[Any]:
        spent = column(context)
        times: list[Any] = [None] * len(rows) if spent is None else spent[rows].tolist()
        return times

    return read


OPS: Final = Table(
    "ops",
    f"{ABOUT['ops']}; to count ops, choose one level",
    with_stored(
        "ops",
        Column("id", _INT, "position in the recording, from 0", row_id),
        "name", "level", "flavour", "phase",
        Column("module", _TEXT, "path of its module; of a backward op, that of its forward op",
               lookup(lambda c: c.labels, lambda c: c.index.op_modules)),
        "call",
        Column("step", _TEXT, "name of the innermost step",
               lookup(lambda c: c.step_names, lambda c: c.op_steps)),
        "parent", "forward", "start_ns",
        Column("exclusive_ns", _INT, "host time of the op alone, 0 for a call whose ops are rows: for sums",
               number(lambda c: exclusive_times(c.raw))),
        "duration_ns",
        Column("exclusive_device_ns", _INT, "device time of the op alone; with time=\"device\"",
               _device_time(lambda c: c.index.device_own)),
        Column("device_ns", _INT, "device time of the op and of the ops in it; with time=\"device\"",
               _device_time(lambda c: c.index.device_durations)),
        "flops",
        Column("inputs", _TEXT, "tensors it read: f32[2, 8], f32[8]", tensor_lists(op_inputs)),
        Column("outputs", _TEXT, "tensors it returned", tensor_lists(op_outputs)),
        Column("text", _TEXT, "mm(f32[2, 8], f32[8, 4]) -> f32[2, 4]", _op_text),
        Column("file", _TEXT, "where it is written, outside torch; of a backward op, its forward op",
               lookup(lambda c: c.files, lambda c: c.op_lines)),
        Column("line", _INT, "", lookup(lambda c: c.lines, lambda c: c.op_lines)),
        Column("function", _TEXT, "Net.forward", lookup(lambda c: c.functions, lambda c: c.op_lines)),
        Column("code", _TEXT, "the source line", lookup(lambda c: c.code, lambda c: c.op_lines)),
    ),
    lambda c: len(c.raw.ops),
)  # fmt: skip

VALUES: Final = Table(
    "values",
    ABOUT["values"],
    with_stored(
        "values",
        Column("id", _INT, "12 is written $12", row_id),
        Column("tensor", _TEXT, "f32[2, 8]", lookup(lambda c: c.metas, _value_meta)),
        Column("shape", _TEXT, "[2, 8], as JSON", _meta(lambda meta: str(list(meta.shape)))),
        Column("dtype", _TEXT, "float32", _meta(lambda meta: meta.dtype.removeprefix("torch."))),
        Column("device", _TEXT, "cpu, cuda:0", _meta(lambda meta: meta.device)),
        Column("numel", _INT, "", _meta(lambda meta: meta.numel)),
        Column("bytes", _INT, "of its elements", _meta(lambda meta: meta.nbytes)),
        "kind", "name", "producer", "slot",
        Column("module", _TEXT, "of its producer",
               lookup(lambda c: c.labels, lambda c: c.producer_modules)),
    ),
    lambda c: len(c.raw.values),
)  # fmt: skip

CALLS: Final = Table(
    "module_calls",
    ABOUT["calls"],
    with_stored(
        "calls",
        Column("id", _INT, "", row_id),
        Column("module", _TEXT, "path", lookup(lambda c: c.labels, _call_module)),
        Column("type", _TEXT, "class of the module",
               lookup(lambda c: c.of_modules(lambda module: module.type), _call_module)),
        "number", "parent",
        Column("depth", _INT, "0 for a call outside all others",
               lambda c, rows: [c.index.call_depths[row] for row in rows.tolist()]),
        "phase", "start_ns",
        Column("exclusive_ns", _INT, "host time without the calls in it: for sums",
               number(lambda c: exclusive_call_times(c.raw))),
        "duration_ns",
        Column("device_ns", _INT, "device time of its ops; with time=\"device\"",
               _device_time(lambda c: c.index.call_device_durations)),
        "first_op", "end_op",
        Column("inputs", _TEXT, "tensors it was given",
               tensor_lists(lambda c, rows: Lists(c.raw.calls.input_offsets, c.raw.calls.inputs, rows))),
        Column("outputs", _TEXT, "tensors it returned",
               tensor_lists(lambda c, rows: Lists(c.raw.calls.output_offsets, c.raw.calls.outputs, rows))),
        Column("file", _TEXT, "where it was called, outside torch",
               lookup(lambda c: c.files, lambda c: c.call_lines)),
        Column("line", _INT, "", lookup(lambda c: c.lines, lambda c: c.call_lines)),
    ),
    lambda c: len(c.raw.calls),
)  # fmt: skip


def _owners(offsets: Array, rows: Rows) -> Array:
    """The list that each row of a flat column belongs to."""
    return np.searchsorted(offsets, rows, side="right") - 1


def _linked(name: str, about: str, owner: str, of: Callable[[TableContext], Any], side: str) -> Table:
    """A row for each tensor that went into, or came out of, an op or a module call."""

    def positions(context: TableContext, rows: Rows) -> list[Any]:
        offsets = getattr(of(context), f"{side}_offsets")
        items: list[Any] = (rows - offsets[_owners(offsets, rows)]).tolist()
        return items

    return Table(
        name,
        about,
        (
            Column(owner, _INT, f"→ {'ops' if owner == 'op' else 'module_calls'}.id",
                   lambda c, rows: _owners(getattr(of(c), f"{side}_offsets"), rows).tolist()),
            Column("position", _INT, f"which of its {side}s, from 0", positions),
            Column("value", _INT, "→ values.id", number(lambda c: getattr(of(c), f"{side}s"))),
        ),
        lambda c: len(getattr(of(c), f"{side}s")),
    )  # fmt: skip


EDGES: Final = Table(
    "edges",
    "what flowed where: a row for each tensor an op read",
    (
        Column("source", _INT, "→ ops.id, the op that made it; null for what came from outside",
               reference(lambda c: c.edge_sources)),
        Column("value", _INT, "→ values.id", number(lambda c: c.raw.ops.inputs)),
        Column("target", _INT, "→ ops.id, the op that read it",
               lambda c, rows: _owners(c.raw.ops.input_offsets, rows).tolist()),
    ),
    lambda c: len(c.raw.ops.inputs),
)  # fmt: skip

INPUTS: Final = _linked("inputs", "tensors that ops read", "op", lambda c: c.raw.ops, "input")
OUTPUTS: Final = _linked("outputs", "tensors that ops returned", "op", lambda c: c.raw.ops, "output")
CALL_INPUTS: Final = _linked(
    "call_inputs", "tensors given to module calls", "call", lambda c: c.raw.calls, "input"
)
CALL_OUTPUTS: Final = _linked(
    "call_outputs", "tensors returned by module calls", "call", lambda c: c.raw.calls, "output"
)


DEVICE_WORK: Final = Table(
    "device_work",
    ABOUT["device_work"],
    with_stored(
        "device_work",
        Column("id", _INT, "", row_id),
        Column("op", _INT, "→ ops.id, the innermost op that launched it; null without one",
               reference(lambda c: c.index.device_work_ops)),
        "name", "kind",
        Column("device", _TEXT, "cuda:0",
               lambda c, rows: list(map(device_name, c.raw.device_work.device[rows].tolist()))),
    ),
    lambda c: len(c.raw.device_work),
)  # fmt: skip


def _each_frame(context: TableContext) -> Array:
    return np.arange(len(context.raw.frames))


def _module(read: Callable[[d.ModuleInfo], Any]) -> Reader:
    return record_field(lambda c: c.raw.modules, read)


def _numel(module: d.ModuleInfo, *, buffer: bool = False) -> int:
    return sum(info.numel for info in module.parameters if info.buffer == buffer)


MODULES: Final = Table(
    "modules",
    "the modules that were called, and the ones that hold them",
    (
        Column("id", _INT, "", row_id),
        Column("path", _TEXT, "blocks.0.attn; empty for the model itself", _module(lambda m: m.path)),
        Column("module", _TEXT, "the path, or the class of the model", _module(lambda m: m.label)),
        Column("type", _TEXT, "Linear", _module(lambda m: m.type)),
        Column("type_module", _TEXT, "torch.nn.modules.linear", _module(lambda m: m.type_module)),
        Column("parent", _INT, "→ modules.id", _module(lambda m: m.parent if m.parent >= 0 else None)),
        Column("extra", _TEXT, "in_features=6, out_features=6, bias=True", _module(lambda m: m.extra)),
        Column("training", _BOOL, "", _module(lambda m: m.training)),
        Column("parameters", _INT, "elements of its own parameters", _module(_numel)),
        Column("buffers", _INT, "elements of its own buffers", _module(lambda m: _numel(m, buffer=True))),
        Column("calls", _INT, "how often it was called",
               lambda c, rows: [len(c.index.calls_of_module.get(row, ())) for row in rows.tolist()]),
    ),
    lambda c: len(c.raw.modules),
)  # fmt: skip


def _owned(context: TableContext) -> list[tuple[str, d.ParameterInfo]]:
    return context.parameters


def _parameter(read: Callable[[d.ParameterInfo], Any]) -> Reader:
    return record_field(_owned, lambda pair: read(pair[1]))


PARAMETERS: Final = Table(
    "parameters",
    "parameters and buffers, by the module that owns them",
    (
        Column("path", _TEXT, "fc1.weight", _parameter(lambda p: p.path)),
        Column("module", _TEXT, "path of the module", record_field(_owned, lambda pair: pair[0])),
        Column("name", _TEXT, "weight", _parameter(lambda p: p.name)),
        Column("shape", _TEXT, "[2, 8], as JSON", _parameter(lambda p: str(list(p.shape)))),
        Column("dtype", _TEXT, "float32", _parameter(lambda p: p.dtype.removeprefix("torch."))),
        Column("numel", _INT, "", _parameter(lambda p: p.numel)),
        Column("bytes", _INT, "", _parameter(lambda p: p.nbytes)),
        Column("trainable", _BOOL, "", _parameter(lambda p: p.trainable)),
        Column("buffer", _BOOL, "it is a buffer", _parameter(lambda p: p.buffer)),
        Column("tensor", _INT, "equal for one tensor under several names", _parameter(lambda p: p.key)),
    ),
    lambda c: len(c.parameters),
)  # fmt: skip

FRAMES: Final = Table(
    "frames",
    ABOUT["frames"],
    with_stored(
        "frames",
        Column("id", _INT, "", row_id),
        "parent",
        Column("file", _TEXT, "", lookup(lambda c: c.files, _each_frame)),
        "line", "end_line", "first_column", "end_column",
        Column("function", _TEXT, "Net.forward",
               lookup(lambda c: c.functions, _each_frame)),
        Column("code", _TEXT, "the source line", lookup(lambda c: c.code, _each_frame)),
    ),
    lambda c: len(c.raw.frames),
)  # fmt: skip


def _step(read: Callable[[d.StepInfo], Any]) -> Reader:
    return record_field(lambda c: c.index.step_infos, read)


STEPS: Final = Table(
    "steps",
    "training steps, and the stretches that were named by sl.step",
    (
        Column("id", _INT, "", row_id),
        Column("name", _TEXT, "", _step(lambda s: s.name)),
        Column("first_op", _INT, "ops from this one …", _step(lambda s: s.first_op)),
        Column("end_op", _INT, "… to before this one ran in it", _step(lambda s: s.end_op)),
        Column("first_call", _INT, "module calls likewise", _step(lambda s: s.first_call)),
        Column("end_call", _INT, "", _step(lambda s: s.end_call)),
        Column("start_ns", _INT, "since the recording began", _step(lambda s: s.start)),
        Column("duration_ns", _INT, "the recorder's own time included", _step(lambda s: s.duration)),
    ),
    lambda c: len(c.index.step_infos),
)


STATS: Final = Table(
    "stats",
    ABOUT["stats"],
    with_stored(
        "stats",
        *"value min max mean std l2 zeros nans infs".split(),
        Column("fingerprint", _TEXT, "64 bits in hexadecimal; null where none was taken",
               lambda c, rows: [f"{bits:016x}" if bits else None
                                for bits in c.raw.stats.fingerprint[rows].tolist()]),
    ),
    lambda c: len(c.raw.stats),
)  # fmt: skip


STORAGES: Final = Table(
    "storages",
    "memory behind the tensors; values that share memory share one",
    (
        Column("id", _INT, "", row_id),
        Column("bytes", _INT, "", number(lambda c: c.raw.storages)),
        Column("device", _TEXT, "cpu, cuda:0",
               lookup(lambda c: c.of_metas(lambda m: m.device), lambda c: c.lifetimes.meta)),
        Column("use", _TEXT, "parameters, buffers, state, activations, gradients, other",
               choice(USES, lambda c: c.lifetimes.use)),
        Column("first_used_ns", _INT, "since the recording began",
               reference(lambda c: c.lifetimes.first)),
        Column("last_used_ns", _INT, "parameters, buffers and state to the end",
               reference(lambda c: c.lifetimes.last)),
    ),
    lambda c: len(c.raw.storages),
)  # fmt: skip


def _capture(read: Callable[[d.CaptureInfo], Any]) -> Reader:
    return record_field(lambda c: c.raw.captures, read)


TENSORS: Final = Table(
    "tensors",
    "the tensors that were kept, without their elements",
    (
        Column("key", _TEXT, "step0/blocks.0.attn/output/0/0", _capture(lambda c: c.key)),
        Column("step", _TEXT, "", _capture(lambda c: c.step)),
        Column("module", _TEXT, "path", _capture(lambda c: c.module)),
        Column(
            "name", _TEXT, "input, output, the op, or the name it was spied under", _capture(lambda c: c.name)
        ),
        Column("call", _INT, "which time, from 0", _capture(lambda c: c.call)),
        Column("slot", _INT, "which tensor of it", _capture(lambda c: c.slot)),
        Column("role", _TEXT, "input, output, op, spy, gradient", _capture(lambda c: c.role)),
        Column("value", _INT, "→ values.id", _capture(lambda c: c.value if c.value >= 0 else None)),
        Column("shape", _TEXT, "as kept, as JSON", _capture(lambda c: str(list(c.shape)))),
        Column("dtype", _TEXT, "as kept", _capture(lambda c: c.dtype.removeprefix("torch."))),
        Column("whole", _BOOL, "false if only a sample was kept", _capture(lambda c: c.whole)),
    ),
    lambda c: len(c.raw.captures),
)

INFO: Final = Table(
    "info",
    "facts about the recording as a whole",
    (
        Column("key", _TEXT, "name, ops, torch, exception …", record_field(lambda c: list(c.raw.info), str)),
        Column("value", _TEXT, "as JSON", record_field(lambda c: list(c.raw.info.values()), json_text)),
    ),
    lambda c: len(c.raw.info),
)


#: Every table by its name, in the order they are listed.
TABLES: Final = {
    table.name: table
    for table in (
        OPS, CALLS, MODULES, PARAMETERS, VALUES, INPUTS, OUTPUTS,
        CALL_INPUTS, CALL_OUTPUTS, EDGES, DEVICE_WORK, STORAGES, STATS,
        STEPS, FRAMES, TENSORS, INFO,
    )
}  # fmt: skip
#: Other names for the same tables. VALUES is a word of SQL: it needs quotes there.
ALIASES: Final = {"calls": "module_calls", "vals": "values"}
